"""The decode engine with further programs that run the parts of a cycle by themselves."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.inference import controls, cycle
from dflash.inference.engine import Engine
from dflash.inference.pages import Slot
from dflash.inference.request import Request, Sampling
from dflash.inference.sampling import SequenceSampler
from dflash.inference.state import DecodeState
from dflash.measure.forced import Canned, Forced
from dflash.models.decoder import Decoder


class MeasuredEngine(Engine):
    """An engine that can also run a draft alone, and return proposals."""

    def __init__(self, target: Decoder, drafter: Drafter, config: DecodeConfig, **options):
        """See `Engine`; a `Forced` drafter's script decides what is accepted."""
        if isinstance(drafter, Forced):
            options["revise"] = Forced.revise
        super().__init__(target, drafter, config, **options)
        self._target_alone: MeasuredEngine | None = None
        self.add_program("propose", self._propose)
        self.add_program("draft_alone", self._draft_alone)
        self.add_program("show_cycle", self._show_cycle)

    @property
    def block_size(self) -> int:
        """Rows that the target verifies."""
        return self.layout.block_size

    @property
    def has_parts(self) -> bool:
        """Whether all cycles have the same parts; a chosen block size makes them differ."""
        return len(self.block_sizes) == 1

    @property
    def turns(self) -> int:
        """Cycles, or parts of them, in one dispatch."""
        return self.config.sync_every

    def follow(self, lengths: Sequence[Sequence[int]]) -> None:
        """Forces acceptance lengths upon the sequences to come; see `Forced.follow`."""
        if isinstance(self.drafter, Forced):
            self.drafter.follow(lengths)
            self.set_drafter(self.drafter)

    def occupied(self, prompt: Sequence[int]) -> DecodeState:
        """A state with the same prompt in every slot, and room for the maximal length."""
        layout, sampling = self.layout, Sampling.from_config(self.config)
        request = Request(0, tuple(prompt), layout.max_length - len(prompt), sampling)
        state = self.new_state()
        for index in range(layout.batch_size):
            state = self.admit(state, Slot(index, layout.standing_pages(index)), request)
        return jax.block_until_ready(state)

    def standing(self, context_tokens: int) -> DecodeState:
        """A state that claims this many tokens of context in every slot, without computing them."""
        layout, state = self.layout, self.new_state()
        table = np.array([layout.standing_pages(slot) for slot in range(layout.batch_size)])
        cache = dataclasses.replace(state.cache, page_table=_like(state.cache.page_table, table))
        return self.at_length(dataclasses.replace(state, cache=cache), context_tokens)

    def at_length(self, state: DecodeState, context_tokens: int) -> DecodeState:
        """The state with this many tokens of its context in use, ready to run.

        It may come of an engine for sequences of another length, if caches are laid out alike.
        """
        plain = controls.plain(self.layout.batch_size, self.layout.max_length)
        places = self.abstract_state().controls
        state = dataclasses.replace(
            state,
            controls=jax.tree.map(lambda x, at: jax.device_put(x, at.sharding), plain, places),
            length=_like(state.length, context_tokens + 1),
            limit=_like(state.limit, self.layout.max_length),
            active=_like(state.active, True),
        )
        return jax.block_until_ready(state)

    def propose(self, state: DecodeState) -> Proposal:
        """What the drafter proposes in this state, which stays as it is."""
        return self.run("propose", state)

    def draft_alone(self, state: DecodeState) -> DecodeState:
        """Drafts sync_every times, each time from a token of the draft before; consumes `state`."""
        return self.run("draft_alone", state)

    def show_cycle(self, state: DecodeState):
        """One cycle: state, committed [B, R], num_committed [B], proposal; consumes `state`."""
        return self.run("show_cycle", state)

    def target_alone(self, proposal: Proposal) -> Engine:
        """An engine of the same shapes whose drafter proposes just this, at no cost.

        It shares only weights with this one; its program is compiled once.
        """
        canned = Canned(proposal, self.drafter)
        if self._target_alone is None:
            self._target_alone = MeasuredEngine(
                self.target,
                canned,
                self.config,
                max_length=self.layout.max_length,
                num_stop_ids=self.num_stop_ids,
            )
        self._target_alone.set_drafter(canned)
        return self._target_alone

    def _draft(self, target, drafter, state: DecodeState, drafter_state, anchor):
        sampler = SequenceSampler(state.sampling, with_probs=self.rules.rejection)
        return drafter.draft(drafter_state, anchor, state.length - 1, sampler, target)

    def _propose(self, target, drafter, state):
        return self._draft(target, drafter, state, state.drafter, state.anchor)[0]

    def _draft_alone(self, target, drafter, state):
        def draft(_, carry):
            proposal, drafter_state = self._draft(target, drafter, state, *carry)
            # The next draft starts from a sum over all of this one, so nothing is optimized away.
            drawn = sum(_folded(leaf) for leaf in jax.tree.leaves(proposal))
            return drafter_state, jnp.abs(drawn) % self.vocab_size

        carry = state.drafter, state.anchor
        carry = jax.lax.fori_loop(0, self.config.sync_every, draft, carry)
        return dataclasses.replace(state, drafter=carry[0], anchor=carry[1])

    def _show_cycle(self, target, drafter, state):
        proposal = self._propose(target, drafter, state)
        state, shown = cycle.cycle(
            target, drafter, state, rules=self.rules, block_size=drafter.block_size
        )
        return state, shown.tokens, shown.count, proposal


def _like(array: jax.Array, values) -> jax.Array:
    """Host values in the shape, dtype and place of an array."""
    host = np.broadcast_to(np.asarray(values, array.dtype), array.shape)
    return jax.device_put(host, array.sharding)


def _folded(leaf: jax.Array) -> jax.Array:
    """One int32 [B] that depends on all of an array [B, …]."""
    total = leaf.reshape(leaf.shape[0], -1).sum(axis=1)
    return total.astype(jnp.int32)


def seconds_of(call, *arguments) -> tuple[float, object]:
    """Seconds until the results of a call are there, and the results."""
    jax.block_until_ready(arguments)
    begin = time.perf_counter()
    results = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - begin, results
