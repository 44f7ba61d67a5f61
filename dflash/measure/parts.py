"""Timing of the parts of a cycle, each alone in a loop on the device.

The time of a part is that of a dispatch of sync_every repetitions, divided by their number. It thus
includes a fraction of the dispatch's overhead, as the time of a cycle in the decode loop does.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dflash.inference.cycle.state import DecodeState
from dflash.measure.engine import MeasuredEngine, seconds_of


@dataclasses.dataclass(frozen=True)
class Parts:
    """Milliseconds of a cycle's two forwards.

    Attributes:
      verify_ms: Time of the target's forward and of verification: of a cycle whose draft costs
        nothing and that no drafter observes.
      context_tokens: Number of tokens in the cache during the measurement.
    """

    draft_ms: float
    verify_ms: float
    context_tokens: int


class Probe:
    """One strategy with the same context in every slot, which can be timed repeatedly.

    Each timing resets the length of the context; rows written beyond it are stale, as in decoding.
    """

    def __init__(self, engine: MeasuredEngine, state: DecodeState):
        """Initializes the probe.

        Args:
          state: State with the context in every slot; the probe consumes it.
        """
        self._engine = engine
        self._state = state
        self.context_tokens = int(jnp.max(state.length)) - 1
        names = ("length", "limit", "anchor", "active", "stop_ids", "sampling")
        self._small = _copy({name: getattr(self._state, name) for name in names})
        self._target_alone = engine.target_alone(engine.propose(self._state))

    @classmethod
    def behind(cls, engine: MeasuredEngine, context: Sequence[int]) -> "Probe":
        """Builds a probe with this context, truncated to leave room for a dispatch of cycles."""
        room = engine.layout.max_length - engine.turns - engine.block_size
        return cls(engine, engine.occupied(context[: max(room, 1)]))

    def parts(self) -> Parts:
        """Times both parts once."""
        return Parts(self.draft_ms(), self.verify_ms(), self.context_tokens)

    def draft_ms(self) -> float:
        """Returns the milliseconds of a draft; 0 for a strategy that drafts nothing."""
        if self._engine.block_size == 1:
            return 0.0
        seconds, state = seconds_of(self._engine.draft_alone, self._state)
        self._restore(state)
        return 1e3 * seconds / self._engine.turns

    def verify_ms(self) -> float:
        """Returns the milliseconds of the target's part of a cycle."""
        drafter = self._state.drafter
        bare = dataclasses.replace(self._state, drafter=())
        seconds, (state, report) = seconds_of(self._target_alone.dispatch, bare)
        self._restore(dataclasses.replace(state, drafter=drafter))
        return 1e3 * seconds / max(int(report.cycles), 1)

    def cycle_ms(self) -> float:
        """Returns the milliseconds of a whole cycle."""
        seconds, (state, report) = seconds_of(self._engine.dispatch, self._state)
        self._restore(state)
        return 1e3 * seconds / max(int(report.cycles), 1)

    def _restore(self, state: DecodeState) -> None:
        self._state = jax.block_until_ready(dataclasses.replace(state, **_copy(self._small)))


def _copy(tree):
    """Returns a copy, since a dispatch donates its state."""
    return jax.tree.map(jnp.copy, tree)
