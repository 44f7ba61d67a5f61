"""Rooflines: lower bounds of the time of a forward, by peak rates of arithmetic and of reading.

Known chips use the vendor's peaks. Other machines are measured: their arithmetic by large matrix
products, and their reading by products of a matrix with few rows, which take as long as reading it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.schema import AUTO
from dflash.drafters.base import Drafter
from dflash.layers import moe
from dflash.loading import decode_plan
from dflash.measure.engine import seconds_of
from dflash.models.decoder import Decoder
from dflash.parallel import chips, parameters
from dflash.parallel.sharding import Sharding

_PRODUCT_SIZES = (512, 1024)  # Sizes of square matrix products, up to 2 GFLOP.
# Sizes of matrices to read. The smaller ones stay in caches and are read faster, as the weights of
# a small model are.
_READ_BYTES = tuple(2**20 * size for size in (1, 8, 64, 256))
_READ_ROWS = (1, 16)  # Numbers of rows that the matrices are multiplied with.
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peak rates of all devices of a run together.

    Attributes:
      cached_rates: Pairs of a size in bytes and the peak rate of reading that much repeatedly,
        which caches may raise; sizes ascending, rates descending.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str
    cached_rates: tuple[tuple[float, float], ...] = ()

    def read_s(self, size_bytes: float) -> float:
        """Returns the least time of reading `size_bytes`, in seconds."""
        # A larger amount of data cannot be read faster than a measured size below it.
        smaller = [rate for size, rate in self.cached_rates if size <= size_bytes]
        fastest = self.cached_rates[0][1] if self.cached_rates else self.bytes_per_s
        return size_bytes / (smaller[-1] if smaller else fastest)


@dataclasses.dataclass(frozen=True)
class ForwardWork:
    """Least work of a forward.

    Attributes:
      flops: Floating-point operations of the matrix products.
      size_bytes: Bytes of weights and context, each read once.
    """

    flops: float
    size_bytes: float

    def ideal_ms(self, machine: Machine) -> float:
        """Returns the least time on a machine, in milliseconds."""
        return 1e3 * max(self.flops / machine.flops_per_s, machine.read_s(self.size_bytes))

    def __add__(self, other: "ForwardWork") -> "ForwardWork":
        return ForwardWork(self.flops + other.flops, self.size_bytes + other.size_bytes)


def machine_of(sharding: Sharding) -> Machine:
    """Returns the peak rates of the devices of a mesh."""
    device, count = sharding.devices[0], len(sharding.devices)
    chip = chips.of_device_kind(device.device_kind)
    if chip is not None:
        return machine_of_chip(chip, count, device.device_kind)
    flops_per_s, rates = _product_rate(), _read_rates()
    return Machine(
        f"{count} × {device.device_kind}",
        flops_per_s,
        rates[-1][1],
        "measured on this machine in float32, before the run",
        rates,
    )


def machine_of_chip(chip: chips.Chip, devices: int, name: str) -> Machine:
    """Returns the vendor's peak rates of `devices` jax devices of a chip, under a given name."""
    share = devices / chip.devices
    return Machine(
        f"{devices} × {name}",
        share * chip.tflops * 1e12,
        share * chip.hbm_gb_per_s * 1e9,
        "the vendor's peaks, bfloat16",
    )


def target_work(
    target: Decoder, *, batch: int, rows: int, context: int, kv_dtype: str = AUTO
) -> ForwardWork:
    """Returns the work of a target forward over `rows` rows per sequence, with all their logits.

    Experts count by the fraction of them that the rows are expected to use; see
    `Experts.share_read`.
    """
    # An embedding that is not the head is only looked up, not read as a whole.
    unread = () if target.lm_head is None else ("embed_tokens.",)
    work = products(target, batch * rows, unread)
    pairs = batch * rows * (context + rows)
    scores = pairs * sum(layer.self_attn.flops_per_pair for layer in target.layers)
    token = target.new_cache(
        batch=1, pages_per_sequence=1, num_pages=1, page_size=1, kv_dtype=kv_dtype
    )
    cached = decode_plan.measure(token.pools).total_bytes * batch * (context + rows)
    # A row reads its recurrent state twice, for key and query, and adds to it; memory is read and
    # written once.
    states = 6 * batch * rows * sum(state.memory.size for state in token.states)
    state_bytes = 2 * batch * decode_plan.measure(token.states).total_bytes
    return work + ForwardWork(scores + states, cached + state_bytes)


def draft_work(target: Decoder, drafter: Drafter, *, batch: int) -> ForwardWork:
    """Returns the work of drafting a longest path, with the target's head, without the context."""
    if not drafter.num_draft_tokens:
        return ForwardWork(0, 0)
    rows, head = batch * drafter.longest_path, target.arch.vocab_size * target.arch.hidden_size
    of_head = ForwardWork(2 * head * rows, head * target.dtype.itemsize)
    return products(drafter, rows) + of_head


def products(model: nnx.Module, rows: int, unread: tuple[str, ...] = ()) -> ForwardWork:
    """Returns the work of multiplying all weights but `unread` prefixes with `rows` rows."""
    share_of, work = moe.shares(model, rows), ForwardWork(0, 0)
    for path, param in parameters.named_parameters(model):
        if path.startswith(unread):
            continue
        leaf = param.get_value()
        share = share_of(path)
        # Scales of 8-bit weights are read, but not multiplied with rows.
        flops = 0 if path.endswith(".kernel_scale") else 2 * leaf.size * rows * share.used
        work += ForwardWork(flops, leaf.size * leaf.dtype.itemsize * share.read)
    return work


def _product_rate() -> float:
    """Returns the FLOP/s of the first device in float32: the best of several products."""
    rates = []
    for size in _PRODUCT_SIZES:
        square = jnp.ones((size, size), jnp.float32)
        rates.append(2 * size**3 / _least_seconds(square, square))
    return max(rates)


def _read_rates() -> tuple[tuple[float, float], ...]:
    """Returns the read rate of the first device, in bytes/s, for each size: the best of several."""
    rates = []
    for size in _READ_BYTES:
        matrix = jnp.ones((2048, size // 4 // 2048), jnp.float32)
        factors = [jnp.ones((rows, 2048), jnp.float32) for rows in _READ_ROWS]
        rates.append(size / min(_least_seconds(factor, matrix) for factor in factors))
    # Apart from noise, larger sizes are never read at a higher rate than smaller ones.
    falling = np.maximum.accumulate(rates[::-1])[::-1]
    return tuple(zip(map(float, _READ_BYTES), falling.tolist(), strict=True))


def _least_seconds(a: jax.Array, b: jax.Array) -> float:
    product = jax.jit(jnp.dot)
    seconds_of(product, a, b)
    return min(seconds_of(product, a, b)[0] for _ in range(_TRIES))
