"""Static schedules of paged attention, of this package and of jax, by the TPU compiler.

    python -m experiments.kernel_bundles [TOPOLOGY]
    python -m experiments.kernel_bundles TOPOLOGY latent   # latent attention, at Kimi K2's shapes
    python -m experiments.kernel_bundles TOPOLOGY delta    # gated DeltaNet, at Qwen3.5's shapes
    python -m experiments.kernel_bundles compile CONFIG [key=value …]   # kernels of dflash compile

Run it from the repository root, with the package and jax[tpu] installed; no TPU is needed.

The shapes are those of Qwen3-4B's verification: 16 queries per sequence, 32 query heads over 8 kv
heads of 128, bfloat16, pages of 128. A bundle is one cycle if nothing stalls, so the bundles of the
inner loop times its trips are a lower bound of the time, not a measurement. Trips are those of the
busier core: on a chip with two cores behind one device this package's kernel splits the heads over
both, and jax's runs on one. jax's kernel reads the new rows from the pages, where another operation
must have written them; this package's kernel writes them itself.
"""

import functools
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp

from dflash import compile as compile_command
from dflash.compiler import topology
from dflash.kernels import (
    delta_block,
    delta_block_tpu,
    flash_tpu,
    latent_attention,
    paged_attention,
    tuning,
)
from dflash.kernels.quantized import Quantized
from experiments import bundles

QUERIES, KV_HEADS, GROUP, WIDTH, PAGE = 16, 8, 4, 128, 128
CASES = [(batch, context) for context in (2048, 32768) for batch in (1, 32)]
LATENT, ROTARY = 512, 64
TAPS, DELTA_CASES = 4, ((16, 16, 32), (16, 4, 12), (1, 16, 32))
LATENT_CASES = ((8, 64), (16, 64), (8, 8), (16, 8))
# The entry for these heads and pages in jax's table of tuned sizes.
PAGES_PER_BLOCK = 8
OURS, THEIRS = "paged_attention_t16", "ragged_paged_attention_kernel"
CORES_PER_DEVICE = {"TPU v4": 2, "TPU v5": 2, "TPU v5p": 2}


def main(argv: list[str]) -> None:
    """Prints the table."""
    name = argv[0] if argv else "v5p:1x1x1"
    with tempfile.TemporaryDirectory() as directory:
        bundles.dump_to(directory)
        topology.prepare_environment()
        if name == "compile":
            programs = compile_command.run(*argv[1:]).programs.values()
            kernels = sorted({kernel for program in programs for kernel in program.kernels})
            schedules = bundles.read_schedules(pathlib.Path(directory), kernels)
            print("\n".join(bundles.lines(schedules)))
            return
        if argv[1:] == ["latent"]:
            of_latent_attention(name, pathlib.Path(directory))
            return
        if argv[1:] == ["delta"]:
            of_gated_delta_net(name, pathlib.Path(directory))
            return
        print(f"{name}: bundles of the kernel, of its inner loop; spills and fills; trips; product")
        for batch, context in CASES:
            for kernel in (OURS, THEIRS):
                given = arguments(kernel, batch, context)
                found = schedule(name, kernel, *given, pathlib.Path(directory))
                inner = bundles.inner_loop(found)
                turns = trips(kernel, name, batch, context)
                print(
                    f"batch {batch:>2}, context {context:>5}, {kernel:<30}"
                    f"{sum(part.bundles for part in found):>6}{inner.bundles:>6}{inner.spills:>6}"
                    f"{turns:>6}{inner.bundles * turns:>9}",
                    flush=True,
                )


def of_latent_attention(name: str, directory: pathlib.Path) -> None:
    """Prints the schedules of latent attention over 2,048 rows, one sequence."""
    print(f"{name}: bundles of the kernel, of its inner loop; spills")
    for kv_dtype in (jnp.bfloat16, jnp.int8):
        for rows, heads in LATENT_CASES:
            given = latent_arguments(rows, heads, kv_dtype)
            found = schedule(name, f"latent_attention_t{rows}", *given, directory)
            inner = bundles.inner_loop(found)
            print(
                f"{rows:>3} rows, {heads:>2} heads, pages of {jnp.dtype(kv_dtype).name:<9}"
                f"{sum(part.bundles for part in found):>6}{inner.bundles:>6}{inner.spills:>6}",
                flush=True,
            )


def of_gated_delta_net(name: str, directory: pathlib.Path) -> None:
    """Prints the schedules of the verification and the commit of one layer, one sequence."""
    print(f"{name}: bundles of a grid step; spills; steps")
    for rows, key_heads, heads in DELTA_CASES:
        for part, (function, shapes) in delta_arguments(rows, key_heads, heads).items():
            sections = schedule(name, f"delta_block_{part}_t{rows}", function, shapes, directory)
            print(
                f"{rows:>3} rows, {key_heads:>2} key heads, {heads:>2} value heads, {part:<7}"
                f"{sum(section.bundles for section in sections):>6}"
                f"{sum(section.spills for section in sections):>6}"
                f"{key_heads // min(key_heads, delta_block_tpu.GROUP):>6}",
                flush=True,
            )


def delta_arguments(rows: int, key_heads: int, heads: int):
    """Returns the functions of both kernels, and the shapes and dtypes of their arguments."""
    channels, wide = (2 * key_heads + heads) * WIDTH, jnp.float32
    projected = (1, rows, channels + heads * WIDTH), jnp.bfloat16
    per_head = (1, rows, heads), wide
    memory, before = ((1, heads, WIDTH, WIDTH), wide), ((1, TAPS - 1, channels), jnp.bfloat16)
    weights = [((channels, TAPS), jnp.bfloat16), ((WIDTH,), wide)]

    def verify(*arrays):
        projected = delta_block.Heads(*arrays[:5])
        return delta_block.verify_block(projected, *arrays[5:], eps=1e-6, implementation="pallas")

    def commit(memory, before, keys, updates, log_decay, *others):
        block = delta_block.Block(keys, updates, log_decay)
        return delta_block.commit_block(memory, before, block, *others, implementation="pallas")

    block = [((1, rows, count * WIDTH), wide) for count in (key_heads, heads)]
    return {
        "verify": (verify, [projected, per_head, per_head, *weights, memory, before]),
        "commit": (commit, [memory, before, *block, per_head, projected, ((1,), jnp.int32)]),
    }


def latent_arguments(rows: int, heads: int, kv_dtype):
    """Returns the function of latent attention, and the shapes and dtypes of its arguments."""
    pages = -(-(2048 + rows) // PAGE)
    pool = (1, pages + 1, PAGE, LATENT + ROTARY)
    shapes = [
        ((1, rows, heads, LATENT + ROTARY), jnp.bfloat16),
        ((1, rows, LATENT + ROTARY), jnp.bfloat16),
        (pool, kv_dtype),
        ((1, pages), jnp.int32),
        ((1,), jnp.int32),
    ]
    options = {"value_width": LATENT, "scale": 0.1, "implementation": "pallas"}
    if kv_dtype == jnp.bfloat16:
        return functools.partial(latent_attention.latent_attention, **options), shapes

    def quantized_call(queries, latents, values, table, start, scales):
        stored = Quantized(values, scales)
        return latent_attention.latent_attention(queries, latents, stored, table, start, **options)

    return quantized_call, [*shapes, ((*pool[:2], 1, PAGE), jnp.float32)]


def trips(kernel: str, name: str, batch: int, context: int) -> int:
    """Returns the trips of the inner loop on the busier core.

    The last tile of this package's kernel, which is outside the loop, counts as one trip.
    """
    if kernel == THEIRS:
        return batch * -(-(context + QUERIES) // (PAGES_PER_BLOCK * PAGE))
    kind = topology.find(name).devices[0].device_kind
    groups = KV_HEADS // flash_tpu.heads_per_step(KV_HEADS)
    tiles = -(-context // tuning.PAGED_ATTENTION[WIDTH].keys)
    return batch * tiles * groups // CORES_PER_DEVICE.get(kind, 1)


def schedule(
    name: str, kernel: str, function, shapes, directory: pathlib.Path
) -> list[bundles.Section]:
    """Compiles one kernel and returns its schedule, which the compiler writes to `directory`."""
    device = topology.find(name).devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    mesh = jax.sharding.Mesh([device], ("x",))
    inputs = [jax.ShapeDtypeStruct(*shape, sharding=place) for shape in shapes]
    # jax's kernel queries the kind of chip while it is traced.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(function).lower(*inputs)
    lowered.compile()
    found = bundles.read_schedules(directory, [kernel])
    for path in directory.iterdir():
        path.unlink()
    return found[kernel]


def arguments(kernel: str, batch: int, context: int):
    """Returns the function of a kernel, and the shapes and dtypes of its arguments."""
    dtype, ints = jnp.bfloat16, jnp.int32
    pages = -(-(context + QUERIES) // PAGE)
    heads, num_pages = KV_HEADS * GROUP, batch * pages + 1
    table = (batch, pages), ints
    if kernel == OURS:
        new = (batch, QUERIES, KV_HEADS, WIDTH), dtype
        pool = (KV_HEADS, num_pages, PAGE, WIDTH), dtype
        queries = (batch, QUERIES, heads, WIDTH), dtype
        call = functools.partial(paged_attention.paged_attention, implementation="pallas")
        shapes = [queries, new, new, pool, pool, table, ((batch,), ints)]
        return functools.partial(call, scale=WIDTH**-0.5), shapes
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as theirs

    call = functools.partial(
        theirs.ragged_paged_attention,
        sm_scale=WIDTH**-0.5,
        num_kv_pages_per_block=PAGES_PER_BLOCK,
        num_queries_per_block=QUERIES,
    )
    shapes = [
        ((batch * QUERIES, heads, WIDTH), dtype),
        ((num_pages, PAGE, 2 * KV_HEADS, WIDTH), dtype),
        ((batch,), ints),
        table,
        ((batch + 1,), ints),
        ((1,), ints),
    ]
    return call, shapes


if __name__ == "__main__":
    main(sys.argv[1:])
