"""The drafter on devices of its own: its weights, its programs, and what they take and return."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.base import Drafter
from dflash.inference.overlap import drafting
from dflash.inference.overlap.drafting import Anchors, DraftingState
from dflash.inference.overlap.forks import Copies, SharedPages
from dflash.inference.overlap.relay import Rows
from dflash.inference.program_table import Name, Program, Programs, zeros_of
from dflash.inference.shapes import Shapes, abstract
from dflash.parallel.sharding import Sharding


class DrafterSide:
    """Programs on the drafter's devices, over weights of the drafter and of the target's heads.

    Attributes:
      heads: The target's embedding and output head, if the drafter needs them, as a model without
        layers.
    """

    def __init__(self, drafter: Drafter, sharding: Sharding, target: Shapes):
        """Takes over the drafter's weights; `refresh` those of the target before the first run.

        `target` has the shapes of the target's programs, whose drafter is a `Relay`.
        """
        self.drafter, self.sharding, self.dtype = drafter, sharding, target.dtype
        self._target, self._relay, self._batch = target, target.drafter, target.layout.batch_size
        model, self.heads, fork = target.target, nnx.Module(), SharedPages
        if not drafter.drafts_with_model:  # It has no embedding and head of its own.
            arch = dataclasses.replace(model.arch, num_hidden_layers=0)
            self.heads, fork = type(model)(arch, dtype=model.dtype, sharding=sharding), Copies
        self._forks = fork(drafter, drafter.num_draft_tokens * self._relay.fan_out)
        self._graphs, weights = zip(*map(nnx.split, (self.heads, drafter)), strict=True)
        self._abstract_weights, self._weights = tuple(map(abstract, weights)), weights
        self.programs = Programs(self, self.table)

    def names(self, chunks: list[int]) -> list[Name]:
        """Returns the names of the programs; chunks of prompts have so many rows."""
        once = [(name,) for name in self.table if name != "observe_prompts"]
        return [*once, *(("observe_prompts", rows) for rows in chunks)]

    def run(self, name: Name, *arguments: Any) -> Any:
        """Runs a program over the models; does not wait."""
        return self.programs.get(*name)(*self._weights, *arguments)

    def receive(self, arrays: Any) -> Any:
        """Moves arrays to these devices, each of which then holds them whole."""
        return jax.device_put(arrays, self.sharding.replicated())

    def refresh(self, target_params: Any) -> None:
        """Copies the target's embedding and output head."""
        of_target = dict(nnx.to_flat_state(target_params))
        heads = nnx.from_flat_state(
            (path, leaf.replace(jax.device_put(of_target[path][...], leaf.get_value().sharding)))
            for path, leaf in nnx.to_flat_state(nnx.state(self.heads))
        )
        self._weights = heads, self._weights[1]

    # --- shapes ---------------------------------------------------------------------------------

    def prompts(self) -> Any:
        """Returns the drafter's state of the prompts in prefill."""
        return self._state(self._target.num_prefill_slots)

    def state(self) -> DraftingState:
        """Returns the state of the batch."""
        ranked = self._relay.state(self._batch, self.sharding).ranked
        count, best = ranked.shape[1:]
        ahead = self._whole(self._batch, count, best - 1, count, best)
        return DraftingState(self._state(self._batch), ranked, ahead)

    def _state(self, batch: int) -> Any:
        # The last forks of a sequence draft past its end.
        length = self._target.layout.capacity + self.drafter.block_size
        return self._forks.init_state(batch, length)

    def _rows(self, batch: int) -> Rows:
        return self._relay.state(batch, self.sharding).rows

    def _anchors(self) -> Anchors:
        numbers, sampling = self._whole(self._batch), self._target.state().sampling
        here = jax.tree.map(lambda x: self._whole(*x.shape, dtype=x.dtype), sampling)
        return Anchors(numbers, numbers, here)

    def _whole(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    # --- programs -------------------------------------------------------------------------------

    def program(self, function: Callable, *arguments: Any, extra: int = 0, **static) -> Program:
        """Returns the program of a function (heads, drafter, …) that changes its third argument."""

        def run(heads, drafter, *arguments):
            models = map(nnx.merge, self._graphs, (heads, drafter))
            return function(*models, *arguments, **static)

        arguments = *self._abstract_weights, *arguments
        return Program(run, arguments, donated=(2,), extra=extra, loops=True)

    def _observe_prompts(self, rows: int) -> Program:
        of_prompts = self._rows(self._target.num_prefill_slots)
        return self.program(drafting.observe_prompts, self.prompts(), of_prompts, count=rows)

    def _insert(self) -> Program:
        number = self._whole()
        return self.program(drafting.insert, self.state(), self.prompts(), number, number)

    def _draft(self) -> Program:
        return self.program(drafting.draft, self.state(), self._anchors())

    def _advance(self) -> Program:
        active, count = self._whole(self._batch, dtype=jnp.bool_), self._relay.block_size
        of_cycle = self._rows(self._batch), self._anchors(), active
        return self.program(drafting.advance, self.state(), *of_cycle, extra=1, count=count)

    def _speculate(self) -> Program:
        where = self._rows(self._batch), self._anchors()
        return self.program(drafting.speculate, self.state(), *where, forks=self._forks)

    table: ClassVar[dict[str, Callable[..., Program]]] = {
        "new_state": lambda side: zeros_of(side.state()),
        "new_prefill_state": lambda side: zeros_of(side.prompts()),
        "observe_prompts": _observe_prompts,
        "insert": _insert,
        "draft": _draft,
        "advance": _advance,
        "speculate": _speculate,
    }
