"""Tests of MaxText's checkpoint layout; see also tests/test_convert.py."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.foreign_trees import maxtext_tree
from support.models import family_architecture, make_sharding, make_target

from dflash import errors
from dflash.checkpoints import maxtext_io
from dflash.models.llama3 import Llama3
from dflash.models.qwen3 import Qwen3
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters


def restored(directory):
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(directory.absolute())


def abstract(kind, **changes):
    arch = make_target(kind).arch if not changes else make_target(kind, **changes).arch
    return kind(arch, dtype="float32", sharding=make_sharding())


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", [Qwen3, Llama3])
def test_the_tree_is_that_of_maxtext(kind, stacked, tmp_path):
    model = make_target(kind)
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


def test_the_state_of_an_optimizer_is_left_aside(tmp_path):
    tree = maxtext_tree(make_target(Qwen3), stacked=True)
    tree |= {"opt_state": {"mu": np.ones(3)}, "step": np.int32(7)}
    items = tmp_path / "12/items"
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(items.absolute(), args=ocp.args.PyTreeSave(tree))
    (tmp_path / "5/items").mkdir(parents=True)
    assert maxtext_io.find_items(tmp_path) == items
    maxtext_io.load(abstract(Qwen3), items)


def test_what_does_not_fit_is_named(tmp_path):
    maxtext_io.save(make_target(Qwen3), tmp_path)
    items = tmp_path / "0/items"
    with pytest.raises(errors.CheckpointError, match=r"layers.mlp.w.*kernel' has shape .*expect"):
        maxtext_io.load(abstract(Qwen3, intermediate_size=64), items)
    with pytest.raises(errors.CheckpointError, match=r"2 tensors unexpected: .*key_norm.scale"):
        maxtext_io.load(abstract(Llama3), items)
    moe = Qwen3Moe(family_architecture("qwen3_moe"), dtype="float32", sharding=make_sharding())
    with pytest.raises(errors.CheckpointError, match=r"experts.*: MaxText's layout has no name"):
        maxtext_io.load(moe, items)
