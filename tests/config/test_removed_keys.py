"""Keys and values of earlier versions are refused with a pointer to what was removed."""

import pytest
from support.config_files import problems

from dflash.config import removed_keys
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.config.removed_keys import Removed

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
