import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import failure
from support.models import make_target

from dflash import errors
from dflash.config.train_schema import OptimizerConfig
from dflash.training import optimizer as optimizers

STEPS = 100


def rates(**options):
    schedule = optimizers.make_schedule(OptimizerConfig(**options), STEPS)
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(STEPS + 5)))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_to_the_peak(schedule):
    rate = rates(schedule=schedule, learning_rate=2.0, warmup_fraction=0.1)
    np.testing.assert_allclose(rate[:10], np.arange(1, 11) / 10 * 2, rtol=1e-6)
    assert rate[10] == rate.max() == 2


def test_rates_after_the_warm_up():
    common = {"learning_rate": 2.0, "warmup_fraction": 0.2, "final_fraction": 0.1}
    cosine, linear, constant = (
        rates(schedule=name, **common) for name in ("cosine", "linear", "constant")
    )
    done = np.arange(80) / 80
    np.testing.assert_allclose(linear[20:100], 2 - 1.8 * done, rtol=1e-5)
    np.testing.assert_allclose(cosine[20:100], 0.2 + 0.9 * (1 + np.cos(np.pi * done)), rtol=1e-5)
    np.testing.assert_allclose(constant[20:], 2)
    for rate in (cosine, linear):  # and not below, should a run be longer than it was said to be
        np.testing.assert_allclose(rate[100:], 0.2, rtol=1e-5)


@pytest.mark.parametrize("total_steps", [1, 2])
def test_the_shortest_runs_learn(total_steps):
    schedule = optimizers.make_schedule(OptimizerConfig(warmup_fraction=0.5), total_steps)
    assert all(0 < float(schedule(step)) <= 6.1e-4 for step in range(total_steps))


def params_of():
    return nnx.split(make_target(num_hidden_layers=1), nnx.Param)[1]


def by_path(tree):
    name = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {name(path).removesuffix(".value"): np.asarray(leaf) for path, leaf in leaves}


def update(config, grads, params, steps=1):
    """Updates of the last of `steps` equal steps."""
    optimizer = optimizers.make_optimizer(config, STEPS)
    state = jax.jit(optimizer.init)(params)
    step = jax.jit(optimizer.update)
    for _ in range(steps):
        updates, state = step(grads, state, params)
    return updates


@functools.partial(jax.jit, static_argnums=1)
def random_like(params, seed=0):
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    draws = [jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, draws)


CONSTANT = {"schedule": "constant", "warmup_fraction": 0.0, "learning_rate": 0.1}


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_norms_and_embeddings_do_not_decay(name):
    params = params_of()
    still = jax.tree.map(jnp.zeros_like, params)
    updates = by_path(
        update(OptimizerConfig(name=name, weight_decay=0.5, **CONSTANT), still, params)
    )
    kinds = set()
    for path, value in by_path(params).items():
        spared = path.endswith(("scale", "embedding"))
        kinds.add((spared, value.ndim))
        expected = 0 * value if spared else -0.1 * 0.5 * value
        np.testing.assert_allclose(updates[path], expected, rtol=1e-5, atol=1e-9, err_msg=path)
    assert kinds == {(True, 1), (True, 2), (False, 2)}


def test_adamw_of_equal_gradients():
    params = params_of()
    grads = random_like(params)
    config = OptimizerConfig(beta1=0.8, beta2=0.9, weight_decay=0.0, clip_norm=0.0, **CONSTANT)
    updates = by_path(update(config, grads, params, steps=3))
    for path, grad in by_path(grads).items():  # equal gradients: bias-corrected means are theirs
        np.testing.assert_allclose(updates[path], -0.1 * np.sign(grad), rtol=1e-2, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parts_may_have_learning_rates_of_their_own(name):
    """The longest beginning of a parameter's name counts; decay follows the rate."""
    params = params_of()
    grads, options = random_like(params), {"name": name, "weight_decay": 0.5, **CONSTANT}
    rates = {"layers": 0.02, "layers.0.mlp": 0.0}
    common = by_path(update(OptimizerConfig(**options), grads, params))
    own = by_path(update(OptimizerConfig(learning_rates=rates, **options), grads, params))
    for path, value in common.items():
        factor = 0.0 if ".mlp." in path else 0.2 if path.startswith("layers.") else 1.0
        np.testing.assert_allclose(own[path], factor * value, rtol=1e-5, err_msg=path)


def test_a_learning_rate_of_nothing_is_refused():
    config = OptimizerConfig(learning_rates={"layer": 0.1})
    init = optimizers.make_optimizer(config, STEPS).init
    assert failure(init, params_of(), kind=errors.ConfigError) == (
        "optimizer.learning_rates: no parameter's name begins with 'layer'; did you mean 'layers'?"
    )


def test_clipping_by_the_global_norm():
    params = params_of()
    grads = random_like(params)
    norm = float(jax.jit(optax.tree.norm)(grads))
    # With epsilon this large, an update is the gradient over epsilon, but for a little.
    options = {"epsilon": 1e6, "weight_decay": 0.0, **CONSTANT}
    free = by_path(update(OptimizerConfig(clip_norm=0.0, **options), grads, params))
    clipped = by_path(update(OptimizerConfig(clip_norm=0.5 * norm, **options), grads, params))
    loose = by_path(update(OptimizerConfig(clip_norm=2 * norm, **options), grads, params))
    for path, value in free.items():
        np.testing.assert_allclose(clipped[path], 0.5 * value, rtol=1e-4)
        np.testing.assert_allclose(loose[path], value, rtol=1e-6)


def test_muon_orthogonalises_matrices_only():
    params = params_of()
    grads = random_like(params)
    options = {"weight_decay": 0.0, "clip_norm": 0.0, **CONSTANT}
    muon = by_path(update(OptimizerConfig(name="muon", **options), grads, params))
    adamw = by_path(update(OptimizerConfig(**options), grads, params))
    served = set()
    for path, value in muon.items():
        if "layers" in path and value.ndim == 2:
            served.add(path.rsplit(".", 2)[-2])
            singular = np.linalg.svd(value, compute_uv=False)
            assert singular.max() / singular.min() < 4, path
            spread = np.linalg.cond(by_path(grads)[path])
            assert spread > 4, path
            rms = float(np.sqrt(np.mean(value**2)))
            assert 0.1 * 0.1 < rms < 0.1 * 0.3, path  # of AdamW's size: 0.2 of the learning rate
        else:
            np.testing.assert_allclose(value, adamw[path], rtol=1e-6, err_msg=path)
    assert served == {f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)], ids=["wide", "tall"])
def test_muon_is_that_of_optax_up_to_bfloat16(shape):
    config = OptimizerConfig(name="muon", weight_decay=0.5, clip_norm=0.0, **CONSTANT)
    keys = jax.random.split(jax.random.key(0))
    params, grads = ({"kernel": jax.random.normal(key, shape)} for key in keys)
    reference = optax.contrib.muon(
        0.1, beta=config.momentum, eps=config.epsilon, weight_decay=0.5, consistent_rms=0.2
    )
    expected, _ = jax.jit(reference.update)(grads, jax.jit(reference.init)(params), params)
    expected, found = expected["kernel"], update(config, grads, params)["kernel"]
    expected, found = np.asarray(expected), np.asarray(found)
    gap = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert gap < 0.05
