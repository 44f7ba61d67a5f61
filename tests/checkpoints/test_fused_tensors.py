"""Tests of fused projections: files that hold them are read like those of separate ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import failure
from support.dflash_cases import FULL, make_shape
from support.models import make_architecture, make_sharding

from dflash.checkpoints import checkpoint
from dflash.drafters.dflash import DFlash
from dflash.models.dense import Qwen2
from dflash.parallel import parameters

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def fuse(directory):
    """Fuses the projections of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    for fused, parts in FUSED.items():
        for first in [name for name in tensors if f".{parts[0]}." in name]:
            rows = [tensors.pop(first.replace(parts[0], part)) for part in parts]
            tensors[first.replace(parts[0], fused)] = np.concatenate(rows)
    save_file(tensors, directory / "model.safetensors")


def save_fused(directory, kind=Qwen2, shape=None):
    """Saves a model, its projections fused; returns the model. That of a Qwen2 has biases."""
    shape = shape or make_architecture()
    model = kind(shape, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(model, jax.random.key(0))
    checkpoint.save(model, directory, kind.config_to_hf(shape))
    fuse(directory)
    return model


def load(directory, shape, kind=Qwen2):
    model = kind(shape, dtype=jnp.float32, sharding=make_sharding(tensor=2))
    checkpoint.load(model, directory)
    return dict(parameters.named_parameters(model))


@pytest.mark.parametrize(
    ("kind", "shape"), [(Qwen2, make_architecture()), (DFlash, make_shape(FULL, FULL))]
)
def test_fused_projections_are_read_as_separate_ones(kind, shape, tmp_path):
    model = save_fused(tmp_path / "out", kind, shape)
    loaded = load(tmp_path / "out", shape, kind)
    for path, parameter in parameters.named_parameters(model):
        np.testing.assert_array_equal(parameter.get_value(), loaded[path].get_value(), path)


def test_a_fused_tensor_of_another_shape_is_named(tmp_path):
    arch = dataclasses.replace(save_fused(tmp_path / "out").arch, intermediate_size=40)
    message = "layers.0.mlp.gate_up_proj.weight' has shape [96, 32], expected [80, 32]; these"
    assert message in failure(load, tmp_path / "out", arch)
