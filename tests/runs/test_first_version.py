"""Work directories that the first version left, in first_version/: today's code continues each.

They were made there by `python -m dflash.NAME NAME.yml --workdir NAME`; a key that was added since
must have a default under which the old runs mean what they meant.
"""

import datetime
import json
import pathlib
import shutil

import pytest

from dflash import errors
from dflash.config import benchmark_schema, loader, schema, train_schema
from dflash.config import sweep_points as sweep_lib
from dflash.drafters.ngram_config import NgramConfig
from dflash.measure import results
from dflash.runs import outputs, records, sweeps
from dflash.runs.directory import CONFIG, RunDirectory, check_config
from dflash.runs.display import Display
from dflash.text.prompts import Prompt
from dflash.training import rundir

FIRST = pathlib.Path(__file__).parent / "first_version"


@pytest.fixture
def directory(tmp_path):
    """A copy, for today's code writes its own config there."""
    return shutil.copytree(FIRST, tmp_path / "first")


def test_a_decode_run_is_continued(directory):
    config = loader.load(directory / "decode.yml")
    with (
        RunDirectory(directory / "decode", config, is_used=records.has_outputs) as held,
        records.open_in(held) as found,
    ):
        done = found.completed()
        prompts = [Prompt(index, done[index].prompt_ids, source="p") for index in done]
        assert found.pending(prompts) == []
        summary = outputs.summarize(
            done.values(), block_size=config.drafter.architecture.block_size
        )
    told = json.loads((directory / "decode" / "results.json").read_text())
    assert (len(done), summary.tau, summary.cycles) == (2, told["tau"], told["cycles"])
    assert loader.load(directory / "decode" / CONFIG) == config


def test_a_benchmark_is_accepted(directory):
    config = loader.load(directory / "benchmark.yml", schema=benchmark_schema.BenchmarkRun)
    results.open_directory(directory / "benchmark", config).close()
    rows = results.rows(json.loads((directory / "benchmark" / "results.json").read_text()))
    assert [row["strategy"] for row in rows] == ["none", "dflash"]


def test_a_training_run_is_continued(directory):
    config = loader.load(directory / "train.yml", schema=train_schema.TrainRun)
    rundir.open_directory(directory / "train", config, datetime.date(2026, 1, 1)).close()
    facts = json.loads((directory / "train/checkpoints/2/facts/metadata").read_text())
    assert rundir.same_run(facts["identity"], config)


def test_a_sweep_has_its_points_finished(directory):
    sweep = sweep_lib.load(directory / "sweep.yml")
    found = sweeps.finished(sweep, directory / "sweep")
    assert list(found) == list(sweep.points)
    assert all(row["tau"] == 1.0 for row in found.values())

    class Nothing(sweeps.Runner):
        metrics, shown = ("tau",), ("tau",)

        def check(self, config):
            raise AssertionError

        affinity = run = check

    before = (directory / "sweep" / sweeps.TABLE).read_text()
    outcome = sweeps.run(sweep, Nothing(Display.silent()), directory / "sweep", Display.silent())
    assert outcome.failed == {}
    assert (directory / "sweep" / sweeps.TABLE).read_text() == before
    for name, point in sweep.points.items():
        assert check_config(directory / "sweep" / sweeps.POINTS / name, point.config)


@pytest.mark.parametrize("value", ["test", "train"])
def test_a_removed_key_is_ignored_where_it_changed_nothing(directory, value):
    config = loader.load(directory / "decode.yml")
    file = directory / "decode" / CONFIG
    assert "split: test" in file.read_text()
    file.write_text(file.read_text().replace("split: test", f"split: {value}"))
    if value == "test":
        assert check_config(file.parent, config)
    else:
        with pytest.raises(errors.WorkdirError, match=r"prompts\.split: was removed; "):
            check_config(file.parent, config)


def test_the_hash_of_a_config_stays():
    """The hash covers only non-default values, so it stays valid for later versions."""
    config = schema.DecodeRun(
        target=schema.TargetConfig(checkpoint="weights"),
        drafter=NgramConfig(block_size=4),
        decode=schema.DecodeConfig(temperature=0.5, stop_ids=(7,)),
        sharding_rules={**schema.SHARDING_RULES, "vocab": ()},
    )
    assert loader.non_defaults(config) == {
        "target": {"name": None, "checkpoint": "weights"},
        "drafter": {"name": "ngram", "block_size": 4},
        "decode": {"temperature": 0.5, "stop_ids": [7]},
        "sharding_rules": {"vocab": []},
    }
    assert loader.config_hash(config) == "aa2c090a9d4e"
