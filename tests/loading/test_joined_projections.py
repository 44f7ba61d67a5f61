"""Models whose projections are joined, as on a TPU, do as they do with projections apart."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import check_plain_outputs, engine, random_prompts
from support.models import ARCHITECTURE, drafter, make_sharding
from support.models import target as shared_target

from dflash.compiler import topology
from dflash.config.schema import SHARDING_RULES
from dflash.layers import rotary
from dflash.layers.attention import Attention
from dflash.layers.transformer import join_projections
from dflash.loading import models
from dflash.models.dense import Qwen3
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

MESHES = [(1, 1, 1), (2, 2, 2)]
LENGTHS, LIMITS, STOP_IDS = [9, 16, 41, 10, 13], [20, 1, 12, 32, 7], (8,)
COLLECTIVE = r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def joined(model):
    """A copy of a model whose projections are joined."""
    copied = nnx.clone(model)
    join_projections(copied)
    paths = [path for path, _ in parameters.named_parameters(copied)]
    assert not [path for path in paths if re.search(r"\b(k|v|gate|up)_proj", path)]
    return copied


def forward(model):
    """Logits of ragged rows, and how many collectives of each kind computing them takes."""
    tokens = np.random.default_rng(0).integers(0, ARCHITECTURE.vocab_size, (2, 7)).astype(np.int32)
    segments = np.int32([[1] * 5 + [0] * 2, [1] * 3 + [2] * 4])
    positions = np.int32([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 0, 1, 2, 3]])
    graph, params = nnx.split(model)

    def logits(params, *rows):
        merged = nnx.merge(graph, params)
        return merged.unembed(merged.forward(*rows)[0])

    compiled = jax.jit(logits).lower(params, tokens, positions, segments).compile()
    # One of several arrays has a tuple before its name.
    found = re.findall(rf" = .* ({COLLECTIVE})(?:-start)?\(", compiled.as_text())
    return np.asarray(compiled(params, tokens, positions, segments)), collections.Counter(found)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_same_logits_and_no_more_collectives(mesh):
    model = shared_target(mesh)
    (apart, between), (together, then) = forward(model), forward(joined(model))
    np.testing.assert_allclose(together, apart, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(together.argmax(-1), apart.argmax(-1))
    assert bool(between) == (mesh != (1, 1, 1))
    assert not then - between, (then, between)


@pytest.mark.parametrize(
    ("name", "mesh", "tree"),
    [("dflash", (1, 1, 1), False), ("dflash", (2, 1, 4), True),
     ("autoregressive", (1, 1, 1), False)],
)  # fmt: skip
def test_the_same_tokens(name, mesh, tree):
    model = joined(drafter(name, mesh=mesh, tree=tree))
    target = joined(shared_target(mesh))
    run = engine(model, mesh=mesh, on=target, batch_size=2, sync_every=4)
    check_plain_outputs(run, random_prompts(LENGTHS), LIMITS, STOP_IDS)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("takes_context", [False, True])
def test_heads_are_those_of_projections_apart(mesh, takes_context):
    attention = Attention(
        24, num_heads=8, num_kv_heads=4, head_dim=8, eps=1e-6, qk_norm=takes_context,
        takes_context=takes_context, bias=True, dtype=jnp.float32, sharding=make_sharding(*mesh),
    )  # fmt: skip
    parameters.initialize(attention, jax.random.key(0))
    for i, projection in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
        like = projection.bias[...]
        values = jax.random.normal(jax.random.key(i), like.shape)
        projection.bias.set_value(jax.device_put(values, like.sharding))
    together = joined(attention)
    together.join_projections()  # a second time it stays as it is
    x = jax.random.normal(jax.random.key(1), (2, 3, 24))
    cos_sin = rotary.angles(jnp.arange(6).reshape(2, 3), ARCHITECTURE)
    calls = [Attention.project, *[Attention.keys_values] * takes_context]
    for call in map(nnx.jit, calls):
        for ours, plain in zip(
            call(together, x, cos_sin), call(attention, x, cos_sin), strict=True
        ):
            assert ours.shape == plain.shape
            np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)
    if not takes_context:
        for module in (together, attention):
            with pytest.raises(ValueError, match="with takes_context=True"):
                module.keys_values(x, cos_sin)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_abstract_weights_are_joined_as_real_ones_are(mesh):
    real = joined(shared_target(mesh))
    abstract = type(real)(real.arch, dtype=jnp.float32, sharding=real.sharding)
    join_projections(abstract)
    planned = dict(parameters.named_parameters(abstract))
    there = dict(parameters.named_parameters(real))
    assert set(planned) == set(there)
    for path, param in there.items():
        one, other = param.get_value(), planned[path].get_value()
        assert isinstance(other, jax.ShapeDtypeStruct)
        assert (one.shape, one.dtype, one.sharding) == (other.shape, other.dtype, other.sharding)


@pytest.mark.tpu_compiler
def test_a_tpu_has_them_joined_and_a_mesh_of_cpus_apart():
    machine = topology.find("v5p:2x2x1")
    sizes = {"data": 1, "fsdp": 1, "tensor": 4}
    tpu = topology.make_sharding(machine, sizes, SHARDING_RULES)
    for placed, wanted in ((tpu, 0), (make_sharding(tensor=2), ARCHITECTURE.num_hidden_layers)):
        model = Qwen3(ARCHITECTURE, dtype=jnp.float32, sharding=placed)
        models.arrange(model, placed)
        paths = [path for path, _ in parameters.named_parameters(model)]
        assert len([path for path in paths if path.endswith("q_proj.kernel")]) == wanted
        assert len([path for path in paths if path.endswith("mlp.up_proj.kernel")]) == wanted


def test_columns_that_are_split_differently_stay_apart():
    mesh = make_sharding(1, 1, 4)
    rules = tuple((name, () if name == "kv_heads" else axes) for name, axes in mesh.rules)
    attention = Attention(
        24, num_heads=8, num_kv_heads=2, head_dim=8, eps=1e-6, qk_norm=True,
        dtype=jnp.float32, sharding=Sharding(mesh.mesh, rules),
    )  # fmt: skip
    before = dict(parameters.named_parameters(attention))
    attention.join_projections()
    assert dict(parameters.named_parameters(attention)).keys() == before.keys()
