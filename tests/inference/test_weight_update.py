"""Tests of updates of weights: names, joined and quantized kernels, devices, refusals, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import (
    check_plain_outputs,
    count_compilations,
    random_prompts,
    retargeted,
    shared_engine,
    without_prefix_cache,
)
from support.foreign_trees import LORA_ALPHA, arrays, hf_tree, maxtext_tree, tunix_tree
from support.models import ARCHITECTURE, family_architecture, make_architecture, make_sharding
from support.models import target as shared_target

from dflash import errors
from dflash.inference import update_plan, weight_update
from dflash.layers.transformer import join_projections
from dflash.loading import quantization
from dflash.models.deepseek_v3 import DeepseekV3
from dflash.models.dense import Llama3, Qwen3
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters


@functools.cache
def _initialized(kind, seed, mesh, joined, scheme, arch):
    model = kind(arch, dtype=jnp.float32, sharding=make_sharding(*mesh))
    quantization.quantize(model, scheme)
    parameters.initialize(model, jax.random.key(seed))
    if joined:
        join_projections(model)
    return model


def fresh(kind=Qwen3, seed=0, *, mesh=(1, 1, 1), joined=False, scheme=None, arch=None, **changes):
    """A target with random weights of its own, which an update may donate."""
    arch = arch or make_architecture(**changes)
    graph, state = nnx.split(_initialized(kind, seed, mesh, joined, scheme, arch))
    return nnx.merge(graph, jax.tree.map(jnp.copy, state))


def check_equal(model, other, rtol=0.0) -> None:
    one, two = arrays(model), arrays(other)
    assert one.keys() == two.keys()
    for path, array in one.items():
        np.testing.assert_allclose(array, two[path], rtol=rtol, atol=rtol, err_msg=path)


TREES = {
    "hf": (hf_tree, {}),
    "tunix": (tunix_tree, {}),
    "tunix-lora": (lambda model: tunix_tree(model, lora=True), {"lora_alpha": LORA_ALPHA}),
    "maxtext-stacked": (lambda model: maxtext_tree(model, stacked=True), {}),
    "maxtext-apart": (lambda model: maxtext_tree(model, stacked=False), {}),
}


@pytest.mark.parametrize("kind", [Qwen3, Llama3])
@pytest.mark.parametrize("name", TREES)
def test_weights_arrive_under_every_name(name, kind):
    made, options = TREES[name]
    model, source = fresh(kind), fresh(kind, seed=1)
    weight_update.update(model, made(source), **options)
    check_equal(model, source, rtol=1e-5 if options or kind is Llama3 else 0.0)


@pytest.mark.parametrize("name", ["hf", "maxtext-stacked", "maxtext-apart"])
def test_experts_arrive_one_by_one_or_together(name):
    arch = family_architecture("qwen3_moe")
    model, source = fresh(Qwen3Moe, arch=arch), fresh(Qwen3Moe, seed=1, arch=arch)
    weight_update.update(model, TREES[name][0](source))
    check_equal(model, source)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("scheme", [None, "int8"])
def test_joined_and_quantized_kernels_are_made_anew(scheme, mesh):
    model = fresh(mesh=mesh, joined=True, scheme=scheme)
    source = fresh(seed=1)
    made = fresh(mesh=mesh, scheme=scheme, seed=2)
    weight_update.update(made, hf_tree(source))
    join_projections(made)
    weight_update.update(model, hf_tree(source))
    weight_update.update(model, jax.device_put(hf_tree(source)))
    check_equal(model, made)


@pytest.mark.parametrize("where", ["host", "another device", "another mesh", "in place"])
def test_trees_may_be_anywhere(where):
    model, tree = fresh(mesh=(2, 2, 2)), hf_tree(fresh(seed=1))
    place = {
        "another device": jax.sharding.SingleDeviceSharding(jax.devices()[3]),
        "another mesh": make_sharding(1, 2, 1).replicated(),
        "in place": model.sharding.replicated(),
    }.get(where)
    if place is not None:
        tree = jax.device_put(tree, place)
    places = [leaf.get_value().sharding for _, leaf in parameters.named_arrays(model)]
    weight_update.update(model, tree)
    check_equal(model, fresh(seed=1))
    assert places == [leaf.get_value().sharding for _, leaf in parameters.named_arrays(model)]


def test_a_plan_serves_trees_of_one_form(monkeypatch):
    """Another form, or projections that were joined since, need a plan of their own."""
    small = functools.partial(fresh, num_hidden_layers=1)
    model, tree = small(), jax.device_put(hf_tree(small(seed=1)))
    weight_update.update(model, tree)
    other = jax.tree.map(jnp.negative, tree)
    with monkeypatch.context() as patch:
        patch.setattr(update_plan, "make_plan", None)
        weight_update.update(model, other)
    np.testing.assert_array_equal(model.norm.scale[...], other["model.norm.weight"])
    join_projections(model)
    weight_update.update(model, tree)
    check_equal(model, small(seed=1, joined=True))
    tree["model.norm.weight"] = jnp.ones(3)
    with pytest.raises(errors.CheckpointError, match=r"has shape \[3\], expected \[32\]"):
        weight_update.update(model, tree)


def test_an_engine_decodes_with_the_new_weights_and_compiles_nothing():
    """Weights are written into the old buffers, and the tree's own arrays stay valid."""
    shared = shared_target()
    model = fresh(arch=ARCHITECTURE)
    tree, other = jax.device_put(hf_tree(shared)), jax.device_put(hf_tree(model))
    run = without_prefix_cache(retargeted(shared_engine("none"), model))
    prompts, limits = random_prompts([9, 16, 10]), [20, 12, 9]
    run.compile([16])
    run.update_weights(tree)
    check_plain_outputs(run, prompts, limits, stop_ids=(8,))
    buffers = _buffers(model)
    with count_compilations() as compiled:
        run.update_weights(other)
        run.update_weights(tree)
        check_plain_outputs(run, prompts, limits, stop_ids=(8,))
    assert not compiled
    assert buffers == _buffers(model)
    assert buffers.isdisjoint(array.unsafe_buffer_pointer() for array in tree.values())


def _buffers(model) -> set[int]:
    named = parameters.named_arrays(model)
    return {leaf.get_value().unsafe_buffer_pointer() for _, leaf in named}


NORM, UP = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda tree: tree.pop(UP.format(1)), rf"1 of 36 tensors missing: '{UP.format(1)}'"),
        (lambda tree: tree.update({UP.format(2): tree[UP.format(2)].T}),
         r"up_proj.weight' has shape \[32, 48\], expected \[48, 32\]"),
        (lambda tree: tree.update({NORM: tree[NORM].at[3].set(jnp.nan)}),
         rf"1 tensors hold NaN or infinite numbers: '{NORM}'"),
        (lambda tree: tree.update({NORM: np.full(32, np.inf, np.float32)}),
         rf"1 tensors hold NaN or infinite numbers: '{NORM}'"),
        (lambda tree: tree.update({UP.format(3): tree[NORM]}), "1 unexpected tensors: 'model.lay"),
        (lambda tree: tree[NORM].delete(), rf"'{NORM}' was donated or deleted"),
        (lambda tree: tree.update({NORM: "model.safetensors"}), r"has shape \[\], expected \[32\]"),
        (lambda tree: tree.update({NORM: tree[NORM].astype(jnp.int32)}),
         rf"'{NORM}' is int32, expected floating-point numbers"),
        (lambda tree: tree.update({"model": {"norm.weight": tree[NORM]}}),
         rf"two arrays are named '{NORM}'"),
        (lambda tree: tree.clear(), r"no arrays: expected the names of Hugging Face"),
    ],
)  # fmt: skip
def test_an_unusable_tree_changes_nothing(spoil, message):
    model = fresh()
    tree = jax.device_put(hf_tree(fresh(seed=1)))
    spoil(tree)
    with pytest.raises(errors.CheckpointError, match=message):
        weight_update.update(model, tree)
    check_equal(model, fresh())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_tied_head_must_be_the_embedding(on_host):
    model, source = fresh(tie_word_embeddings=True), fresh(seed=1, tie_word_embeddings=True)
    tree, embedding = hf_tree(source), "model.embed_tokens.weight"
    if not on_host:
        tree = jax.device_put(tree)
    tree["lm_head.weight"] = tree[embedding] + 1
    with pytest.raises(errors.CheckpointError, match=r"'lm_head.weight' differs from 'model.embed"):
        weight_update.update(model, tree)
    check_equal(model, fresh(tie_word_embeddings=True))
    for copy in (tree[embedding] + 0, tree[embedding]):
        weight_update.update(model, tree | {"lm_head.weight": copy})
    check_equal(model, source)


def test_what_cannot_be_named_is_refused():
    latent = fresh(DeepseekV3, arch=family_architecture("deepseek_v3"))
    tree = tunix_tree(fresh())
    with pytest.raises(errors.CheckpointError, match=r"_proj.*: this tree has no name for it"):
        weight_update.update(latent, tree)
    lora = tunix_tree(fresh(), lora=True)
    with pytest.raises(errors.CheckpointError, match=r"w_lora_a: .*give lora_alpha"):
        weight_update.update(fresh(), lora)
