"""Tests of what a config changes about the models that it names."""

import json
import shutil

import pytest
from support.golden import GOLDEN
from support.models import make_sharding

from dflash.config.schema import RopeScaling, TargetConfig
from dflash.drafters.dflash_config import DFlashConfig
from dflash.loading import models

YARN = GOLDEN / "qwen3yarn_v14"
STATED = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=32)


@pytest.fixture
def unscaled(tmp_path):
    """The same target, whose config.json says nothing of YaRN."""
    shutil.copytree(YARN / "target", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": None}
    path.write_text(json.dumps(config))
    return tmp_path / "target"


def build_target(directory, **options):
    config = TargetConfig(checkpoint=str(directory), **options)
    source = models.find_target(config)
    return models.build_target(config, source, dtype="float32", sharding=make_sharding())


def test_rope_scaling_of_the_config_replaces_the_checkpoints(unscaled):
    assert build_target(unscaled).arch.rope_scaling is None
    scaled = build_target(unscaled, rope_scaling=STATED).arch
    assert scaled.rope_scaling == build_target(YARN / "target").arch.rope_scaling == STATED
    assert scaled.max_position_embeddings == 128  # what the scaling is made for


def test_drafters_have_a_rope_scaling_of_their_own():
    target = build_target(YARN / "target")
    for scaling in (None, STATED):
        config = DFlashConfig(checkpoint=str(YARN / "draft"), rope_scaling=scaling)
        source = models.find_drafter(config)
        drafter = models.build_drafter(
            config, source, target.arch, dtype="float32", sharding=make_sharding()
        )
        assert drafter.shape.decoder.rope_scaling == scaling
