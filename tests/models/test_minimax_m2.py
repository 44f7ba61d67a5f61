"""Tests of MiniMax-M2's config.json and of the tensors that are not read."""

import pytest
from support.models import family_architecture, make_sharding

from dflash.checkpoints import weight_formats
from dflash.models.minimax_m2 import MiniMaxM2

PLAIN = MiniMaxM2.config_to_hf(family_architecture("minimax_m2"))
del PLAIN["partial_rotary_factor"]


@pytest.mark.parametrize(
    ("fields", "rotated"),
    [
        ({}, 8),
        ({"rotary_dim": 4}, 4),
        ({"rotary_dim": 4, "partial_rotary_factor": 0.25}, 2),
        ({"rotary_dim": 4, "rope_parameters": {"rope_theta": 5e6}}, 4),
        ({"rotary_dim": 4, "rope_parameters": {"partial_rotary_factor": 0.75}}, 6),
    ],
)
def test_the_rotated_part_is_that_of_transformers(fields, rotated):
    transformers = pytest.importorskip("transformers")
    arch = MiniMaxM2.architecture_from_hf(PLAIN | fields)
    config = transformers.MiniMaxM2Config(**PLAIN | fields)
    expected = config.rope_parameters.get("partial_rotary_factor", 1.0) * config.head_dim
    assert arch.rotary_dim == expected == rotated


def test_layers_for_more_tokens_are_not_read():
    arch = family_architecture("minimax_m2", num_mtp_modules=2)
    names = MiniMaxM2(arch, dtype="float32", sharding=make_sharding()).ignored_checkpoint_names
    assert [name for name in names if "layers" in name] == ["model.layers.3.*", "model.layers.4.*"]


def test_its_name_of_float8_is_read():
    group = {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [128, 128]}
    stored = weight_formats.stored_format({"quantization_config": group})
    assert stored.block == (128, 128)
