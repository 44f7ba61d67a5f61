"""The decode engine with further programs: its own parts, each in a loop as the cycle has them."""

import dataclasses
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.drafters.base import Proposal
from dflash.inference import cycle
from dflash.inference.engine import Engine, Slot
from dflash.inference.lowering import loop_options, lower
from dflash.inference.sampling import SequenceSampler
from dflash.inference.state import DecodeState
from dflash.measure.forced import Canned, Forced


class MeasuredEngine(Engine):
    """An engine that can also run a draft alone, and show what it proposes."""

    _target_alone: "MeasuredEngine | None" = None

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
        return self._config.sync_every

    def follow(self, lengths: Sequence[Sequence[int]]) -> None:
        """Forces acceptance lengths upon the sequences to come; see `Forced.follow`."""
        forced = self._abstract_drafter
        if isinstance(forced, Forced):
            forced.follow(lengths)
            self._drafter_params = nnx.split(forced)[1]

    def occupied(self, prompt: Sequence[int]) -> DecodeState:
        """A state in whose every slot stands the same prompt, with room to the maximal length."""
        layout = self.layout
        prefix, state = self.prefill(prompt), self.new_state()
        pages = layout.pages_per_sequence
        per_share = layout.batch_size // layout.num_shares
        for index in range(layout.batch_size):
            first = 1 + index % per_share * pages
            slot = Slot(index, tuple(range(first, first + pages)))
            state = self.insert(state, prefix, slot, layout.max_length)
        return jax.block_until_ready(state)

    def standing(self, context_tokens: int) -> DecodeState:
        """A state as if every slot held that many tokens of context; nobody has computed them."""
        layout, state = self.layout, self.new_state()
        slots = np.arange(layout.batch_size) % (layout.batch_size // layout.num_shares)
        pages = np.arange(layout.pages_per_sequence)
        table = 1 + slots[:, None] * layout.pages_per_sequence + pages
        cache = dataclasses.replace(state.cache, page_table=_like(state.cache.page_table, table))
        return self.at_length(dataclasses.replace(state, cache=cache), context_tokens)

    def at_length(self, state: DecodeState, context_tokens: int) -> DecodeState:
        """The state with this much of its context in use, ready to run."""
        state = dataclasses.replace(
            state,
            length=_like(state.length, context_tokens + 1),
            limit=_like(state.limit, self.layout.max_length),
            active=_like(state.active, True),
        )
        return jax.block_until_ready(state)

    def propose(self, state: DecodeState) -> Proposal:
        """What the drafter proposes in this state, which stays as it is."""
        return self.program("propose")(self._target_params, self._drafter_params, state)

    def draft_alone(self, state: DecodeState) -> DecodeState:
        """Drafts sync_every times, each time from a token of the draft before; consumes `state`."""
        return self.program("draft_alone")(self._target_params, self._drafter_params, state)

    def show_cycle(self, state: DecodeState):
        """One cycle: state, committed [B, R], num_committed [B], proposal; consumes `state`."""
        return self.program("show_cycle")(self._target_params, self._drafter_params, state)

    def target_alone(self, proposal: Proposal) -> Engine:
        """An engine of the same shapes whose target gets this proposal for nothing.

        It shares nothing but weights with this one; its program is compiled once.
        """
        proposal = dataclasses.replace(proposal, forced=None)
        canned = Canned(proposal, self._abstract_drafter)
        if self._target_alone is None:
            self._target_alone = MeasuredEngine(
                self._abstract_target,
                canned,
                self._config,
                max_length=self.layout.max_length,
                stop_ids=self.stop_ids,
            )
        self._target_alone._drafter_params = nnx.split(canned)[1]
        return self._target_alone

    def _models(self, target_params, drafter_params):
        return nnx.merge(self._target, target_params), nnx.merge(self._drafter, drafter_params)

    def _draft(self, target, drafter, state: DecodeState, drafter_state, anchor):
        sampler = SequenceSampler(state.sampling, with_probs=self._rules.rejection)
        return drafter.draft(drafter_state, anchor, state.length - 1, sampler, target)

    def _compile_propose(self):
        def propose(target_params, drafter_params, state):
            models = self._models(target_params, drafter_params)
            return self._draft(*models, state, state.drafter, state.anchor)[0]

        return self._compile_alone(propose, out=None)

    def _compile_draft_alone(self):
        def draft_alone(target_params, drafter_params, state):
            models = self._models(target_params, drafter_params)
            vocab_size = self.vocab_size

            def draft(_, carry):
                proposal, drafter_state = self._draft(*models, state, *carry)
                # All of the draft goes into what the next one starts from: nothing can be left out.
                drawn = sum(_folded(leaf) for leaf in jax.tree.leaves(proposal))
                return drafter_state, jnp.abs(drawn) % vocab_size

            carry = state.drafter, state.anchor
            carry = jax.lax.fori_loop(0, self._config.sync_every, draft, carry)
            return dataclasses.replace(state, drafter=carry[0], anchor=carry[1])

        return self._compile_alone(draft_alone, out=self.abstract_state(), donate=(2,))

    def _compile_show_cycle(self):
        def show_cycle(target_params, drafter_params, state):
            models = self._models(target_params, drafter_params)
            proposal = self._draft(*models, state, state.drafter, state.anchor)[0]
            _, drafter = models
            shown = cycle.cycle(*models, state, rules=self._rules, block_size=drafter.block_size)
            return *shown, proposal

        inputs = self._target_params, self._drafter_params, self.abstract_state()
        shown = jax.tree.map(self._replicated, jax.eval_shape(show_cycle, *inputs)[1:])
        return self._compile_alone(show_cycle, out=(inputs[-1], *shown), donate=(2,))

    def _compile_alone(self, function, *, out, donate=()):
        """Compiles a function of weights and state; `out` None: its results go anywhere."""
        inputs = self._target_params, self._drafter_params, self.abstract_state()
        options = loop_options(self.sharding, self._abstract_target.dtype)
        return lower(function, *inputs, out=out, donate=donate, options=options)


def _like(array: jax.Array, values) -> jax.Array:
    """Host values in the shape, dtype and place of an array."""
    host = np.broadcast_to(np.asarray(values, array.dtype), array.shape)
    return jax.device_put(host, array.sharding)


def _folded(leaf: jax.Array) -> jax.Array:
    """One int32 [B] that hangs on all of an array [B, …]."""
    total = leaf.reshape(leaf.shape[0], -1).sum(axis=1)
    return total.astype(jnp.int32)


def seconds_of(call, *arguments) -> tuple[float, object]:
    """Seconds until the results of a call are there, and the results."""
    jax.block_until_ready(arguments)
    begin = time.perf_counter()
    results = jax.block_until_ready(call(*arguments))
    return time.perf_counter() - begin, results
