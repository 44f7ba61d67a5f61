"""Tests of DFlare: its mixtures of tapped layers, and the projections of its context."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.dflash_cases import FULL, make_shape
from support.models import make_sharding, make_target
from support.training import observed, weights_of

from dflash.drafters.dflare import DFlare
from dflash.drafters.dflare_config import DFlareShape
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import LayerView
from dflash.parallel import parameters

TAPS, NEAR = (0, 1, 2), LayerView(4, causal=True)
SHAPE = DFlareShape(**vars(make_shape(FULL, NEAR, target_layer_ids=TAPS)))
WIDTH = SHAPE.decoder.hidden_size
BUILD = {"dtype": jnp.float32, "sharding": make_sharding()}


def make_drafter(shape=SHAPE):
    drafter = DFlare(shape, **BUILD)
    parameters.init_fast_random(drafter, 0)
    return drafter


def draw(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_each_layer_mixes_the_tapped_layers():
    drafter, features = make_drafter(), draw(2, 4, len(TAPS) * WIDTH)
    logits = draw(2, len(TAPS), seed=2)
    parameters.assign(drafter, {"layer_fusion_weights": logits})
    scale = np.asarray(weights_of(drafter)["hidden_norm.scale"], np.float64)
    taps = np.asarray(features, np.float64).reshape(2, 4, len(TAPS), WIDTH)
    for layer, rows in enumerate(drafter.context_rows(features)):
        shares = np.exp(np.asarray(logits[layer], np.float64))
        mixed = np.einsum("btcd,c->btd", taps, shares / shares.sum())
        root = np.sqrt((mixed**2).mean(axis=-1, keepdims=True) + SHAPE.decoder.rms_norm_eps)
        np.testing.assert_allclose(rows, scale * mixed / root, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tap", range(len(TAPS)))
def test_one_tapped_layer_without_own_projections_is_dflash(tap):
    """Where each mixture is a single layer, DFlash with a projection to that layer agrees."""
    drafter = make_drafter()
    weights = weights_of(drafter)
    for layer in range(2):
        at = f"layers.{layer}.self_attn"
        for part in ("k", "v"):
            weights[f"{at}.{part}_proj_target.kernel"] = weights[f"{at}.{part}_proj.kernel"]
    only = jnp.where(jnp.arange(len(TAPS)) == tap, 0.0, -1e9)
    weights["layer_fusion_weights"] = jnp.broadcast_to(only, (2, len(TAPS)))
    parameters.assign(drafter, weights)

    shape = make_shape(FULL, NEAR, target_layer_ids=TAPS)
    plain = DFlash(shape, **BUILD)
    chosen = jnp.eye(WIDTH)[None] * (jnp.arange(len(TAPS)) == tap)[:, None, None]
    shared = {path: value for path, value in weights.items() if "_target" not in path}
    del shared["layer_fusion_weights"]
    parameters.assign(plain, shared | {"fc.kernel": chosen.reshape(-1, WIDTH)})

    heads, features = make_target(), draw(2, 5, len(TAPS) * WIDTH)
    ours, theirs = (hidden_of(one, features, heads) for one in (drafter, plain))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def hidden_of(drafter, features, heads):
    """Runs the block after five committed tokens."""

    @jax.jit
    def run(features):
        state = observed(drafter, features, heads)
        return drafter.run_block(state, jnp.array([3, 4]), jnp.full(2, 5), heads)[0]

    return run(features)


def test_the_context_has_projections_of_its_own():
    drafter, features, heads = make_drafter(), draw(2, 5, len(TAPS) * WIDTH), make_target()
    before = hidden_of(drafter, features, heads)
    name = "layers.0.self_attn.k_proj_target.kernel"
    parameters.assign(drafter, {name: -weights_of(drafter)[name]})
    assert not np.allclose(before, hidden_of(drafter, features, heads))


def test_fresh_mixtures_prefer_one_layer_each():
    shape = dataclasses.replace(SHAPE, views=(FULL,) * 2)
    shares = jax.nn.softmax(weights_of(make_drafter(shape))["layer_fusion_weights"], axis=1)
    assert shares.argmax(axis=1).tolist() == [0, 1]
