"""The state of the decode loop, and the report of one dispatch."""

import dataclasses
from typing import Any

import jax

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
      broken_at: int32 [B]; position of the first token whose logits were not finite, which ended
        the sequence; 0 if there was none.
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
    broken_at: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """A prefilled prompt, ready for a slot; batch dimension 1.

    Attributes:
      length: int32 [1]; prompt tokens in cache and drafter state.
      anchor: int32 [1]; the first new token; negative if its logits were not finite.
      sampling: of the sequence.
      controls: likewise.
      allowed: int32 [1, ceil(V / 32)]; tokens that the anchor may be.
      logprobs: of the anchor.
      cache: the prompt's keys and values, in pages 1, 2, … of a pool of its own.
      drafter: the drafter's state after the prompt.
      bucket: padded length of the prompt in tokens; static.
    """

    length: jax.Array
    anchor: jax.Array
    sampling: SamplingParams
    controls: Controls
    allowed: jax.Array
    logprobs: Logprobs
    cache: PagedCache
    drafter: Any
    bucket: int = dataclasses.field(metadata={"static": True})


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
      broken_at: int32 [B]; see the state.
      logprobs: of the tokens, where sequences want them; None where they were left behind.
    """

    cycles: jax.Array
    tokens: jax.Array
    num_committed: jax.Array
    active: jax.Array
    block_sizes: jax.Array
    broken_at: jax.Array
    logprobs: Logprobs | None

    def without_logprobs(self) -> "Report":
        """All but the log-probabilities, which take time to fetch."""
        return dataclasses.replace(self, logprobs=None)
