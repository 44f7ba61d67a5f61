"""Tests of reading weights as those of the other rotary style."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dflash_cases import FULL, make_shape
from support.models import make_sharding

from dflash.drafters.dflash import DFlash
from dflash.layers.transformer import join_projections
from dflash.measure.pair import diagnosis
from dflash.parallel import parameters

SHAPE = make_shape(FULL, attention_bias=True, partial_rotary_factor=0.5)
ROTATED = SHAPE.rotary.head_dim


def make_drafter(seed=0, **mesh):
    drafter = DFlash(SHAPE, dtype=jnp.float32, sharding=make_sharding(**mesh))
    parameters.init_fast_random(drafter, seed)
    return drafter


def values_of(drafter):
    return {path: np.asarray(p.get_value()) for path, p in parameters.named_parameters(drafter)}


def as_neighbors(values):
    """The weights of a drafter that computes the same by rotating neighboring dimensions."""
    width, half = SHAPE.decoder.head_dim, ROTATED // 2
    changed = {}
    for path, value in values.items():
        if any(part in path for part in ("q_proj", "k_proj", "q_norm", "k_norm")):
            heads = value.reshape(*value.shape[:-1], -1, width).copy()
            first, second = heads[..., :half].copy(), heads[..., half:ROTATED].copy()
            heads[..., 0:ROTATED:2], heads[..., 1:ROTATED:2] = first, second
            value = heads.reshape(value.shape)
        changed[path] = jnp.asarray(value)
    return changed


@pytest.mark.parametrize("mesh", [{}, {"tensor": 2}], ids=str)
@pytest.mark.parametrize("joined", [False, True])
def test_weights_of_the_other_style_become_ones_of_this(mesh, joined):
    usual, other = make_drafter(**mesh), make_drafter(seed=1, **mesh)
    places = {path: p.get_value().sharding for path, p in parameters.named_parameters(other)}
    values = as_neighbors(values_of(usual))
    parameters.assign(other, {p: jax.device_put(v, places[p]) for p, v in values.items()})
    if joined:
        join_projections(usual)
        join_projections(other)
    assert diagnosis.can_pair_neighbors(other)
    diagnosis.pair_neighbors(other, ROTATED)
    found = values_of(other)
    for path, value in values_of(usual).items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
