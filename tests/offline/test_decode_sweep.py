"""Which points of a sweep share loaded models."""

import dataclasses

from dflash.config import schema
from dflash.drafters.ngram_config import NgramConfig
from dflash.loading import job

RUN = schema.DecodeRun(target=schema.TargetConfig(checkpoint="weights"))


def test_a_target_is_shared_while_its_weights_and_their_places_are_the_same():
    key = job.target_key(RUN)
    same = {"drafter": NgramConfig(), "decode": schema.DecodeConfig(temperature=0.5)}
    for name, value in same.items():
        assert job.target_key(dataclasses.replace(RUN, **{name: value})) == key, name
    other = {
        "target": schema.TargetConfig(checkpoint="others"),
        "mesh": schema.MeshConfig(tensor=2),
        "sharding_rules": {**schema.SHARDING_RULES, "vocab": ()},
        "dtype": "float32",
    }
    for name, value in other.items():
        assert job.target_key(dataclasses.replace(RUN, **{name: value})) != key, name
