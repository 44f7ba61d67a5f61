import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_architecture, make_sharding

from dflash.layers import rotary
from dflash.layers.attention import Attention
from dflash.parallel import parameters


def make_attention(qk_norm):
    module = Attention(
        24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        eps=1e-6,
        qk_norm=qk_norm,
        dtype=jnp.float32,
        sharding=make_sharding(),
    )
    parameters.initialize(module, jax.random.key(0))
    return module


def cos_sin(positions):
    return rotary.angles(jnp.array(positions), make_architecture(head_dim=8))


@pytest.mark.parametrize("qk_norm", [False, True])
def test_shapes_and_norms(qk_norm):
    attention = make_attention(qk_norm)
    x = 5 * jax.random.normal(jax.random.key(1), (2, 3, 24))
    queries, keys, values = attention.project(x, cos_sin([[0, 1, 2]] * 2))
    assert queries.shape == (2, 3, 4, 8)
    assert keys.shape == values.shape == (2, 3, 2, 8)
    # A norm with scale 1 results in a mean square of 1, which rotation preserves.
    mean_squares = [np.mean(np.square(each), axis=-1) for each in (queries, keys, values)]
    normed = [np.allclose(each, 1, atol=1e-3) for each in mean_squares]
    assert normed == [qk_norm, qk_norm, False]
    assert attention.output(queries).shape == (2, 3, 24)
    assert attention.scale == pytest.approx(1 / np.sqrt(8))


def test_scores_depend_on_distance_alone():
    attention = make_attention(qk_norm=True)
    x = jax.random.normal(jax.random.key(1), (1, 3, 24))

    def scores(positions):
        queries, keys, _ = attention.project(x, cos_sin([positions]))
        return jnp.einsum("btnh,bskh->btsnk", queries, keys)

    here, there = scores([0, 4, 9]), scores([50, 54, 59])
    np.testing.assert_allclose(here, there, atol=1e-4)
    assert not np.allclose(here, scores([0, 4, 8]), atol=1e-2)
