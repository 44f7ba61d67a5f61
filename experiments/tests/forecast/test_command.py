"""Tests of the command, end to end on a tiny model."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from dflash import errors
from dflash.config import loader
from experiments.forecast import __main__ as forecast
from experiments.forecast.schema import ForecastRun

FOLDER = pathlib.Path(forecast.__file__).parent
TINY = (
    "configs/random_tiny_dflash.yml",
    "dtype=bfloat16",
    "target.architecture.num_hidden_layers=2",
    "drafter.architecture.num_hidden_layers=1",
    "drafter.architecture.num_target_features=1",
    "decode.max_length=256",
)


def run(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    return subprocess.run(
        [sys.executable, "-m", "experiments.forecast", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=900,
        check=False,
    )


def error_of(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as caught:
        forecast.main(list(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_forecast_of_a_tiny_model_resumes(tmp_path):
    pytest.importorskip("libtpu", reason="pip install 'jax[tpu]'")
    asked = (
        *TINY,
        *("tpu.topology=v5e:1x1", "--workdir", str(tmp_path / "w")),
        *("forecast.batches=[1]", "forecast.contexts=[64,4096]", "drafter.block_size=8"),
    )
    done = run(*asked)
    assert done.returncode == 0, done.stderr
    assert "compiling · 50 % · dflash, batch 1" in done.stderr
    headings = [line for line in done.stdout.splitlines() if line[:1] not in ("", " ")]
    assert headings[1] == "expected cost of a cycle after 64 tokens, ms"
    assert headings[2] == "expected cost of a cycle after 4,096 tokens, ms"
    found = json.loads((tmp_path / "w" / "forecast.json").read_text())
    plain, dflash = (one for one in found["cells"] if one["context"] == 64)
    assert dflash["over_plain"] == pytest.approx(dflash["roofline_ms"] / plain["roofline_ms"])
    assert 1 < dflash["over_plain"] < 4.5
    assert 0 < plain["limits_ms"]["context"] < plain["limits_ms"]["weights"]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "w" / "points").iterdir()}
    again = run(*asked, "forecast.contexts=[128]")
    assert "batch 1" not in again.stderr
    assert "after 128 tokens" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["forecast.batches=[]"], "forecast.batches: expected at least one number"),
        (["forecast.batches=[0]"], "forecast.batches"),
    ],
)
def test_unusable_forecasts_print_one_line(capsys, arguments, message):
    config = "configs/random_tiny_dflash.yml", "tpu.topology=v5e:1x1"
    error = error_of(capsys, *config, *arguments)
    assert message in error
    assert error.count("\n") == 1


def test_a_forecast_requires_the_compiler(monkeypatch):
    find = importlib.util.find_spec

    def lacking(name, *rest):
        return None if name == "libtpu" else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", lacking)
    with pytest.raises(errors.ConfigError, match=r"^the TPU compiler is not installed"):
        forecast.run(loader.load(FOLDER / "qwen3_4b.yml", schema=ForecastRun))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yml")), ids=lambda path: path.stem)
def test_the_configs_load(path):
    config = loader.load(path, schema=ForecastRun)
    assert len(config.strategies) >= 3
