"""The state of the decode loop, and the report of one dispatch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dflash.inference.adaptive import Adaptive
from dflash.inference.controls import Controls
from dflash.inference.logprobs import Logprobs
from dflash.inference.sampling import SamplingParams
from dflash.layers.cache import PagedCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """A batch of B slots.

    Invariant at the top of every cycle: the target's cache and the drafter's state hold exactly the
    positions below length - 1, the anchor's own position. `length` is the only count there is.

    Attributes:
      length: int32 [B]; committed tokens, the anchor included.
      limit: int32 [B]; length at which the sequence ends.
      anchor: int32 [B]; the last committed token.
      active: bool [B]; the slot holds a sequence that has not ended.
      stop_ids: int32 [B, E]; tokens that end each sequence, filled up with -1.
      sampling: how each sequence draws.
      controls: what shapes its logits.
      cache: the target's.
      drafter: the drafter's own state.
      adaptive: chooses block sizes; None if there is one. Rows in its backlog are those that the
        drafter's state still lacks.
      nonfinite_at: int32 [B]; position of the first token whose logits were not finite, which ended
        the sequence; 0 if there was none.
      concluded: int32 []; cycles of the current dispatch that are done before its loop begins.
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
    adaptive: Adaptive | None
    nonfinite_at: jax.Array
    concluded: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Report:
    """What happened in one dispatch of at most C cycles, each of up to R = longest path tokens.

    Attributes:
      cycles: int32 []; cycles run.
      tokens: int32 [C, B, R]; committed tokens of each cycle.
      num_committed: int32 [C, B]; how many of them count. 0 for a slot that was not active.
      active: bool [B]; after the dispatch.
      block_sizes: int32 [C]; rows that each cycle verified of a sequence.
      nonfinite_at: int32 [B]; see the state.
      logprobs: of the tokens, where sequences want them; None where they were left behind.
      refused: int32 [C, B, G]; drafts that were not accepted, and -1 in place of the others; None
        where they were left behind.
    """

    cycles: jax.Array
    tokens: jax.Array
    num_committed: jax.Array
    active: jax.Array
    block_sizes: jax.Array
    nonfinite_at: jax.Array
    logprobs: Logprobs | None
    refused: jax.Array | None

    @classmethod
    def joined(cls, reports: Sequence["Report"]) -> "Report":
        """The report of a dispatch in several parts, from theirs; numpy arrays."""
        *_, last = reports
        if len(reports) == 1:
            return last
        ran = [jax.tree.map(lambda x, n=int(one.cycles): x[:n], one.by_cycle()) for one in reports]
        whole = jax.tree.map(lambda *parts: np.concatenate(parts), *ran)
        return dataclasses.replace(last, cycles=sum(int(one.cycles) for one in reports), **whole)

    def by_cycle(self) -> dict[str, Any]:
        """The fields that have an entry for every cycle."""
        names = "tokens", "num_committed", "block_sizes", "logprobs", "refused"
        return {name: getattr(self, name) for name in names}

    def with_only(self, *, logprobs: bool, refused: bool) -> "Report":
        """Leaves behind what nobody asked for, since it takes time to fetch."""
        return dataclasses.replace(
            self,
            logprobs=self.logprobs if logprobs else None,
            refused=self.refused if refused else None,
        )
