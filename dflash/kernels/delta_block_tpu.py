"""Pallas kernels of gated DeltaNet in block decoding; see delta_block.py for their semantics.

A grid step processes the rows of one sequence and a group of key heads with their value heads. The
columns of a group are blocks of one width: its queries, its keys, and one block of values and of
gates for each value head per key head. So every block begins at a multiple of its width, and the
kernel reads the joined projection as it is.

Rows are padded to a whole tile. A padded row has no rate, no decay and no ancestors, so nothing
depends on it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dflash.kernels import flash_tpu
from dflash.kernels.flash_tpu import dot, dot_columns
from dflash.kernels.gated_delta import ancestors

OP = "delta_block"
UNIT_EPS = 1e-6  # Of the norms of queries and keys.
ROW_TILE = 16  # Rows of a memory tile of bfloat16.
MAX_ROWS = 64  # The triangular system is solved by code for each row.
GROUP = 4  # Key heads per grid step, at most.
LEAD = 8  # Rows before the block in VMEM, a whole tile, of which the last W - 1 are read.


class DeltaTiling:
    """Shapes of one call: its groups of heads and their blocks.

    Attributes:
      rows: Rows of a block, T.
      padded: Rows with padding.
      group: Key heads per grid step.
      steps: Groups of key heads.
      ratio: Value heads per key head.
      unit: Columns of a block.
    """

    def __init__(self, rows, memory, channels: int):
        self.batch, self.rows = rows.shape[:2]
        self.heads, self.width = memory.shape[1], memory.shape[3]
        self.padded = -(-self.rows // ROW_TILE) * ROW_TILE
        self.key_heads = (channels // self.width - self.heads) // 2
        self.group = next(size for size in range(GROUP, 0, -1) if self.key_heads % size == 0)
        self.steps = self.key_heads // self.group
        self.ratio = self.heads // self.key_heads
        self.unit = self.group * self.width
        self.step_heads = self.ratio * self.group

    def columns(self, parts: int):
        """Returns the index of each part of a group's columns: q, k, values, and then gates."""
        first, stride = [0, self.steps], [1, 1]
        for begin in (2 * self.steps, (2 + self.ratio) * self.steps):
            first += [begin + j for j in range(self.ratio)]
            stride += [self.ratio] * self.ratio
        return list(zip(first, stride, strict=True))[:parts]

    def row_specs(self, rows: int, parts: int) -> list[pl.BlockSpec]:
        """Returns the specs of blocks [rows, unit] of an array [B, ·, columns]."""
        return [
            pl.BlockSpec((None, rows, self.unit), lambda g, b, f=f, s=s: (b, 0, f + s * g))
            for f, s in self.columns(parts)
        ]

    def group_spec(self, *shape: int) -> pl.BlockSpec:
        """Returns the spec of a block of an array [B, groups, *shape]."""
        zeros = (0,) * len(shape)
        return pl.BlockSpec((None, None, *shape), lambda g, b: (b, g, *zeros))

    def sequence_spec(self, array) -> pl.BlockSpec:
        """Returns the spec of all entries of a sequence in an array [B, ...]."""
        zeros = (0,) * (array.ndim - 1)
        return pl.BlockSpec((None, *array.shape[1:]), lambda g, b: (b, *zeros))

    def memory_spec(self) -> pl.BlockSpec:
        """Returns the spec of the states of a group's value heads."""
        block = None, self.step_heads, self.width, self.width
        return pl.BlockSpec(block, lambda g, b: (b, g, 0, 0))

    def flat_spec(self, heads: int) -> pl.BlockSpec:
        """Returns the spec of the columns of a group's heads in an array [B, T, columns]."""
        return pl.BlockSpec((None, self.padded, heads * self.width), lambda g, b: (b, 0, g))

    def by_group(self, x: jax.Array) -> jax.Array:
        """Pads [B, T, V] with zeros, and reshapes it to [B, groups, padded, heads of a group]."""
        x = jnp.pad(x, ((0, 0), (0, self.padded - self.rows), (0, 0)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], self.steps, -1), 2, 1)

    def pad_mask(self, mask: jax.Array) -> jax.Array:
        """Pads bool [B, T, T] with False; returns float32 [B, padded, padded]."""
        extra = 0, self.padded - self.rows
        return jnp.pad(mask.astype(jnp.float32), ((0, 0), extra, extra))

    def clear(self, x: jax.Array) -> jax.Array:
        """Replaces padded rows by zeros, since what was read there is undefined."""
        if self.rows == self.padded:
            return x
        row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
        return jnp.where(row < self.rows, x, 0)


def verify_block_tpu(
    rows, log_decay, beta, conv, scale, memory, before, ancestry, *, eps: float, interpret
):
    """Computes `verify_block`; returns outputs, keys, updates and decays."""
    tiling = DeltaTiling(rows, memory, conv.shape[0])
    mixed, parts = 2 + tiling.ratio, 2 + 2 * tiling.ratio
    taps = conv.shape[1]
    rates = [tiling.by_group(x) for x in (log_decay, beta)]
    masks = [] if ancestry is None else [tiling.pad_mask(ancestry), _taps(tiling, ancestry, taps)]
    convs = [
        pl.BlockSpec((taps, tiling.unit), lambda g, b, f=f, s=s: (0, f + s * g))
        for f, s in tiling.columns(mixed)
    ]
    key_heads, heads, padded = tiling.group, tiling.step_heads, tiling.padded
    shape = tiling.batch, tiling.rows
    outputs = pl.pallas_call(
        functools.partial(_verify_kernel, tiling=tiling, eps=eps, taps=taps),
        grid=(tiling.steps, tiling.batch),
        in_specs=[
            *tiling.row_specs(padded, parts),
            *tiling.row_specs(taps - 1, mixed),
            *convs,
            *[tiling.group_spec(padded, heads)] * 2,
            pl.BlockSpec((1, tiling.width), lambda g, b: (0, 0)),
            tiling.memory_spec(),
            *map(tiling.sequence_spec, masks),
        ],
        out_specs=[tiling.flat_spec(heads), tiling.flat_spec(key_heads), tiling.flat_spec(heads)],
        out_shape=[
            jax.ShapeDtypeStruct((*shape, tiling.heads * tiling.width), rows.dtype),
            jax.ShapeDtypeStruct((*shape, tiling.key_heads * tiling.width), jnp.float32),
            jax.ShapeDtypeStruct((*shape, tiling.heads * tiling.width), jnp.float32),
        ],
        scratch_shapes=[pltpu.VMEM((mixed, LEAD + padded, tiling.unit), jnp.float32)],
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=_cost(tiling, rows, memory, passes=1),
        interpret=interpret,
        name=f"{OP}_verify_t{tiling.rows}",
    )(
        *[rows] * parts,
        *[before] * mixed,
        *[conv.T.astype(jnp.float32)] * mixed,
        *rates,
        scale[None].astype(jnp.float32),
        memory,
        *masks,
    )
    return *outputs, log_decay


def commit_block_tpu(memory, before, keys, updates, log_decay, rows, count, path, *, interpret):
    """Computes `commit_block`."""
    tiling = DeltaTiling(rows, memory, before.shape[-1])
    accepted = jnp.arange(tiling.padded) < count[:, None]
    if path is not None:
        at_depth = jnp.arange(path.shape[1]) < count[:, None]
        row = jnp.arange(tiling.padded)[:, None]
        accepted = ((path[:, None] == row) & at_depth[:, None]).any(axis=-1)
    accepted = accepted[..., None].astype(jnp.float32)
    taps = before.shape[1] + 1
    chosen = _latest(tiling, count, path, taps - 1, before.dtype)
    share = before.shape[-1] // tiling.steps
    columns = pl.BlockSpec((None, taps - 1, share), lambda g, b: (b, 0, g))
    return pl.pallas_call(
        functools.partial(_commit_kernel, tiling=tiling, taps=taps),
        grid=(tiling.steps, tiling.batch),
        in_specs=[
            tiling.memory_spec(),
            columns,
            tiling.flat_spec(tiling.group),
            tiling.flat_spec(tiling.step_heads),
            tiling.group_spec(tiling.padded, tiling.step_heads),
            pl.BlockSpec((None, tiling.padded, share), lambda g, b: (b, 0, g)),
            tiling.sequence_spec(accepted),
            tiling.sequence_spec(chosen),
        ],
        out_specs=[tiling.memory_spec(), columns],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (memory, before)],
        scratch_shapes=[pltpu.VMEM((LEAD + tiling.padded, share), jnp.float32)],
        input_output_aliases={0: 0, 1: 1},
        compiler_params=flash_tpu.compiler_params("parallel", "arbitrary"),
        cost_estimate=_cost(tiling, rows, memory, passes=2),
        interpret=interpret,
        name=f"{OP}_commit_t{tiling.rows}",
    )(memory, before, keys, updates, tiling.by_group(log_decay), rows, accepted, chosen)


def unsupported(rows, memory) -> str | None:
    """Returns why the kernels do not support a call, or None if they do."""
    length, (key_width, value_width) = rows.shape[1], memory.shape[2:]
    if key_width != value_width or key_width % flash_tpu.LANES:
        return (
            f"{OP}: heads of {key_width} × {value_width}, expected a square of a multiple of "
            f"{flash_tpu.LANES}"
        )
    if length > MAX_ROWS:
        return f"{OP}: {length} rows, expected at most {MAX_ROWS}"
    return None


def _taps(tiling: DeltaTiling, ancestry, taps: int):
    """Returns ones [B, (W - 1) · padded, LEAD + padded] where a tap reads a row in VMEM.

    The taps of the nearest ancestors come first.
    """
    extra = 0, tiling.padded - tiling.rows
    ancestry = jnp.pad(ancestry, ((0, 0), extra, extra))
    index = jnp.concatenate([ancestors(ancestry, back, LEAD) for back in range(1, taps)], axis=1)
    return jax.nn.one_hot(index, LEAD + tiling.padded, dtype=jnp.float32)


def _latest(tiling: DeltaTiling, count, path, num_rows: int, dtype):
    """Returns which of the rows in VMEM are the last ones after the accepted rows, as ones.

    Returns:
      [B, 8, LEAD + padded]; the first `num_rows` of the 8 rows count.
    """
    depth = count[:, None] - num_rows + jnp.arange(8)  # Negative before the block.
    row = depth
    if path is not None:
        on_path = jnp.take_along_axis(path, jnp.clip(depth, 0, path.shape[1] - 1), axis=1)
        row = jnp.where(depth < 0, depth, on_path)
    return jax.nn.one_hot(LEAD + row, LEAD + tiling.padded, dtype=dtype)


def _cost(tiling: DeltaTiling, rows, memory, passes: int) -> pl.CostEstimate:
    """Returns the cost of a call that reads or writes the state `passes` times."""
    return pl.CostEstimate(
        flops=4 * tiling.rows * memory.size,
        transcendentals=tiling.rows**2 * tiling.batch * tiling.heads,
        bytes_accessed=passes * memory.nbytes + 2 * rows.nbytes + 4 * rows.size,
    )


def _verify_kernel(*refs, tiling: DeltaTiling, eps: float, taps: int):
    mixed, width, padded = 2 + tiling.ratio, tiling.width, tiling.padded
    rows, refs = refs[: 2 * mixed - 2], refs[2 * mixed - 2 :]
    before, convs, refs = refs[:mixed], refs[mixed : 2 * mixed], refs[2 * mixed :]
    decay_ref, beta_ref, scale_ref, memory_ref, *masks = refs[:-4]
    outputs_ref, keys_ref, updates_ref, window_ref = refs[-4:]
    gates = rows[mixed:]

    def mix(part):
        """Returns the convolved and activated rows [padded, unit] of one block of columns."""
        window_ref[part, :LEAD] = jnp.zeros((LEAD, tiling.unit), jnp.float32)
        window_ref[part, LEAD - (taps - 1) : LEAD] = before[part][...].astype(jnp.float32)
        window_ref[part, LEAD:] = tiling.clear(rows[part][...].astype(jnp.float32))
        if masks:
            earlier = dot(masks[1][...], window_ref[part])
        total = window_ref[part, LEAD:] * convs[part][taps - 1 :]
        for back in range(1, taps):
            if masks:
                tapped = earlier[(back - 1) * padded : back * padded]
            else:
                tapped = window_ref[part, LEAD - back : LEAD - back + padded]
            total += tapped * convs[part][taps - 1 - back : taps - back]
        return jax.nn.silu(total)

    def head(x, index):
        """Returns the columns of one head."""
        return x[:, index * width : (index + 1) * width]

    queries, keys, *values = map(mix, range(mixed))
    seen = masks[0][...] if masks else _lower(padded, strict=False)
    earlier = seen * _lower(padded, strict=True)
    decay, beta = decay_ref[...], beta_ref[...]
    from_state = jnp.exp(dot(seen, decay))
    systems, rests, readings = [], [], []
    for key_head in range(tiling.group):
        key = unit(head(keys, key_head))
        keys_ref[:, key_head * width : (key_head + 1) * width] = key
        readers = jnp.concatenate([key, unit(head(queries, key_head)) * width**-0.5])
        products = dot(readers, key, transpose_b=True)
        for index in range(key_head * tiling.ratio, (key_head + 1) * tiling.ratio):
            column = slice(index, index + 1)
            part, place = divmod(index, tiling.group)
            within = seen * jnp.exp(dot(seen, earlier * decay[:, column]))
            read = dot(readers, memory_ref[index])
            rest = head(values[part], place) - from_state[:, column] * read[:padded]
            systems.append(beta[:, column] * products[:padded] * within * earlier)
            rests.append(beta[:, column] * rest)
            readings.append((from_state[:, column] * read[padded:], products[padded:] * within))
    updates = _solve(systems, rests, tiling.rows)
    for index, (update, (read, weights)) in enumerate(zip(updates, readings, strict=True)):
        columns = slice(index * width, (index + 1) * width)
        part, place = divmod(index, tiling.group)
        output = read + dot(weights, update)
        output *= jax.lax.rsqrt(jnp.mean(output * output, axis=-1, keepdims=True) + eps)
        gate = jax.nn.silu(head(gates[part], place).astype(jnp.float32))
        updates_ref[:, columns] = update
        outputs_ref[:, columns] = (output * scale_ref[...] * gate).astype(outputs_ref.dtype)


def _solve(systems, rests, rows: int):
    """Solves (1 + system) x = rest of every head, with system [R, R] strictly lower.

    Heads are in the inner loop, so that the unit that broadcasts columns never waits.
    """
    size = 8  # Rows of a register.
    tiles = [[rest[i : i + size] for i in range(0, len(rest), size)] for rest in rests]
    for row in range(rows - 1):
        first, place = divmod(row, size)
        for system, solution in zip(systems, tiles, strict=True):
            solved = solution[first][place : place + 1]
            for tile in range(first, len(solution)):
                factors = system[tile * size : (tile + 1) * size, row : row + 1]
                solution[tile] = solution[tile] - factors * solved
    return [jnp.concatenate(solution) for solution in tiles]


def _commit_kernel(
    memory_ref, before_ref, keys_ref, updates_ref, decay_ref, rows_ref, accepted_ref, chosen_ref,
    new_memory_ref, new_before_ref, window_ref, *, tiling: DeltaTiling, taps: int,
):  # fmt: skip
    width, accepted = tiling.width, accepted_ref[...] > 0
    decay = jnp.where(accepted, decay_ref[...], 0)
    # Each update decays by the rows after its own, and a path's rows are in order.
    after = dot(1 - _lower(tiling.padded, strict=False), decay)
    factors, total = jnp.exp(after), jnp.exp(jnp.sum(decay, axis=0, keepdims=True))
    for key_head in range(tiling.group):
        columns = slice(key_head * width, (key_head + 1) * width)
        key = jnp.where(accepted, keys_ref[:, columns], 0)
        for index in range(key_head * tiling.ratio, (key_head + 1) * tiling.ratio):
            column = slice(index, index + 1)
            update = jnp.where(accepted, updates_ref[:, index * width : (index + 1) * width], 0)
            added = dot_columns(key, update * factors[:, column])
            new_memory_ref[index] = total[:, column] * memory_ref[index] + added
    window_ref[:LEAD] = jnp.zeros((LEAD, window_ref.shape[1]), jnp.float32)
    window_ref[LEAD - (taps - 1) : LEAD] = before_ref[...].astype(jnp.float32)
    window_ref[LEAD:] = jnp.where(accepted, rows_ref[...].astype(jnp.float32), 0)
    latest = dot(chosen_ref[...], window_ref[...].astype(chosen_ref.dtype))
    new_before_ref[...] = latest[: taps - 1].astype(new_before_ref.dtype)


def _lower(size: int, *, strict: bool):
    """Returns a lower triangle of ones, float32 [size, size]; without its diagonal if strict."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return (row > column if strict else row >= column).astype(jnp.float32)


def unit(x: jax.Array) -> jax.Array:
    """Scales rows x [..., width] to a length of 1."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + UNIT_EPS)
