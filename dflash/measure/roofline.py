"""The least time of a forward: the longer of computing and reading, both at the peak rate.

The peaks are the vendor's where the chip is known, else measured: by large matrix products, and by
products of a matrix and a few rows, whose time is that of reading the matrix.
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

_PRODUCT_SIZES = (512, 1024)  # of square matrix products, up to 2 GFLOP
# Bytes of matrices that are read: the smaller ones stay in caches, as the weights of a small model
# do, and are read faster.
_READ_BYTES = tuple(2**20 * size for size in (1, 8, 64, 256))
_READ_ROWS = (1, 16)  # of what they are multiplied with
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class Machine:
    """All devices of a run together.

    Attributes:
      name: of the chips.
      flops_per_s: peak rate of arithmetic.
      bytes_per_s: peak rate of reading memory.
      source: where the figures come from.
      cached_rates: pairs of a size in bytes and the peak rate of reading that much again and again,
        where caches make it higher; sizes ascending, rates descending.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str
    cached_rates: tuple[tuple[float, float], ...] = ()

    def read_s(self, size_bytes: float) -> float:
        """The least time of reading this much, in seconds."""
        # What is larger than a measured size cannot be read faster than that was.
        smaller = [rate for size, rate in self.cached_rates if size <= size_bytes]
        fastest = self.cached_rates[0][1] if self.cached_rates else self.bytes_per_s
        return size_bytes / (smaller[-1] if smaller else fastest)

    @property
    def ridge_rows(self) -> float:
        """Rows at which computing with weights of two bytes takes as long as reading them."""
        return self.flops_per_s / self.bytes_per_s


@dataclasses.dataclass(frozen=True)
class Work:
    """The least work of a forward.

    Attributes:
      flops: of the matrix products.
      size_bytes: of weights and context, each read once.
    """

    flops: float
    size_bytes: float

    def ideal_ms(self, machine: Machine) -> float:
        """The least time on a machine, in milliseconds."""
        return 1e3 * max(self.flops / machine.flops_per_s, machine.read_s(self.size_bytes))

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.size_bytes + other.size_bytes)


def machine_of(sharding: Sharding) -> Machine:
    """The machine under a mesh."""
    device, count = sharding.devices[0], len(sharding.devices)
    chip = chips.of_device_kind(device.device_kind)
    if chip is not None:
        return machine_of_chip(chip, count, device.device_kind)
    flops_per_s, rates = _product_rate(), _read_rates()
    return Machine(
        f"{count} × {device.device_kind}",
        flops_per_s,
        rates[-1][1],
        "measured here, in float32, before all else",
        rates,
    )


def machine_of_chip(chip: chips.Chip, devices: int, name: str) -> Machine:
    """A number of jax devices of a chip, called `name`, at the vendor's peaks."""
    share = devices / chip.devices
    return Machine(
        f"{devices} × {name}",
        share * chip.tflops * 1e12,
        share * chip.hbm_gb_per_s * 1e9,
        "the vendor's peaks, bfloat16",
    )


def target_work(
    target: Decoder, *, batch: int, rows: int, context: int, kv_dtype: str = AUTO
) -> Work:
    """One target forward over `rows` new rows of each sequence, the logits of all rows included.

    Experts count as far as rows are expected to touch them; see `Experts.share_read`.
    """
    # An embedding that is no head is looked up, not multiplied with.
    unread = () if target.lm_head is None else ("embed_tokens.",)
    products = _products(target, batch * rows, unread)
    pairs = batch * rows * (context + rows)
    scores = pairs * sum(layer.self_attn.flops_per_pair for layer in target.layers)
    token = target.new_cache(
        batch=1, pages_per_sequence=1, num_pages=1, page_size=1, kv_dtype=kv_dtype
    )
    cached = decode_plan.measure(token.layers).total_bytes * batch * (context + rows)
    return products + Work(scores, cached)


def draft_work(target: Decoder, drafter: Drafter, *, batch: int) -> Work:
    """One pass of a drafter over its block, and the target's head; its context is left out."""
    if not drafter.num_draft_tokens:
        return Work(0, 0)
    rows = batch * drafter.block_size
    head = target.arch.vocab_size * target.arch.hidden_size
    of_head = Work(2 * head * rows, head * target.dtype.itemsize)
    return _products(drafter, rows) + of_head


def _products(model: nnx.Module, rows: int, unread: tuple[str, ...] = ()) -> Work:
    """Reading all weights once and multiplying `rows` rows with them; not those of `unread`."""
    share_of, work = moe.shares(model, rows), Work(0, 0)
    for path, param in parameters.named_parameters(model):
        if path.startswith(unread):
            continue
        leaf = param.get_value()
        share = share_of(path)
        # Scales of eight-bit weights are read, but not multiplied with rows.
        flops = 0 if path.endswith(".kernel_scale") else 2 * leaf.size * rows * share.used
        work += Work(flops, leaf.size * leaf.dtype.itemsize * share.read)
    return work


def _product_rate() -> float:
    """FLOP/s of the first device, in float32: the best of several products."""
    rates = []
    for size in _PRODUCT_SIZES:
        square = jnp.ones((size, size), jnp.float32)
        rates.append(2 * size**3 / _least_seconds(square, square))
    return max(rates)


def _read_rates() -> tuple[tuple[float, float], ...]:
    """Bytes/s of the first device by bytes, the best of several products each."""
    rates = []
    for size in _READ_BYTES:
        matrix = jnp.ones((2048, size // 4 // 2048), jnp.float32)
        some = [jnp.ones((rows, 2048), jnp.float32) for rows in _READ_ROWS]
        rates.append(size / min(_least_seconds(one, matrix) for one in some))
    # Noise apart, more is never read at a higher rate than less.
    falling = np.maximum.accumulate(rates[::-1])[::-1]
    return tuple(zip(map(float, _READ_BYTES), falling.tolist(), strict=True))


def _least_seconds(left: jax.Array, right: jax.Array) -> float:
    """The time of a product, the best of a few tries after one that does not count."""
    product = jax.jit(jnp.dot)
    seconds_of(product, left, right)
    return min(seconds_of(product, left, right)[0] for _ in range(_TRIES))
