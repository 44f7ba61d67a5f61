"""Decode engine with additional programs that run the parts of a cycle separately."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference.cycle import cycle
from dflash.inference.cycle.rules import Rules
from dflash.inference.cycle.state import DecodeState, Report
from dflash.inference.engine import Engine
from dflash.inference.logits import controls
from dflash.inference.pages import Slot
from dflash.inference.request import Request, RequestSampling
from dflash.measure.forced import FixedDrafter, ForcedDrafter
from dflash.models.decoder import Decoder


class MeasuredEngine(Engine):
    """Engine that can also draft without verifying, and return proposals."""

    def __init__(self, target: Decoder, drafter: Drafter, config: DecodeConfig, **options):
        """Initializes the engine as `Engine` does.

        The script of a `ForcedDrafter` determines what is accepted.
        """
        if isinstance(drafter, ForcedDrafter):
            options["revise"] = ForcedDrafter.revise
        if isinstance(drafter, ForcedDrafter | FixedDrafter):
            # What is accepted or proposed is known, so nothing is copied in its place.
            config = dataclasses.replace(config, lookup=False)
        super().__init__(target, drafter, config, **options)
        self._target_alone: MeasuredEngine | None = None
        # Returns the proposal in a state, which it leaves unchanged.
        self.add_program("propose", self._propose)
        # Drafts sync_every times, each time from the previous draft.
        self.add_program("draft_alone", self._draft_alone)
        # Runs one cycle; returns the state, the tokens, their number [B], and the proposal.
        self.add_program("show_cycle", self._show_cycle)

    @property
    def block_size(self) -> int:
        """Returns the number of rows that the target verifies."""
        return self.layout.block_size

    @property
    def has_parts(self) -> bool:
        """Returns whether all cycles have the same parts, which needs a fixed block size."""
        return len(self.block_sizes) == 1

    @property
    def turns(self) -> int:
        """Returns the number of cycles, or of parts of cycles, in one dispatch."""
        return self.config.sync_every

    def dispatch(self, state: DecodeState) -> tuple[DecodeState, Report]:
        """Runs a dispatch of sequences with the config's sampling, and consumes `state`."""
        return self.generate(state, greedy=self.is_greedy)

    def follow(self, lengths: Sequence[Sequence[int]]) -> None:
        """Forces acceptance lengths upon the next sequences; see `ForcedDrafter.follow`."""
        if isinstance(self.drafter, ForcedDrafter):
            self.drafter.follow(lengths)
            self.set_drafter(self.drafter)

    def occupied(self, context: Sequence[int]) -> DecodeState:
        """Returns a state with the same context in every slot, cut to leave room for a dispatch."""
        layout, sampling = self.layout, RequestSampling.from_config(self.config)
        prompt = tuple(context[: max(layout.max_length - self.turns - self.block_size, 1)])
        request = Request(0, prompt, layout.max_length - len(prompt), sampling)
        state = self.new_state()
        for index in range(layout.batch_size):
            state = self.admit(state, Slot(index, layout.standing_pages(index)), request)
        return jax.block_until_ready(state)

    def standing(self, context_tokens: int) -> DecodeState:
        """Returns a state with this context length in every slot, without computing the context."""
        layout, state = self.layout, self.new_state()
        table = np.array([layout.standing_pages(slot) for slot in range(layout.batch_size)])
        cache = dataclasses.replace(state.cache, page_table=_like(state.cache.page_table, table))
        return self.at_length(dataclasses.replace(state, cache=cache), context_tokens)

    def at_length(self, state: DecodeState, context_tokens: int) -> DecodeState:
        """Returns the state with its context length set to `context_tokens`, ready to run.

        The state may come from an engine with another maximal length if both lay out their caches
        alike.
        """
        default = controls.default(self.layout.batch_size, self.layout.max_length)
        places = self.abstract_state().controls
        state = dataclasses.replace(
            state,
            controls=jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), default, places),
            length=_like(state.length, context_tokens + 1),
            limit=_like(state.limit, self.layout.max_length),
            active=_like(state.active, True),
        )
        return jax.block_until_ready(state)

    def target_alone(self, proposal: Proposal) -> Engine:
        """Returns an engine of the same shapes whose drafter returns this proposal, at no cost.

        The two engines share only weights. Later calls reuse the compiled program.
        """
        fixed = FixedDrafter(proposal, self.drafter)
        if self._target_alone is None:
            self._target_alone = MeasuredEngine(
                self.target,
                fixed,
                self.config,
                max_length=self.layout.max_length,
                num_stop_ids=self.num_stop_ids,
            )
        self._target_alone.set_drafter(fixed)
        return self._target_alone

    @property
    def _cycle_rules(self) -> Rules:
        return self.rules.for_greedy() if self.is_greedy else self.rules

    def _draft(self, target, drafter, state: DecodeState, drafter_state, anchor):
        sampler = self._cycle_rules.sampler(state)
        return drafter.draft(drafter_state, anchor, state.length - 1, sampler, target)

    def _propose(self, target, drafter, state):
        return self._draft(target, drafter, state, state.drafter, state.anchor)[0]

    def _draft_alone(self, target, drafter, state):
        def draft(_, carry):
            proposal, drafter_state = self._draft(target, drafter, state, *carry)
            # Start the next draft from a sum over this draft, so that XLA removes no part of it.
            drawn = sum(_folded(leaf) for leaf in jax.tree.leaves(proposal))
            return drafter_state, jnp.abs(drawn) % self.vocab_size

        carry = state.drafter, state.anchor
        carry = jax.lax.fori_loop(0, self.config.sync_every, draft, carry)
        return dataclasses.replace(state, drafter=carry[0], anchor=carry[1])

    def _show_cycle(self, target, drafter, state):
        proposal = self._propose(target, drafter, state)
        state, shown = cycle.cycle(
            target, drafter, state, rules=self._cycle_rules, block_size=drafter.block_size
        )
        return state, shown.tokens, shown.count, proposal


def _like(array: jax.Array, values) -> jax.Array:
    """Returns an array of host values that has the shape, dtype and sharding of `array`."""
    host = np.broadcast_to(np.asarray(values, array.dtype), array.shape)
    return jax.device_put(host, array.sharding)


def _folded(leaf: jax.Array) -> jax.Array:
    """Returns an int32 [B] that depends on all elements of an array [B, …]."""
    total = leaf.reshape(leaf.shape[0], -1).sum(axis=1)
    return total.astype(jnp.int32)


def seconds_of(call, *arguments) -> tuple[float, object]:
    """Returns the seconds until a call's results are ready, and the results."""
    jax.block_until_ready(arguments)
    begin = time.perf_counter()
    results = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - begin, results


@dataclasses.dataclass(frozen=True)
class Parts:
    """Milliseconds of a cycle's two forwards, each alone in a loop on the device.

    The time of a part is that of a dispatch of sync_every repetitions, divided by their number. It
    thus includes a fraction of the dispatch's overhead, as a cycle in the decode loop does.

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
        """Initializes the probe."""
        self._engine = engine
        self._state = state
        self.context_tokens = int(jnp.max(state.length)) - 1
        names = ("length", "limit", "anchor", "active", "stop_ids", "sampling")
        self._small = _copy({name: getattr(self._state, name) for name in names})
        self._target_alone = engine.target_alone(engine.run("propose", self._state))

    def parts(self) -> Parts:
        """Times both parts once."""
        return Parts(self.draft_ms(), self.verify_ms(), self.context_tokens)

    def draft_ms(self) -> float:
        """Returns the milliseconds of a draft; 0 for a strategy that drafts nothing."""
        if self._engine.block_size == 1:
            return 0.0
        seconds, state = seconds_of(self._engine.run, "draft_alone", self._state)
        self._restore(state)
        return 1e3 * seconds / self._engine.turns

    def verify_ms(self) -> float:
        """Returns the milliseconds of the target's part of a cycle."""
        drafter = self._state.drafter
        bare = dataclasses.replace(self._state, drafter=())
        seconds, (state, report) = seconds_of(self._target_alone.dispatch, bare)
        self._restore(dataclasses.replace(state, drafter=drafter))
        return 1e3 * seconds / max(int(report.cycles), 1)

    def _restore(self, state: DecodeState) -> None:
        self._state = jax.block_until_ready(dataclasses.replace(state, **_copy(self._small)))


def _copy(tree):
    """Returns a copy, since a dispatch donates its state."""
    return jax.tree.map(jnp.copy, tree)
