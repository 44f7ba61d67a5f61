"""Device state of the decode loop, and the report of one dispatch."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash.inference.cycle.choice import FixedRows
from dflash.inference.logits.controls import Controls
from dflash.inference.logits.logprobs import Logprobs
from dflash.inference.logits.sampling import SamplingParams
from dflash.layers.cache import PagedCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Device state of a batch of B slots.

    Invariant at the start of every cycle: the target's cache and the drafter's state hold exactly
    the positions below length - 1, which is the anchor's position. No other counter exists.

    Attributes:
      length: int32 [B]; committed tokens, the anchor included.
      limit: int32 [B]; length at which the sequence ends.
      anchor: int32 [B]; the last committed token.
      active: bool [B]; the slot holds a sequence that has not ended.
      stop_ids: int32 [B, E]; tokens that end each sequence, padded with -1.
      sampling: Sampling parameters of each sequence.
      controls: Logit controls of each sequence.
      cache: Key/value cache of the target.
      drafter: State of the drafter.
      choice: State that chooses the rows of each cycle. It may hold rows that the drafter has not
        observed yet.
      nonfinite_at: int32 [B]; position of the first token with non-finite logits, which ended the
        sequence; 0 if there was none.
      concluded: int32 []; cycles of the current dispatch that were run before its loop.
      adapter: int32 [B]; number of each sequence's adapter, 0 for none; None if the target has no
        adapters.
    """

    length: jax.Array
    limit: jax.Array
    anchor: jax.Array
    active: jax.Array
    stop_ids: jax.Array
    sampling: SamplingParams
    controls: Controls
    cache: PagedCache
    drafter: Any
    choice: FixedRows
    nonfinite_at: jax.Array
    concluded: jax.Array
    adapter: jax.Array | None = None

    @property
    def occupancy(self) -> "Occupancy":
        """The arrays that tell occupied slots from empty ones."""
        table, temperature = self.cache.page_table, self.sampling.temperature
        return Occupancy(self.length, self.anchor, self.active, temperature, table)

    def with_occupancy(self, arrays: "Occupancy") -> "DecodeState":
        """Returns the state with these arrays."""
        return dataclasses.replace(
            self,
            length=arrays.length,
            anchor=arrays.anchor,
            active=arrays.active,
            sampling=dataclasses.replace(self.sampling, temperature=arrays.temperature),
            cache=dataclasses.replace(self.cache, page_table=arrays.page_table),
        )

    def mean_length(self) -> jax.Array:
        """Returns the mean length of the active sequences, float32 []; 0 without any."""
        total = jnp.where(self.active, self.length, 0).sum().astype(jnp.float32)
        return total / jnp.maximum(self.active.sum(), 1)


class Occupancy(NamedTuple):
    """Arrays of a `DecodeState` that tell occupied slots from empty ones."""

    length: jax.Array
    anchor: jax.Array
    active: jax.Array
    temperature: jax.Array
    page_table: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """Result of one dispatch of at most C cycles, each of up to R = longest path tokens.

    Attributes:
      cycles: int32 []; cycles run.
      tokens: int32 [C, B, R]; committed tokens of each cycle.
      num_committed: int32 [C, B]; number of valid tokens; 0 for an inactive slot.
      num_accepted: int32 [C, B]; number of accepted drafts among the valid tokens.
      active: bool [B]; slots that are still active after the dispatch.
      block_sizes: int32 [C, B]; rows that each cycle verified of each sequence.
      nonfinite_at: int32 [B]; same as in `DecodeState`.
      logprobs: Log-probabilities of the tokens; None if they were dropped before the transfer.
      rejected: int32 [C, B, G]; rejected drafts, and -1 in place of accepted ones; None if they
        were dropped before the transfer.
      events: int32 [C] each; counts of each cycle that a kind of engine takes itself, by name.
    """

    cycles: jax.Array
    tokens: jax.Array
    num_committed: jax.Array
    num_accepted: jax.Array
    active: jax.Array
    block_sizes: jax.Array
    nonfinite_at: jax.Array
    logprobs: Logprobs | None
    rejected: jax.Array | None
    events: Mapping[str, jax.Array] = dataclasses.field(default_factory=dict)

    @classmethod
    def joined(cls, reports: Sequence["Report"]) -> "Report":
        """Returns the report of a dispatch from the reports of its parts, as numpy arrays."""
        *_, last = reports
        if len(reports) == 1:
            return last
        counts = [int(report.cycles) for report in reports]
        pairs = zip(counts, reports, strict=True)
        cycles = [jax.tree.map(lambda x, n=n: x[:n], report.by_cycle()) for n, report in pairs]
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *cycles)
        return dataclasses.replace(last, cycles=sum(counts), **joined)

    def by_cycle(self) -> dict[str, Any]:
        """Returns the fields with one entry per cycle."""
        at_the_end = "cycles", "active", "nonfinite_at"
        names = (field.name for field in dataclasses.fields(self) if field.name not in at_the_end)
        return {name: getattr(self, name) for name in names}

    def with_only(self, *, logprobs: bool, rejected: bool) -> "Report":
        """Returns the report without fields that no request needs, to save their transfer."""
        return dataclasses.replace(
            self,
            logprobs=self.logprobs if logprobs else None,
            rejected=self.rejected if rejected else None,
        )
