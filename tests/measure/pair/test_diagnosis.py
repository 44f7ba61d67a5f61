"""Tests of the diagnosis of a pair, on the embedded tiny family."""

import json
import shutil
from collections import Counter

import pytest
from support import TESTS

from dflash.config import loader, schema
from dflash.inference import replay
from dflash.loading import job as jobs
from dflash.measure.pair import diagnosis, report
from dflash.measure.pair.alternatives import Alternative
from dflash.measure.pair.diagnosis import Acceptance, Reading

DRAFTER = TESTS.parent / "dflash" / "assets" / "tiny_dflash"


def test_acceptance():
    found = Acceptance(Counter({1: 2, 2: 1, 4: 1}))
    assert found.tau == 2.0
    assert found.survival(4) == [0.5, 0.25, 0.25, 0.0]
    assert Acceptance(Counter()).tau == 1.0


def reading(tau_cycles, field="is_causal"):
    return Reading(Alternative(field, "true"), Acceptance(Counter(tau_cycles)))


@pytest.mark.parametrize(
    ("found", "others", "expected"),
    [
        ({2: 10}, [], None),
        ({2: 10}, [{2: 10}, {1: 10}], None),
        ({2: 10}, [{2: 10}, {2: 5, 3: 5}], 1),  # half as many again
        ({3: 10}, [{3: 8, 4: 2}], None),  # a tenth more drafts
        ({1: 100}, [{1: 95, 2: 5}], None),  # hardly any
    ],
)
def test_a_reading_is_suspicious_if_it_accepts_clearly_more(found, others, expected):
    readings = [reading(cycles) for cycles in others]
    suspect = diagnosis.suspicious(Acceptance(Counter(found)), readings)
    assert suspect is (None if expected is None else readings[expected])


def make_job(drafter, *overrides):
    config = loader.load(
        "configs/tiny_dflash.yml",
        [f"drafter.checkpoint={drafter}", "decode.max_new_tokens=24", *overrides],
        schema.DecodeRun,
    )
    return diagnosis.prepare(jobs.prepare_models(config))


def test_what_is_examined():
    job = make_job(DRAFTER, "decode.temperature=0.7", "drafter.block_size=auto")
    assert job.config.decode.temperature == 0
    assert not job.config.drafter.adaptive
    assert len(job.prompts) == 3
    lines = list(report.facts(job))
    assert "mask token  6 (<|mask|>); 1 is <|pad|>" in lines
    assert "attention   2 × full, bidirectional" in lines
    alone = make_job(DRAFTER, "prompts.text=[What is 2 + 2?]")
    assert len(alone.prompts) == diagnosis.MAX_PROMPTS


def diagnose(drafter, *overrides):
    """The job, what its files' own reading accepts, and all other readings."""
    job = make_job(drafter, *overrides)
    job.load_weights()
    others = diagnosis.alternatives_of(job)
    engine = diagnosis.compiled_engine(job, others, lambda ready, total: None)
    decoded = diagnosis.measure(engine, job)
    return job, decoded, diagnosis.read_all(engine, job, decoded, others)


def broken(directory, change):
    """The tiny drafter with other fields in its config.json."""
    shutil.copytree(DRAFTER, directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    group = config.pop("dflash_config")
    config = {**config, "dflash_config": {**group, **change.pop("dflash_config", {})}, **change}
    path.write_text(json.dumps(config))
    return directory


def test_wrong_taps_are_found(tmp_path):
    """The same weights accept more with the layers that they were trained on."""
    trained = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    wrong = {"dflash_config": {"target_layer_ids": [layer + 1 for layer in trained]}}
    job, decoded, readings = diagnose(broken(tmp_path / "drafter", wrong))
    suspect = diagnosis.suspicious(decoded.acceptance, readings)
    assert suspect is not None
    assert suspect.alternative.change == str(trained)
    line = report.verdict(job, decoded.acceptance, suspect)
    assert line.startswith("suspicious: target_layer_ids.")
    assert line.endswith("drafter/config.json")


SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("change", "overrides", "field", "value"),
    [
        ({}, (), None, None),
        ({"dflash_config": {"causal": True}}, (), "is_causal", "false (every layer)"),
        ({"dflash_config": {"mask_token_id": 9}}, (), "mask_token_id", "6 (<|mask|>)"),
        ({"rope_theta": 1e6}, (), "rope_theta", "10000 (the target's)"),
        (SLIDING | {"sliding_window": 4}, (), "layer_types", "full_attention (every layer)"),
        ({}, ("prompts.chat=false",), "prompts.chat", "true"),
    ],
    ids=["none", "causality", "mask", "rotary", "window", "template"],
)
def test_the_wrong_field_is_found(tmp_path, change, overrides, field, value):
    _, decoded, readings = diagnose(broken(tmp_path / "drafter", dict(change)), *overrides)
    suspect = diagnosis.suspicious(decoded.acceptance, readings)
    found = suspect and (suspect.alternative.field, suspect.alternative.change)
    assert found == (field and (field, value))


@pytest.mark.parametrize("name", ["dflash", "dflash2", "eagle3"])
def test_a_replay_accepts_what_the_engine_does(name):
    """Cycle by cycle: the drafter sees the features of one forward pass over each text."""
    drafter = DRAFTER.parent / f"tiny_{name}"
    job = make_job(drafter, f"drafter.name={name}")
    job.load_weights()
    engine = diagnosis.compiled_engine(job, [], lambda ready, total: None)
    decoded = diagnosis.measure(engine, job)
    assert [text.prompt for text in decoded.texts] == [prompt.ids for prompt in job.prompts]
    texts = replay.compute(job.target, decoded.texts, job.drafter.feature_layers)
    found = replay.cycles(job.drafter, job.target, texts)
    assert found.counts == decoded.acceptance.cycles
