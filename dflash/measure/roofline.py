"""The least time of a forward: the longer of computing and reading, both at the peak rate.

The peaks are the vendor's where the chip is known, else measured: by a large matrix product, and by
a product of a matrix and a vector, whose time is that of reading.
"""

import dataclasses
import statistics

import jax
import jax.numpy as jnp

from dflash.config.schema import AUTO
from dflash.drafters.base import Drafter
from dflash.measure.engine import seconds_of
from dflash.models.decoder import Decoder
from dflash.offline import plan
from dflash.parallel import chips, parameters
from dflash.parallel.sharding import Sharding

_PRODUCT_SIZE = 2048  # of the matrix product: 17 GFLOP
_READ_ELEMENTS = 2**26  # of the matrix that is read: 256 MiB in float32
_REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Machine:
    """All devices of a run together.

    Attributes:
      name: of the chips.
      flops_per_s: peak rate of arithmetic.
      bytes_per_s: peak rate of reading memory.
      source: where the two figures come from.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    source: str

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
        return 1e3 * max(self.flops / machine.flops_per_s, self.size_bytes / machine.bytes_per_s)

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.size_bytes + other.size_bytes)


def machine_of(sharding: Sharding) -> Machine:
    """The machine under a mesh."""
    device, count = sharding.devices[0], len(sharding.devices)
    chip = chips.of_device_kind(device.device_kind)
    if chip is not None:
        return machine_of_chip(chip, count, device.device_kind)
    name = f"{count} × {device.device_kind}"
    return Machine(name, *_measured_rates(), "measured here: matrix product, matrix times vector")


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
    """One target forward over `rows` new rows of each sequence, the logits of all rows included."""
    arch = target.arch
    # An embedding that is no head is looked up, not multiplied with.
    unread = 0 if target.lm_head is None else arch.vocab_size * arch.hidden_size
    weights = parameters.count(target) - unread
    width = arch.num_hidden_layers * arch.head_dim
    scores = 4 * width * arch.num_attention_heads * batch * rows * (context + rows)
    token = target.new_cache(
        batch=1, pages_per_sequence=1, num_pages=1, page_size=1, kv_dtype=kv_dtype
    )
    cached = plan.measure(token.layers).total_bytes * batch * (context + rows)
    flops = 2 * weights * batch * rows + scores
    return Work(flops, weights * target.dtype.itemsize + cached)


def draft_work(target: Decoder, drafter: Drafter, *, batch: int) -> Work:
    """One pass of a drafter over its block, and the target's head; its context is left out."""
    if not drafter.num_draft_tokens:
        return Work(0, 0)
    head = target.arch.vocab_size * target.arch.hidden_size
    weights = parameters.count(drafter) + head
    return Work(2 * weights * batch * drafter.block_size, weights * target.dtype.itemsize)


def _measured_rates() -> tuple[float, float]:
    """FLOP/s and bytes/s of the first device, in float32: the best of a few tries."""
    square = jnp.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), jnp.float32)
    tall = jnp.ones((_READ_ELEMENTS // 4096, 4096), jnp.float32)
    vector = jnp.ones((4096,), jnp.float32)
    product = jax.jit(jnp.dot)
    times = []
    for arguments in ((square, square), (tall, vector)):
        seconds_of(product, *arguments)
        tries = sorted(seconds_of(product, *arguments)[0] for _ in range(_REPEATS))
        times.append(statistics.median_low(tries[:2]))
    return 2 * _PRODUCT_SIZE**3 / times[0], 4 * _READ_ELEMENTS / times[1]
