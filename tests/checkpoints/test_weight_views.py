"""Tests of weights of AWQ and GPTQ, and of one scale for a tensor, against formulas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support import four_bits

from dflash import errors
from dflash.checkpoints import safetensors_header, weight_formats, weight_views
from dflash.checkpoints.safetensors_header import ScaledTensor

OUTPUTS, INPUTS = 24, 32
WHOLE = slice(0, OUTPUTS), slice(0, INPUTS)
PER_TENSOR = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "tensor"}}},
}


def opened(directory, tensors, config):
    """Views of the tensors of a file, and their format."""
    save_file(
        {k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "model.safetensors"
    )
    stored = weight_formats.stored_format({"quantization_config": config})
    return weight_views.views(safetensors_header.read_headers(directory), stored), stored


@pytest.fixture(scope="module", params=list(four_bits.CONFIGS))
def packed(request, tmp_path_factory):
    """The plain weights of a matrix, and the tensor that is read in their place."""
    name = request.param
    matrix = four_bits.draw(np.random.default_rng(0), OUTPUTS, INPUTS)
    tensors = {f"q_proj.{k}": v for k, v in four_bits.pack(name, *matrix).items()}
    found, stored = opened(tmp_path_factory.mktemp(name), tensors, four_bits.CONFIGS[name])
    assert found.keys() == {"q_proj.weight", "q_proj.weight_scale"}
    values, scales = found["q_proj.weight"], found["q_proj.weight_scale"]
    assert (values.code, values.shape) == ("I8", (OUTPUTS, INPUTS))
    return four_bits.plain(*matrix), ScaledTensor.of(values, scales, stored.block)


def bounds(size):
    pairs = st.tuples(st.integers(0, size - 1), st.integers(1, size))
    return pairs.filter(lambda pair: pair[0] < pair[1])


@settings(max_examples=25)
@given(rows=bounds(OUTPUTS), columns=bounds(INPUTS))
def test_any_part_of_four_bits_is_read_exactly(packed, rows, columns):
    expected, tensor = packed
    index = slice(*rows), slice(*columns)
    assert tensor.values.read(index).dtype == np.int8
    np.testing.assert_array_equal(tensor.read(index), expected[index])


def test_one_group_of_all_inputs(tmp_path):
    matrix = four_bits.draw(np.random.default_rng(1), OUTPUTS, INPUTS, group_size=INPUTS)
    tensors = {f"a.{k}": v for k, v in four_bits.pack("awq", *matrix).items()}
    found, stored = opened(tmp_path, tensors, four_bits.AWQ | {"group_size": -1})
    tensor = ScaledTensor.of(found["a.weight"], found["a.weight_scale"], stored.block)
    np.testing.assert_array_equal(tensor.read(WHOLE), four_bits.plain(*matrix))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_for_a_tensor_is_that_of_each_output(tmp_path, shape):
    values = np.arange(-12, 12, dtype=np.int8).reshape(6, 4)
    scale = np.full(shape, 0.3, np.float32)
    norm = np.ones(1, np.float32)
    tensors = {"a.weight": values, "a.weight_scale": scale, "norm.weight": norm}
    found, _ = opened(tmp_path, tensors, PER_TENSOR)
    view = found["a.weight_scale"]
    assert view.shape == (6, 1)
    np.testing.assert_array_equal(view.read((slice(2, 5), slice(0, 1))), np.full((3, 1), scale))
    assert found["a.weight"].shape == (6, 4)
    assert found["norm.weight"].shape == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("a.scales"), "'a.qweight' is no int32 matrix with int32 qzeros and"),
        (lambda t: t.update({"a.qzeros": t["a.qzeros"][1:]}), "'a.qzeros' has shape .3, 3., exp"),
        (lambda t: t.update({"a.scales": t["a.scales"][:, 1:]}), "'a.scales' has shape .4, 23."),
        (lambda t: t.update({"a.g_idx": t["a.g_idx"][::-1]}), "grouped in their order .desc_act."),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    matrix = four_bits.draw(np.random.default_rng(2), OUTPUTS, INPUTS)
    tensors = {f"a.{k}": v for k, v in four_bits.pack("gptq", *matrix).items()}
    change(tensors)
    with pytest.raises(errors.CheckpointError, match=message):
        opened(tmp_path, tensors, four_bits.GPTQ)[0]["a.weight"].read(WHOLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "bits: 8 is not supported, only 4"),
        ({"desc_act": True}, "desc_act: true is not supported, only false"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
        ({"dynamic": {"-:mlp": {}}}, "dynamic: "),
        (
            {"quant_method": "awq", "version": "gemv"},
            "version: 'gemv' is not supported, only 'gemm'",
        ),
        ({"group_size": 0}, "group_size: 0 is not a size"),
    ],
)
def test_unsupported_variants_are_named(change, message):
    with pytest.raises(errors.CheckpointError, match=message):
        weight_formats.stored_format({"quantization_config": four_bits.GPTQ | change})
