"""Abstract arguments of the engine's programs, beside those that `Shapes` describes itself."""

import jax.numpy as jnp

from dflash.inference import first_token
from dflash.inference.shapes import Shapes


def mask(shapes: Shapes) -> tuple:
    """Returns the masks of a cycle with grammars, and which of them are valid."""
    layout, words = shapes.layout, first_token.num_words(shapes.vocab_size)
    allowed = shapes.whole((layout.batch_size, layout.block_size, words))
    return allowed, shapes.whole((layout.batch_size,), jnp.bool_)


def conclude(shapes: Shapes) -> tuple:
    """Returns the arguments of `dispatch.conclude`."""
    proposal = shapes.proposal(shapes.propose())
    return *shapes.weights, shapes.state(), proposal, *mask(shapes)


def insert(shapes: Shapes) -> tuple:
    """Returns the arguments of `programs.insert`."""
    number, anchors = shapes.scalar(), shapes.whole((shapes.num_prefill_slots,))
    stop_ids = shapes.whole((shapes.num_stop_ids,))
    where = number, number, shapes.table_row(), number, number, stop_ids
    default = shapes.constraints(1).controls
    of_request = default, shapes.one_sampling(), number if shapes.target.adapters else None
    return shapes.state(), shapes.prefill_state(), anchors, *where, *of_request


def prefill(shapes: Shapes, rows: int) -> tuple:
    """Returns the arguments of a prefill chunk of `rows` tokens."""
    prompts = prompt(shapes, rows)
    return *shapes.weights, shapes.state().cache, shapes.prefill_state(), *prompts


def prompt(shapes: Shapes, rows: int) -> tuple:
    """Returns a prefill chunk of `rows` tokens, its constraints and its sampling."""
    count = shapes.num_prefill_slots
    return shapes.chunk(rows), shapes.constraints(count), shapes.sampling(count)


def store(shapes: Shapes) -> tuple:
    """Returns the arguments of `programs.store`."""
    state = shapes.state().drafter
    return shapes.context(), state, shapes.scalar(), shapes.table_row(), shapes.scalar()


def restore(shapes: Shapes) -> tuple:
    """Returns the arguments of `programs.restore`."""
    prefill_state, context = shapes.prefill_state(), shapes.context()
    return prefill_state, context, shapes.scalar(), shapes.table_row(), shapes.scalar()


def examine(shapes: Shapes, rows: int) -> tuple:
    """Returns the arguments of `nonfinite.examine_chunk`."""
    number = shapes.scalar()
    return shapes.weights[0], shapes.examined(), shapes.whole((1, rows)), number, number, number
