"""`dflash doctor` on whole and broken installations."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest

from dflash import doctor
from dflash.cli import installation

PROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"


def run(capsys, monkeypatch, found=("1 × cpu", True)):
    monkeypatch.setattr(installation, "devices", lambda: found)
    with pytest.raises(SystemExit) as caught:
        doctor.main([])
    captured = capsys.readouterr()
    assert captured.err == ""
    return caught.value.code, captured.out


def names(requirements):
    return {re.match(r"[\w-]+", one).group().lower() for one in requirements}


def test_it_knows_what_the_project_requires():
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    assert names(installation.REQUIRED) == names(project["dependencies"]) | {"jaxlib"}
    extras = project["optional-dependencies"]
    assert {name for name, _, _ in installation.EXTRAS} == set(extras)
    for name, distributions, _ in installation.EXTRAS:
        if name != "tpu":  # which is an extra of jax
            assert names(distributions) <= names(extras[name])


def test_a_whole_installation(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "dflash" / "datasets" / "a").mkdir(parents=True)
    (tmp_path / "dflash" / "datasets" / "a" / "b").write_bytes(bytes(20_000_000))
    status, out = run(capsys, monkeypatch)
    assert status == 0
    assert f"jax {importlib.metadata.version('jax')}" in out
    assert re.search(r"^devices +1 × cpu$", out, re.M)
    assert f"0.02 GB  {tmp_path}/dflash/datasets\n" in out
    assert f"empty  {tmp_path}/hub\n" in out
    assert f"  HF_HUB_CACHE={tmp_path}/hub\n" in out
    assert out.endswith("no problems found\n")


def test_what_is_missing_has_a_purpose_and_a_remedy(capsys, monkeypatch):
    found = importlib.metadata.version

    def version(name):
        if name in ("tokenizers", "libtpu", "rich"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, out = run(capsys, monkeypatch, ("none: Unable to initialize backend 'tpu'", False))
    assert status == 1
    assert (
        "tokenizer.json (Qwen, Llama)\n              lacks tokenizers: pip install 'dflash[hf]'"
        in out
    )
    assert "missing: pip install 'dflash[tpu]'" in out
    assert out.endswith(
        "problem: missing packages: pip install rich\nproblem: jax finds no device, see above\n"
    )


def test_a_jax_that_aborts_is_a_line(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")
    found, fine = installation.devices()
    assert not fine
    assert found.startswith("none: ")
    assert "xla_no_such_flag" in found


def test_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert installation.devices() == ("1 × cpu", True)
