"""Tests of experts: a row's output depends on its own experts only, not on other rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding, move

from dflash.config import schema
from dflash.layers import moe
from dflash.layers.mlp import ClampedSwiglu
from dflash.layers.moe import Routing, SparseMlp
from dflash.parallel import parameters, sharding

WIDTH, HIDDEN = 16, 12
ROUTINGS = {
    "softmax": Routing(8, 2),
    "softmax, raw weights": Routing(8, 3, normalize=False),
    "all experts": Routing(4, 4),
    "one expert": Routing(8, 1),
    "sigmoid, groups and a correction": Routing(
        8, 2, scoring="sigmoid", scale=2.5, num_groups=4, groups_per_token=2, has_correction=True
    ),
    "gpt-oss": Routing(8, 2, has_bias=True),
}


CLAMPED = moe.ExpertForm(ClampedSwiglu(0.5, 1.7), interleaved=True, bias=True)


def make_layer(name, sharding):
    """Returns an abstract layer; those with softmax gate their shared expert."""
    routing = ROUTINGS[name]
    if routing.has_bias:
        return SparseMlp(routing, WIDTH, HIDDEN, form=CLAMPED, dtype=jnp.float32, sharding=sharding)
    gates = {"shared_hidden": 8, "gates_shared": routing.scoring == "softmax"}
    return SparseMlp(routing, WIDTH, HIDDEN, dtype=jnp.float32, sharding=sharding, **gates)


@functools.cache
def layer(name, **mesh):
    model = make_layer(name, make_sharding(**mesh))
    if mesh:
        return move(layer(name), model)
    parameters.initialize(model, jax.random.key(0))
    for path, parameter in parameters.named_parameters(model):
        if path.endswith(".bias"):
            rng = np.random.default_rng(len(path))
            parameter.set_value(jnp.asarray(rng.normal(size=parameter.shape).astype(jnp.float32)))
    return model


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=(*shape, WIDTH)).astype(np.float32)


def by_hand(model, x):
    """Computes every row's experts one by one, in float64."""

    def silu(values):
        return values / (1 + np.exp(-values))

    def mlp(row, gate, up, down):
        return (silu(row @ gate) * (row @ up)) @ down

    if model.experts.form.interleaved:
        return clamped_by_hand(model, x)
    kernels = [
        np.float64(one.kernel[...])
        for one in (model.experts.gate_proj, model.experts.up_proj, model.experts.down_proj)
    ]
    shared = model.shared_experts
    of_shared = [np.float64(p.kernel[...]) for p in (shared.gate_proj, shared.up_proj)]
    of_shared.append(np.float64(shared.down_proj.kernel[...]))
    chosen, weights = jax.device_get(model.gate(jnp.asarray(x)))
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        row = np.float64(x[at])
        out[at] = mlp(row, *of_shared)
        if model.shared_expert_gate is not None:
            out[at] /= 1 + np.exp(-row @ np.float64(model.shared_expert_gate.kernel[...]))
        for expert, weight in zip(chosen[at], weights[at], strict=True):
            out[at] += weight * mlp(row, *(kernel[expert] for kernel in kernels))
    return out


def clamped_by_hand(model, x):
    """Computes every row's experts one by one, in float64, by the formulas of gpt-oss."""
    first, last = model.experts.interleaved_proj, model.experts.down_proj
    arrays = [np.float64(one[...]) for one in (first.kernel, first.bias, last.kernel, last.bias)]
    chosen, weights = jax.device_get(model.gate(jnp.asarray(x)))
    logits = x @ np.float64(model.gate.kernel[...]) + np.float64(model.gate.bias[...])
    out = np.zeros(x.shape)
    for at in np.ndindex(x.shape[:-1]):
        best = np.argsort(-logits[at])[: len(chosen[at])]
        np.testing.assert_array_equal(chosen[at], best)
        exponentials = np.exp(logits[at][best])
        np.testing.assert_allclose(weights[at], exponentials / exponentials.sum(), rtol=1e-5)
        for expert, weight in zip(chosen[at], weights[at], strict=True):
            kernel, bias, down, down_bias = (array[expert] for array in arrays)
            both = np.float64(x[at]) @ kernel + bias
            gate, up = np.minimum(both[::2], 0.5), np.clip(both[1::2], -0.5, 0.5)
            out[at] += weight * ((up + 1) * gate / (1 + np.exp(-1.7 * gate)) @ down + down_bias)
    return out


@pytest.mark.parametrize("name", ROUTINGS)
def test_rows_get_what_their_experts_give(name):
    model, x = layer(name), rows(2, 5)
    np.testing.assert_allclose(jax.jit(model)(x), by_hand(model, x), atol=2e-5)


def test_a_row_does_not_depend_on_those_beside_it():
    run = jax.jit(layer("softmax"))
    x = rows(3, 7)
    alone = run(x)[1, 4]
    for seed in (1, 2, 3):
        others = rows(3, 7, seed=seed)
        others[1, 4] = x[1, 4]
        np.testing.assert_array_equal(run(others)[1, 4], alone)
    crowd = np.broadcast_to(x[1, 4], x.shape)  # All rows choose the same experts.
    np.testing.assert_array_equal(run(crowd), np.broadcast_to(alone, x.shape))


@pytest.mark.parametrize(
    "mesh", [{"expert": 4, "tensor": 2}, {"data": 2, "expert": 2, "fsdp": 2}], ids=str
)
def test_eight_devices_equal_one(mesh):
    x = rows(4, 5)
    for name in ("softmax", "sigmoid, groups and a correction", "gpt-oss"):
        spread = layer(name, **mesh)
        out = jax.jit(spread)(x)
        np.testing.assert_allclose(out, jax.jit(layer(name))(x), atol=2e-5)
        assert len(spread.experts.down_proj.kernel[...].sharding.device_set) == 8


@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups and a correction"])
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"expert": 4, "tensor": 2}, dict.fromkeys(("batch", "pages"), ("data", "fsdp", "expert"))),
        ({"data": 4, "expert": 2}, {"expert": ("data", "expert")}),
    ],
    ids=str,
)
def test_rows_are_exchanged_where_they_are_split_as_experts_are(mesh, changes, name):
    mixed = sharding.make_sharding(mesh, dict(schema.SHARDING_RULES) | changes)
    spread = move(layer(name), make_layer(name, mixed))
    # Three rows do not divide over the devices, so they are replicated.
    for batch, sent in ((4, True), (3, False)):
        x, run = rows(batch, 5), jax.jit(spread)
        np.testing.assert_allclose(run(x), jax.jit(layer(name))(x), atol=2e-5)
        program = run.lower(x).as_text()
        assert ("all_gather" in program) == ("reduce_scatter" in program) == sent


def test_names_of_the_tensors_of_experts():
    names = moe.stacked_names("layers.3.mlp.experts.up_proj.kernel", 2)
    assert names == tuple(f"layers.3.mlp.experts.{i}.up_proj.weight" for i in range(2))
    for path in ("layers.3.mlp.up_proj.kernel", "layers.3.mlp.gate.kernel"):
        assert moe.stacked_names(path, 2) is None
