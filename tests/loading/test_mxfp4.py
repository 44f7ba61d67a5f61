"""Tests of gpt-oss with experts in mxfp4, as its checkpoints are published."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.golden import build_target, import_transformers, whole_logits
from support.models import family_architecture, make_sharding

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import registry
from dflash.parallel import parameters

EXPERTS, WIDTH, HIDDEN = 4, 64, 96


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A random target in mxfp4, and the same one in float32, dequantized by transformers."""
    torch, _ = import_transformers()
    from transformers.integrations import mxfp4

    arch = family_architecture(
        "gpt_oss", num_hidden_layers=1, hidden_size=WIDTH, intermediate_size=HIDDEN,
        num_local_experts=EXPERTS,
    )  # fmt: skip
    kind = registry.load(registry.TARGETS["gpt_oss"].implementation)
    model = kind(arch, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(model, jax.random.key(0))
    root = tmp_path_factory.mktemp("mxfp4")
    plain, packed = root / "plain", root / "packed"
    checkpoint.save(model, plain, kind.config_to_hf(arch))
    shutil.copytree(plain, packed)
    tensors, rng = load_file(plain / "model.safetensors"), np.random.default_rng(0)
    blocks_and_scales = {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        _, inputs, outputs = tensors[name].shape
        blocks = rng.integers(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 126, blocks.shape[:-1], dtype=np.uint8)
        dequantized = mxfp4._convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
        tensors[name] = np.ascontiguousarray(dequantized.numpy())
        assert tensors[name].shape == (EXPERTS, inputs, outputs)
        blocks_and_scales |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save_file(tensors, plain / "model.safetensors")
    others = {k: v for k, v in tensors.items() if not k.endswith(("gate_up_proj", "down_proj"))}
    save_file(others | blocks_and_scales, packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed / "config.json").write_text(json.dumps(config))
    return plain, packed


@pytest.mark.parametrize("mesh", [{}, {"expert": 2, "tensor": 1}], ids=str)
def test_experts_are_those_that_transformers_dequantizes(directories, mesh):
    plain, packed = (build_target(directory, **mesh) for directory in directories)
    for name in ("interleaved_proj", "down_proj"):
        kept, other = (getattr(one.layers[0].mlp.experts, name) for one in (packed, plain))
        assert kept.kernel.get_value().dtype == jnp.int8
        np.testing.assert_array_equal(kept.plain(jnp.zeros(1)), other.kernel.get_value())
    assert packed.layers[0].self_attn.q_proj.format is None
    np.testing.assert_allclose(whole_logits(packed), whole_logits(plain), atol=1e-5)


def failure(directory, **mesh):
    with pytest.raises((errors.CheckpointError, errors.ConfigError)) as caught:
        build_target(directory, **mesh)
    return str(caught.value)


def test_missing_scales_and_blocks_of_another_shape_are_named(directories, tmp_path):
    shutil.copytree(directories[1], tmp_path / "target")
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    blocks, scales = (f"model.layers.0.mlp.experts.down_proj_{x}" for x in ("blocks", "scales"))
    save_file({name: array for name, array in tensors.items() if name != scales}, file)
    assert failure(tmp_path / "target") == (
        f"{file}: tensor '{blocks}' is U8, but '{scales}' is missing; copy or download the "
        "checkpoint again"
    )
    save_file(tensors | {blocks: np.ascontiguousarray(tensors[blocks][:, :, :2])}, file)
    message = f"tensor '{blocks}' has shape [4, 64, 2, 16], expected [4, 64, 3, 16]"
    assert message in failure(tmp_path / "target")


def test_blocks_that_straddle_devices_are_refused(directories):
    """Three blocks of 32 inputs do not divide over two devices."""
    message = failure(directories[1], tensor=2)
    assert "do not divide over 2 devices; split experts over mesh.expert instead" in message
    assert "already" in failure(directories[1], quantization="int8")
