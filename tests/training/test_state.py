"""The state between steps: its names on disk, its keys, its places."""

import pathlib

import jax
import numpy as np
from support import toy

from dflash.training import state as states


def test_names_are_those_that_checkpoints_have_been_written_with():
    like = toy.Run(pathlib.Path("unused")).like
    weights = "embed.embedding", "out.kernel"
    moments = (f"optimizer.0.{moment}.{name}" for moment in ("mu", "nu") for name in weights)
    counts = "step", "key", "optimizer.0.count"
    assert set(states.flatten(like)) == {*counts, *moments, *(f"params.{x}" for x in weights)}
    assert jax.tree.leaves(states.unflatten(like, states.flatten(like))) == jax.tree.leaves(like)


def test_moments_lie_where_their_weights_do():
    run = toy.Run(pathlib.Path("unused"), mesh=(2, 2, 2))
    places = {name: x.sharding for name, x in states.flatten(run.like).items()}
    assert not places["params.out.kernel"].is_fully_replicated
    for moment in ("mu", "nu"):
        assert places[f"optimizer.0.{moment}.out.kernel"] == places["params.out.kernel"]
    assert places["optimizer.0.count"].is_fully_replicated
    made = {name: x.sharding for name, x in states.flatten(run.fresh()).items()}
    assert made == places


def test_checksums_see_every_dtype_and_every_bit():
    for dtype in (np.float32, np.int32, np.uint8, jax.numpy.bfloat16):
        array = np.arange(10).astype(dtype)
        other = array.copy()
        other.view(np.uint8)[-1] ^= 0x80
        one, two = (int(states.checksums({"x": jax.numpy.asarray(x)})["x"]) for x in (array, other))
        assert one != two
