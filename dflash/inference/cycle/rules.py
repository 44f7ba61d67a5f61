"""Static settings of the decode loop."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dflash.drafters.base import Drafter
from dflash.inference.cycle.choices import Choices
from dflash.inference.cycle.state import DecodeState
from dflash.inference.cycle.verify import VerifyResult
from dflash.inference.logits.sampling import SequenceSampler

# Changes the result on a proposal: (drafter, its state after the draft, result) -> result.
Revise = Callable[[Drafter, Any, VerifyResult], VerifyResult]


@dataclasses.dataclass(frozen=True)
class Rules:
    """Static settings of the decode loop; all other settings are per-sequence device state.

    Attributes:
      choices: Numbers of rows that a cycle may draft and verify.
      longest_context: See `Drafter`.
      verify: Rule that accepts drafts; see `verify`.
      greedy: Whether all sequences are greedy and use no logit controls; see `for_greedy`.
      revise: Function applied to every `VerifyResult`, for measurements only: the output becomes
        meaningless, but the work stays the same.
    """

    choices: Choices
    longest_context: int | None = None
    verify: Literal["coupled", "rejection"] = "coupled"
    greedy: bool = False
    revise: Revise | None = None

    def for_greedy(self) -> "Rules":
        """Returns the settings for requests of which each `is_greedy`.

        All rules accept the same drafts then, those that are the target's likeliest tokens.
        """
        return dataclasses.replace(self, verify="coupled", greedy=True)

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """Numbers of rows that a cycle may draft per sequence, ascending."""
        return self.choices.block_sizes

    def room(self, state: DecodeState) -> jax.Array:
        """Returns the tokens that each sequence may commit in a cycle that drafts, int32 [B].

        That is the number of tokens until its limit, or until its drafter's longest context, from
        which on it decodes plainly.
        """
        room = state.limit - state.length
        if self.longest_context is None:
            return room
        return jnp.minimum(room, jnp.maximum(self.longest_context - state.length, 1))

    def sampler(self, state: DecodeState) -> SequenceSampler:
        """Returns the sampler that drafts and verifies the next block of every sequence."""
        with_probs = self.verify != "coupled"
        return SequenceSampler(state.sampling, with_probs=with_probs, greedy=self.greedy)
