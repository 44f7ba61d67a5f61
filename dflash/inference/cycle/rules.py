"""Static settings of the decode loop."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter
from dflash.inference.cycle import choices
from dflash.inference.cycle.choices import WHOLE, Division
from dflash.inference.cycle.state import DecodeState
from dflash.inference.cycle.verify import VerifyResult
from dflash.inference.logits.sampling import SequenceSampler
from dflash.inference.pages import Layout

DIVIDED = "~"  # Begins the names of choices that divide rows among sequences.

# Changes the result on a proposal: (drafter, its state after the draft, result) -> result.
Revise = Callable[[Drafter, Any, VerifyResult], VerifyResult]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Static settings of the decode loop; all other settings are per-sequence device state.

    Attributes:
      block_sizes: Numbers of rows that a cycle may verify per sequence, ascending; the last one is
        the drafter's block size.
      division: Cycles that divide their rows among sequences.
      lookup: Whether copies of the context may replace a drafter's drafts; see `lookup`.
      longest_context: See `Drafter`.
      verify: Rule that accepts drafts; see `verify`.
      greedy: Whether all sequences are greedy and use no logit controls; see `for_greedy`.
      revise: Function applied to every `VerifyResult`, for measurements only: the output becomes
        meaningless, but the work stays the same.
    """

    block_sizes: tuple[int, ...]
    division: Division = WHOLE
    lookup: bool = False
    longest_context: int | None = None
    verify: Literal["coupled", "rejection", "block"] = "coupled"
    greedy: bool = False
    revise: Revise | None = None

    @classmethod
    def of(
        cls,
        drafter: Drafter,
        config: DecodeConfig,
        layout: Layout,
        *,
        adaptive_blocks: bool,
        divide_rows: bool = True,
        revise: Revise | None = None,
    ) -> "Rules":
        """Returns the settings of an engine.

        Args:
          drafter: Drafter, whose block size is the largest.
          config: Sizes of the loop and the verification rule.
          layout: Layout of the batch.
          adaptive_blocks: Choose the rows of every cycle.
          divide_rows: Let cycles divide chosen rows among sequences.
          revise: See `Rules`.
        """
        largest, sizes, division = drafter.block_size, (drafter.block_size,), WHOLE
        lookup = config.lookup and drafter.num_draft_tokens > 0
        if adaptive_blocks:
            sizes = choices.block_sizes(largest)
            slots, replicas = layout.slots_per_replica, layout.num_replicas
            # Confidence depends on the drawn tokens, so a rejection rule must not go by it, and
            # copies that replace drafts have none.
            confident = drafter.has_confidence and config.verify == "coupled" and not lookup
            form = {"by_confidence": confident, "trees": drafter.drafts_trees}
            if divide_rows:
                division = choices.division(largest, slots, replicas, **form)
        return cls(sizes, division, lookup, drafter.longest_context, config.verify, revise=revise)

    def for_greedy(self) -> "Rules":
        """Returns the settings for requests of which each `is_greedy`.

        All rules accept the same drafts then, those that are the target's likeliest tokens.
        """
        return dataclasses.replace(self, verify="coupled", greedy=True)

    @property
    def choices(self) -> tuple[str, ...]:
        """Names of the choices: block sizes, then mean rows of divisions, such as "~4"."""
        means = [f"{DIVIDED}{mean}" for mean in self.division.mean_rows]
        return *map(str, self.block_sizes), *means

    @property
    def num_choices(self) -> int:
        """Number of choices of rows for a cycle: block sizes and divisions."""
        return len(self.block_sizes) + len(self.division.mean_rows)

    def rows_of(self, choice: int) -> tuple[int, int | None]:
        """Returns the rows to draft in a cycle of a choice, and the mean rows to divide, if any."""
        if choice < len(self.block_sizes):
            return self.block_sizes[choice], None
        mean_rows = self.division.mean_rows[choice - len(self.block_sizes)]
        return self.division.drafted(self.block_sizes, mean_rows), mean_rows

    def left(self, state: DecodeState) -> jax.Array:
        """Returns the tokens that each sequence may commit in a cycle that drafts, int32 [B].

        That is the number of tokens until its limit, or until its drafter's longest context, from
        which on it decodes plainly.
        """
        left = state.limit - state.length
        if self.longest_context is None:
            return left
        return jnp.minimum(left, jnp.maximum(self.longest_context - state.length, 1))

    def sampler(self, state: DecodeState) -> SequenceSampler:
        """Returns the sampler that drafts and verifies the next block of every sequence."""
        params = state.sampling
        if self.verify == "block":
            params = params.of_block(state.length)
        return SequenceSampler(params, with_probs=self.verify != "coupled", greedy=self.greedy)
