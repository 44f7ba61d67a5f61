"""Tests of the diagnosis of a pair, on the embedded tiny family."""

import json
import shutil
from collections import Counter

import pytest
from support import TESTS

from dflash import check
from dflash.config import loader, schema
from dflash.loading import job as jobs
from dflash.measure.pair import alternatives, diagnosis, report
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


def test_wrong_taps_are_found(tmp_path):
    """The same weights accept more with the layers that they were trained on."""
    shutil.copytree(DRAFTER, tmp_path / "drafter")
    path = tmp_path / "drafter" / "config.json"
    config = json.loads(path.read_text())
    group = config["dflash_config"]
    trained = group["target_layer_ids"]
    group["target_layer_ids"] = [layer + 1 for layer in trained]
    path.write_text(json.dumps(config))
    job = make_job(tmp_path / "drafter")
    job.load_weights()
    found = diagnosis.measure(job)
    others = alternatives.of_drafter(job.drafter.shape, job.target.arch, job.tokenizer)
    taps = [one for one in others if one.field == "target_layer_ids"]
    suspect = diagnosis.suspicious(found, diagnosis.read_all(job, taps))
    assert suspect is not None
    assert suspect.alternative.change == str(trained)
    (line,) = report.verdict(job, found, suspect)
    assert line.startswith("suspicious: target_layer_ids.")
    assert line.endswith("drafter/config.json")


def test_a_strategy_without_weights_is_measured(capsys):
    with pytest.raises(SystemExit) as caught:
        check.main(["configs/tiny_dflash.yml", "drafter={name: ngram}", "decode.max_new_tokens=8"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "drafter     ngram, without weights" in out
    assert "τ" in out
