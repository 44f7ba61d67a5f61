"""Drafters that start from layers of their target."""

import dataclasses

import jax
import numpy as np
import pytest
from support import models

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.models.dense import Llama3
from dflash.parallel import parameters
from dflash.training import start


def weights_of(module) -> dict[str, np.ndarray]:
    arrays = parameters.named_parameters(module)
    return {path: np.asarray(param.get_value()) for path, param in arrays}


@pytest.mark.parametrize("name", ["dflash", "dflash2", "dflare", "dspark", "lilicorr"])
@pytest.mark.parametrize(("initialize_from", "layer"), [("target_first", 0), ("target_last", 1)])
def test_draft_layers_are_copies_of_target_layers(name, initialize_from, layer):
    target, drafter = models.target(), models.drafter(name)
    before, theirs = weights_of(drafter), weights_of(target)
    start.copy(drafter, target, initialize_from)
    changed = []
    for path, weight in weights_of(drafter).items():
        source = path.replace("layers.0.", f"layers.{layer}.")
        if not np.array_equal(weight, before[path]):
            np.testing.assert_array_equal(weight, theirs[source], err_msg=path)
            changed.append(path)
    names = {path: f".{path}".split(".")[-2] for path in before}  # Those of the modules.
    assert set(changed) == {path for path, name in names.items() if name in start.KERNELS}


def test_norms_are_copied_where_both_have_them():
    drafter = models.drafter("dflash")
    found = start.copies(drafter, models.target(), "target_last")
    assert found["norm.scale"] == "norm.scale"
    assert found["layers.0.self_attn.q_norm.scale"] == "layers.1.self_attn.q_norm.scale"
    assert not [path for path in found if path.startswith(("fc", "hidden_norm"))]
    llama = Llama3(models.ARCHITECTURE, dtype="float32", sharding=models.make_sharding())
    assert found.keys() - start.copies(drafter, llama, "target_last").keys() == {
        "layers.0.self_attn.q_norm.scale",
        "layers.0.self_attn.k_norm.scale",
    }


def test_steps_may_donate_the_copies():
    target, drafter = models.target(), models.drafter("dflash")
    start.copy(drafter, target, "target_first")
    for _, param in parameters.named_parameters(drafter):
        param.get_value().delete()
    jax.block_until_ready([param.get_value() for _, param in parameters.named_parameters(target)])
    assert not any(p.get_value().is_deleted() for _, p in parameters.named_parameters(target))


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> str:
    """Directory of a DFlash drafter of the tiny target."""
    directory, drafter = tmp_path_factory.mktemp("drafter") / "hf", models.drafter("dflash")
    checkpoint.save(drafter, directory, type(drafter).config_to_hf(drafter.shape))
    return str(directory)


def test_a_drafter_starts_with_the_backbone_of_another(stored):
    drafter, theirs = models.drafter("ubtree"), weights_of(models.drafter("dflash"))
    before = weights_of(drafter)
    for _, parameter in parameters.named_parameters(drafter):
        parameter.set_value(parameter.get_value() + 1)
    start.copy(drafter, models.target(), stored)
    for path, weight in weights_of(drafter).items():
        wanted = theirs[path] if path in theirs else before[path] + 1
        np.testing.assert_array_equal(weight, wanted, err_msg=path)
    assert before.keys() - theirs.keys() == {
        path for path in before if path.startswith("candidate_selector.")
    }


def test_a_backbone_of_other_sizes(stored):
    wide = dataclasses.replace(models.ARCHITECTURE, hidden_size=40)
    message = rf"fc\.kernel is \[80, 40\], but {stored} has \[64, 32\]: give drafter\.architecture"
    with pytest.raises(errors.ConfigError, match=message):
        start.check(models.drafter("dflash", arch=wide), models.target(), stored, download=True)


def other_target(**changes):
    arch = dataclasses.replace(models.ARCHITECTURE, **changes)
    return Llama3(arch, dtype="float32", sharding=models.make_sharding())


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            other_target(intermediate_size=64),
            r"layers.0.mlp.down_proj.kernel is \[48, 32\], but the target's "
            r"layers.1.mlp.down_proj.kernel is \[64, 32\]: give drafter.architecture the target's",
        ),
        (other_target(num_hidden_layers=0), "1 draft layers, but the target has only 0"),
    ],
)
def test_layers_of_other_shapes(target, message):
    with pytest.raises(errors.ConfigError, match=f"drafter.initialize_from: {message}"):
        start.copies(models.drafter("dflash"), target, "target_last")


def test_experts_are_no_mlp():
    target = models.drafter("dflash")  # Any module with layers.
    del target.layers[0].mlp
    message = "the target has no plain layers.0.mlp.down_proj.kernel for the drafter's layers.0.mlp"
    with pytest.raises(errors.ConfigError, match=message):
        start.copies(models.drafter("dflash"), target, "target_first")
