"""Programs of overlapped decoding on the drafter's devices."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dflash.drafters.base import Drafter, Proposal
from dflash.inference import shapes
from dflash.inference.overlap import drafting
from dflash.inference.overlap.drafting import DraftingState, Observed
from dflash.inference.overlap.overlap import Overlap
from dflash.inference.overlap.relay import Mail
from dflash.inference.overlap.speculation import SpeculationCache
from dflash.inference.overlap.target_programs import abstract_mail
from dflash.inference.program_table import Program
from dflash.inference.shapes import Shapes, places
from dflash.models.decoder import Decoder
from dflash.parallel.compiler_options import loop_options
from dflash.parallel.sharding import Sharding, zeros


class DraftingShapes:
    """Abstract arguments and results of the programs on the drafter's devices.

    Attributes:
      drafter: The drafter, for its shape and placement.
      heads: Model with the target's embedding and output head alone, placed as the drafter is.
      sharding: Placement of arrays on the drafter's devices.
      overlap: How drafting overlaps verification.
      target: Shapes of the target's programs.
      dtype: Dtype that decides the precision of products.
      weights: Abstract weights of heads and drafter.
    """

    def __init__(self, drafter: Drafter, sharding: Sharding, overlap: Overlap, target: Shapes):
        drafter.num_forks = overlap.num_forks(drafter)
        self.drafter, self.sharding, self.overlap, self.target = drafter, sharding, overlap, target
        self.heads = make_heads(target.target, sharding, alone=drafter.drafts_with_model)
        self.heads_graph, heads = nnx.split(self.heads)
        self.drafter_graph, weights = nnx.split(drafter)
        self.weights = shapes.abstract(heads), shapes.abstract(weights)
        self.dtype = target.dtype

    @property
    def loop_options(self) -> dict[str, str]:
        """Compiler options of programs with loops over layers' weights."""
        return loop_options(self.sharding, self.dtype)

    def whole(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """Returns an array that every device holds whole."""
        return self.sharding.abstract(shape, (None,) * len(shape), dtype)

    @property
    def replicated(self) -> jax.sharding.Sharding:
        """Sharding of an array that every device holds whole."""
        return self.sharding.replicated()

    @property
    def batch(self) -> int:
        """Number of slots of a group."""
        return self.target.layout.batch_size // self.overlap.groups

    def observed(self, batch: int) -> Observed:
        """Returns the drafter's state of `batch` sequences."""
        layout = self.target.layout
        # The last forks of a sequence draft past its end.
        state = self.drafter.init_state(batch, layout.capacity + self.drafter.block_size)
        features = abstract_mail(self.target, batch, 1, self.whole).features
        return Observed(state, self.whole((batch, features.shape[-1]), features.dtype))

    def mail(self, batch: int, rows: int) -> Mail:
        """Returns `rows` rows of each sequence."""
        return abstract_mail(self.target, batch, rows, self.whole)

    def proposal(self) -> Proposal:
        """Returns the proposal of a group."""
        return self.target.drafter.proposal(self.batch, self.whole)

    def state(self) -> DraftingState:
        """Returns the state of a group."""
        ints, proposal = self.whole((self.batch,)), self.proposal()
        count, fan_out = proposal.tokens.shape[1], self.overlap.fan_out
        cache = None
        if fan_out:
            bonus = self.batch, count + 1, fan_out
            cache = SpeculationCache(self.whole(bonus), self.whole((*bonus, count)))
        return DraftingState(
            self.observed(self.batch), ints, ints, self._sampling(), proposal, cache
        )

    def one_sampling(self) -> Any:
        """Returns the sampling parameters of one sequence, without a batch dimension."""
        return self._here(self.target.one_sampling())

    def over_models(self, function: Callable) -> Callable:
        """Turns a function of (heads, drafter, …) into one of (their weights, …)."""

        def program(heads, drafter, *args):
            models = nnx.merge(self.heads_graph, heads), nnx.merge(self.drafter_graph, drafter)
            return function(*models, *args)

        return program

    def _sampling(self) -> Any:
        return self._here(self.target.state(self.batch // self.target.layout.num_replicas).sampling)

    def _here(self, arrays: Any) -> Any:
        return jax.tree.map(lambda x: self.whole(x.shape, x.dtype), arrays)


def make_heads(target: Decoder, sharding: Sharding, *, alone: bool) -> nnx.Module:
    """Returns an abstract model without layers: a target's embedding, last norm and output head.

    Args:
      target: The target.
      sharding: Placement of the weights.
      alone: The drafter has an embedding and head of its own; return a module without weights.
    """
    if alone:
        return nnx.Module()
    arch = dataclasses.replace(target.arch, num_hidden_layers=0)
    return type(target)(arch, dtype=target.dtype, sharding=sharding)


def _insert_arguments(shapes: DraftingShapes) -> tuple:
    count, number = shapes.target.num_prefill_slots, shapes.whole(())
    prompts = shapes.observed(count), shapes.whole((count,))
    return shapes.state(), *prompts, number, number, number, shapes.one_sampling()


def _prompt_arguments(shapes: DraftingShapes, rows: int) -> tuple:
    count = shapes.target.num_prefill_slots
    mail, fresh = shapes.mail(count, rows), shapes.whole((count,), jnp.bool_)
    return *shapes.weights, shapes.observed(count), mail, fresh


def _advance_arguments(shapes: DraftingShapes) -> tuple:
    mail = shapes.mail(shapes.batch, shapes.target.drafter.longest_path)
    return *shapes.weights, shapes.state(), mail, shapes.whole((shapes.batch,), jnp.bool_)


DRAFTING_TABLE = {
    "new_state": Program(
        lambda shapes: lambda: zeros(shapes.state()),
        lambda shapes: (),
        lambda shapes: places(shapes.state()),
    ),
    "new_prefill_state": Program(
        lambda shapes: lambda: zeros(shapes.observed(shapes.target.num_prefill_slots)),
        lambda shapes: (),
        lambda shapes: places(shapes.observed(shapes.target.num_prefill_slots)),
    ),
    "prefill": Program(
        lambda shapes, rows: shapes.over_models(drafting.observe_prompts),
        _prompt_arguments,
        lambda shapes, rows: places(shapes.observed(shapes.target.num_prefill_slots)),
        donated=(2,),
    ),
    "insert": Program(
        lambda shapes: functools.partial(drafting.insert, shapes.drafter),
        _insert_arguments,
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "draft": Program(
        lambda shapes: shapes.over_models(drafting.draft),
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places(shapes.state()),
        donated=(2,),
        loops=True,
    ),
    "advance": Program(
        lambda shapes: shapes.over_models(drafting.advance),
        _advance_arguments,
        lambda shapes: (places(shapes.state()), shapes.replicated),
        donated=(2,),
        loops=True,
    ),
    "speculate": Program(
        lambda shapes: shapes.over_models(
            functools.partial(drafting.speculate, fan_out=shapes.overlap.fan_out)
        ),
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places(shapes.state()),
        donated=(2,),
        loops=True,
    ),
}
