"""Tests of MaxText's checkpoint layout; see also tests/test_convert.py."""

import functools
import importlib.util
import pathlib
import types

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.foreign_trees import hf_tree, maxtext_tree
from support.models import family_architecture, make_sharding

from dflash import errors
from dflash.checkpoints import maxtext_io
from dflash.models.dense import Llama3, Qwen3
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters


def restored(directory):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(directory.absolute())


def abstract(kind, **changes):
    family = {Qwen3: "qwen3", Llama3: "llama3", Qwen3Moe: "qwen3_moe"}[kind]
    arch = family_architecture(family, **changes)
    return kind(arch, dtype="float32", sharding=make_sharding())


@functools.cache
def random_target(kind):
    model = abstract(kind)
    parameters.initialize(model, jax.random.key(0))
    return model


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", [Qwen3, Llama3, Qwen3Moe])
def test_the_tree_is_that_of_maxtext(kind, stacked, tmp_path):
    model = random_target(kind)
    maxtext_io.save(model, tmp_path, scan_layers=stacked)
    found, wanted = restored(tmp_path / "0/items"), maxtext_tree(model, stacked=stacked)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), found, wanted)
    again = abstract(kind)
    maxtext_io.load(again, maxtext_io.find_items(tmp_path))
    for (path, one), (_, two) in zip(
        parameters.named_parameters(again), parameters.named_parameters(model), strict=True
    ):
        one, two = one.get_value(), two.get_value()
        np.testing.assert_allclose(one, two, rtol=1e-6, err_msg=path)


@functools.cache
def maxtext_mapping():
    """MaxText's own table of names and conversions; the package as a whole needs Python 3.12."""
    found = importlib.util.find_spec("maxtext")
    if found is None:
        pytest.skip("needs maxtext: pip install --no-deps --ignore-requires-python maxtext")
    (directory,) = found.submodule_search_locations
    file = pathlib.Path(directory, "checkpoint_conversion/utils/param_mapping.py")
    spec = importlib.util.spec_from_file_location("param_mapping", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("kind", "family"), [(Qwen3, "QWEN"), (Llama3, "LLAMA31"), (Qwen3Moe, "QWEN")]
)
def test_maxtext_converts_our_checkpoints_to_the_same_tensors(kind, family, stacked, tmp_path):
    mapping, model = maxtext_mapping(), random_target(kind)
    maxtext_io.save(model, tmp_path, scan_layers=stacked)
    leaves = jax.tree_util.tree_leaves_with_path(restored(tmp_path / "0/items"))
    flat = {"-".join(key.key for key in path[1:]): np.asarray(leaf) for path, leaf in leaves}
    arch = model.arch
    fields = ("num_hidden_layers", "hidden_size", "head_dim", "num_experts")
    hf = {name: getattr(arch, name) for name in fields if hasattr(arch, name)}
    own = types.SimpleNamespace(
        inhomogeneous_layer_cycle_interval=1,
        head_dim=arch.head_dim,
        base_num_decoder_layers=arch.num_hidden_layers,
    )
    names = getattr(mapping, f"{family}_MAXTEXT_TO_HF_PARAM_MAPPING")(hf, own, stacked)
    hooks = getattr(mapping, f"{family}_MAXTEXT_TO_HF_PARAM_HOOK_FN")(hf, own, stacked, True)
    expected, converted = hf_tree(model), {}
    for key, array in flat.items():
        parts = [(array, names[key])]
        if ".experts." in str(names[key]):  # Experts first; with stacked layers, these then.
            parts = zip(array.reshape(-1, *array.shape[-2:]), np.ravel(names[key]), strict=True)
        elif isinstance(names[key], list):
            parts = [(np.take(array, i, axis=1), name) for i, name in enumerate(names[key])]
        steps = hooks.get(key, [])
        for part, name in parts:
            for step in steps if isinstance(steps, list) else [steps]:
                part = step(part, expected[name].shape)
            converted[name] = part
    assert converted.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(converted[name], tensor, rtol=1e-6, err_msg=name)


def test_the_state_of_an_optimizer_is_left_aside(tmp_path):
    tree = maxtext_tree(random_target(Qwen3), stacked=True)
    tree |= {"opt_state": {"mu": np.ones(3)}, "step": np.int32(7)}
    items = tmp_path / "12/items"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(items.absolute(), args=ocp.args.PyTreeSave(tree))
    (tmp_path / "5/items").mkdir(parents=True)
    assert maxtext_io.find_items(tmp_path) == items
    maxtext_io.load(abstract(Qwen3), items)


def test_what_does_not_fit_is_named(tmp_path):
    maxtext_io.save(random_target(Qwen3), tmp_path)
    items = tmp_path / "0/items"
    with pytest.raises(errors.CheckpointError, match=r"layers.mlp.w.*kernel' has shape .*expect"):
        maxtext_io.load(abstract(Qwen3, intermediate_size=64), items)
    with pytest.raises(errors.CheckpointError, match=r"2 unexpected tensors: .*key_norm.scale"):
        maxtext_io.load(abstract(Llama3), items)
    with pytest.raises(errors.CheckpointError, match=r"tensors missing: .*layers.moe_block.gate"):
        maxtext_io.load(abstract(Qwen3Moe), items)
    moe = abstract(Qwen3Moe, decoder_sparse_step=2)
    with pytest.raises(errors.CheckpointError, match="MaxText's form of Qwen3MoeForCausalLM is no"):
        maxtext_io.load(moe, items)
