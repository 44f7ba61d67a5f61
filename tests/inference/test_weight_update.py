"""Tests of updates of weights: names, joined and quantized kernels, devices, refusals, memory."""

import functools
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import check_plain_outputs, count_compilations, engine, random_prompts
from support.models import ARCHITECTURE, family_architecture, make_architecture, make_sharding
from support.models import target as shared_target

from dflash import errors
from dflash.inference import weight_update
from dflash.layers.transformer import join_projections
from dflash.loading import quantization
from dflash.models.llama3 import Llama3
from dflash.models.qwen3 import Qwen3
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters

HEADS, KV_HEADS, SIZE = 4, 2, 16  # Of `make_architecture`.
LORA_RANK, LORA_ALPHA = 2, 6.0


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


def arrays(model) -> dict[str, np.ndarray]:
    return {path: np.array(leaf.get_value()) for path, leaf in parameters.named_arrays(model)}


def check_equal(model, other, rtol=0.0) -> None:
    one, two = arrays(model), arrays(other)
    assert one.keys() == two.keys()
    for path, array in one.items():
        np.testing.assert_allclose(array, two[path], rtol=rtol, atol=rtol, err_msg=path)


# --- trees, written out from the sources that foreign_trees.py names ------------------------------


def hf_tree(model) -> dict[str, np.ndarray]:
    tree = {}
    for path, array in arrays(model).items():
        stem = path.rpartition(".")[0]
        name = "lm_head.weight" if stem == "lm_head" else f"model.{stem}.weight"
        if not (tensors := re.fullmatch(r"(.*\.experts)\.(\w+_proj)\.kernel", path)):
            tree[name] = array.T if path.endswith("kernel") else array
            continue
        for i, expert in enumerate(array):
            tree[f"model.{tensors[1]}.{i}.{tensors[2]}.weight"] = expert.T
    return tree


def tunix_tree(model, *, lora: bool = False) -> dict:
    """Nested, with layers in a list, as nnx.state of a model has them."""
    own = arrays(model)

    def layer(i):
        def heads(name):
            return own[f"layers.{i}.self_attn.{name}.kernel"].reshape(32, -1, SIZE)

        attn = {name: {"w": heads(name)} for name in ("q_proj", "k_proj", "v_proj")}
        out = own[f"layers.{i}.self_attn.o_proj.kernel"]
        attn["o_proj"] = {"w": out.reshape(HEADS, SIZE, 32)}
        for name in ("q_norm", "k_norm"):
            if f"layers.{i}.self_attn.{name}.scale" in own:
                attn[name] = {"w": own[f"layers.{i}.self_attn.{name}.scale"]}
        mlp = {
            name: {"kernel": own[f"layers.{i}.mlp.{name}.kernel"]}
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        norms = {
            name: {"w": own[f"layers.{i}.{name}.scale"]}
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        return {"attn": attn, "mlp": mlp, **norms}

    tree = {
        "embedder": {"input_embedding": nnx.Param(jnp.asarray(own["embed_tokens.embedding"]))},
        "final_norm": {"w": own["norm.scale"]},
        "lm_head": {"w": own["lm_head.kernel"]},
        "layers": [layer(i) for i in range(3)],
    }
    if lora:  # Move a product of two small matrices out of the weights.
        rng, layers = np.random.default_rng(0), tree["layers"]
        for held, name, split in (
            (layers[1]["attn"]["q_proj"], "w", 1),
            (layers[1]["attn"]["o_proj"], "w", 2),
            (layers[2]["mlp"]["up_proj"], "kernel", 1),
        ):
            shape = held[name].shape
            a = rng.normal(size=(*shape[:split], LORA_RANK)).astype(np.float32)
            b = rng.normal(size=(LORA_RANK, *shape[split:])).astype(np.float32)
            held[name] = held[name] - LORA_ALPHA / LORA_RANK * np.tensordot(a, b, 1)
            held[f"{name}_lora_a"], held[f"{name}_lora_b"] = a, b
    return tree


def maxtext_tree(model, *, stacked: bool) -> dict:
    own, llama = arrays(model), isinstance(model, Llama3)

    def interleaved(array):
        return np.stack([array[..., : SIZE // 2], array[..., SIZE // 2 :]], -1).reshape(array.shape)

    def layer(i):
        def heads(name):
            return own[f"layers.{i}.self_attn.{name}_proj.kernel"].reshape(32, -1, SIZE)

        query, key = heads("q"), heads("k")
        if llama:
            query, key = interleaved(query) / 4.0, interleaved(key)
        out = own[f"layers.{i}.self_attn.o_proj.kernel"].reshape(HEADS, SIZE, 32)
        attention = {
            "query": {"kernel": query},
            "key": {"kernel": key},
            "value": {"kernel": heads("v")},
            "out": {"kernel": out},
        }
        if not llama:
            attention["query_norm"] = {"scale": own[f"layers.{i}.self_attn.q_norm.scale"]}
            attention["key_norm"] = {"scale": own[f"layers.{i}.self_attn.k_norm.scale"]}
        before, after = "input_layernorm", "post_attention_layernorm"
        return {
            "self_attention": attention,
            "pre_self_attention_layer_norm": {"scale": own[f"layers.{i}.{before}.scale"]},
            "post_self_attention_layer_norm": {"scale": own[f"layers.{i}.{after}.scale"]},
            "mlp": {
                "wi_0": {"kernel": own[f"layers.{i}.mlp.gate_proj.kernel"]},
                "wi_1": {"kernel": own[f"layers.{i}.mlp.up_proj.kernel"]},
                "wo": {"kernel": own[f"layers.{i}.mlp.down_proj.kernel"]},
            },
        }

    layers = [layer(i) for i in range(3)]
    if stacked:
        held = {"layers": jax.tree.map(lambda *each: np.stack(each, 1), *layers)}
    else:
        held = {f"layers_{i}": each for i, each in enumerate(layers)}
    decoder = {
        **held,
        "decoder_norm": {"scale": own["norm.scale"]},
        "logits_dense": {"kernel": own["lm_head.kernel"]},
    }
    embedder = {"token_embedder": {"embedding": own["embed_tokens.embedding"]}}
    return {"params": {"params": {**embedder, "decoder": decoder}}}


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


def test_experts_arrive_one_by_one():
    arch = family_architecture("qwen3_moe")
    model, source = fresh(Qwen3Moe, arch=arch), fresh(Qwen3Moe, seed=1, arch=arch)
    weight_update.update(model, hf_tree(source))
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


def test_an_engine_decodes_with_the_new_weights_and_compiles_nothing():
    """Weights are written into the old buffers, and the tree's own arrays stay valid."""
    shared = shared_target()
    model = fresh(arch=ARCHITECTURE)
    tree, other = jax.device_put(hf_tree(shared)), jax.device_put(hf_tree(model))
    run = engine(on=model, batch_size=8, sync_every=8, max_length=128)
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


def test_a_thousand_updates_leak_nothing():
    model = fresh(num_hidden_layers=1)
    tree = jax.device_put(hf_tree(model))
    weight_update.update(model, tree)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(1000):
        weight_update.update(model, tree)
    assert len(jax.live_arrays()) <= before


def _without(tree):
    del tree["model.layers.1.mlp.up_proj.weight"]


def _transposed(tree):
    tree["model.layers.2.mlp.up_proj.weight"] = tree["model.layers.2.mlp.up_proj.weight"].T


def _nan(tree):
    tree["model.norm.weight"] = tree["model.norm.weight"].at[3].set(jnp.nan)


def _unknown(tree):
    tree["model.layers.3.mlp.up_proj.weight"] = tree["model.norm.weight"]


def _deleted(tree):
    tree["model.norm.weight"].delete()


def _empty(tree):
    tree.clear()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"1 of 36 tensors missing: 'model.layers.1.mlp.up_proj.weight'"),
        (_transposed, r"up_proj.weight' has shape \[32, 48\], expected \[48, 32\]"),
        (_nan, r"1 tensors hold NaN or infinite numbers: 'model.norm.weight'"),
        (_unknown, r"1 unexpected tensors: 'model.layers.3.mlp.up_proj.weight'"),
        (_deleted, r"'model.norm.weight' was donated or deleted"),
        (_empty, r"no arrays: expected the names of Hugging Face"),
    ],
)
def test_an_unusable_tree_changes_nothing(spoil, message):
    model = fresh()
    tree = jax.device_put(hf_tree(fresh(seed=1)))
    spoil(tree)
    with pytest.raises(errors.CheckpointError, match=message):
        weight_update.update(model, tree)
    check_equal(model, fresh())


def test_nan_elsewhere_changes_nothing():
    model, tree = fresh(), hf_tree(fresh(seed=1))
    tree["model.norm.weight"][0] = np.inf
    with pytest.raises(errors.CheckpointError, match=r"NaN or infinite numbers: 'model.norm"):
        weight_update.update(model, tree)
    check_equal(model, fresh())


def test_what_cannot_be_named_is_refused():
    moe = fresh(Qwen3Moe, arch=family_architecture("qwen3_moe"))
    tree = tunix_tree(fresh())
    with pytest.raises(errors.CheckpointError, match=r"experts.*: this tree has no name for it"):
        weight_update.update(moe, tree)
    lora = tunix_tree(fresh(), lora=True)
    with pytest.raises(errors.CheckpointError, match=r"w_lora_a: .*give lora_alpha"):
        weight_update.update(fresh(), lora)
