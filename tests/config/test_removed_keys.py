"""Keys and values of earlier versions are refused with a pointer to what was removed."""

import pytest
from support.config_files import problems

from dflash.config import loader, removed_keys
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.removed_keys import Removed
from dflash.config.schema import TargetConfig
from dflash.config.tpu_schema import CompileDecode

PAGE = f"(see {removed_keys.PAGE})"


@pytest.fixture(autouse=True)
def _old_keys(monkeypatch):
    table = removed_keys.REMOVED
    monkeypatch.setitem(table, "decode.sead", Removed("use decode.seed"))
    monkeypatch.setitem(table, "roles", Removed())
    monkeypatch.setitem(table, "drafter.block_size=huge", Removed())
    monkeypatch.setitem(table, "drafter.name=dflush", Removed("use dflash"))


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.sead=1", f"decode.sead: was removed; use decode.seed {PAGE}"),
        ("roles.prefill.port=1", f"roles: was removed {PAGE}"),
        ("drafter.block_size=huge", f"drafter.block_size: 'huge' was removed {PAGE}"),
        ("drafter.name=dflush", f"drafter.name: 'dflush' was removed; use dflash {PAGE}"),
    ],
)
def test_command_line(override, expected):
    given = ["target.checkpoint=x", "drafter.name=dflash", "drafter.checkpoint=y"]
    assert problems(None, *given, override) == [f"command line: {expected}"]


def test_a_strategy_has_the_removed_values_of_a_drafter(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text(
        "target: {checkpoint: x}\ntasks: [math]\n"
        "strategies:\n  dflash: {checkpoint: y, block_size: huge}\n"
    )
    expected = f"{path}:4: strategies.dflash.block_size: 'huge' was removed {PAGE}"
    assert problems(path, schema=BenchmarkRun) == [expected]


def test_a_strategy_may_be_named_by_its_key_alone(tmp_path):
    path = tmp_path / "c.yml"
    path.write_text("target: {checkpoint: x}\ntasks: [math]\nstrategies:\n  dflush:\n")
    expected = f"{path}:4: strategies.dflush: 'dflush' was removed; use dflash {PAGE}"
    assert problems(path, schema=BenchmarkRun) == [expected]


def test_the_config_of_an_earlier_compile_report_is_read(tmp_path):
    path, config = tmp_path / "config.yml", CompileDecode(TargetConfig(checkpoint="x"))
    keys_that_went = "strategies: {a: {name: ngram}}\nforecast: {batches: [1], contexts: [512]}\n"
    path.write_text(loader.to_yaml(config) + keys_that_went)
    assert loader.load(path, schema=CompileDecode, earlier_run=True) == config
    given = "forecast.batches=[1]"
    expected = f"forecast: was removed; use experiments/forecast of the repository {PAGE}"
    assert problems(None, "target.checkpoint=x", given, schema=CompileDecode) == [
        f"command line: {expected}"
    ]
