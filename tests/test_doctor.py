"""`dflash doctor` on whole and broken installations."""

import importlib.metadata
import pathlib
import re
import sys
import tomllib

import pytest
from support import outcome, run_python

from dflash import cli, doctor, version
from dflash.cli import installation

PROJECT = pathlib.Path(__file__).parent.parent / "pyproject.toml"


def run(capsys, monkeypatch, found=("1 × cpu", True)):
    monkeypatch.setattr(installation, "devices", lambda: found)
    status, out, err = outcome(capsys, doctor.main)
    assert err == ""
    return status, out


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


def test_probes_of_the_installation_do_not_import_jax():
    probes = "installation.cpu_kernels(), installation.cache_directories()"
    code = f"import sys; from dflash.cli import installation; {probes}; print('jax' in sys.modules)"
    assert run_python(code).stdout == "False\n"


def test_what_is_missing_has_a_purpose_and_a_remedy(capsys, monkeypatch):
    found = importlib.metadata.version

    def version(name):
        if name in ("tokenizers", "libtpu", "rich"):
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    status, out = run(capsys, monkeypatch, ("none: Unable to initialize backend 'tpu'", False))
    assert status == 1
    remedy = "lacks tokenizers: pip install 'dflash-jax[hf]'"
    assert f"tokenizer.json (Qwen, Llama)\n              {remedy}" in out
    assert "missing: pip install 'dflash-jax[tpu]'" in out
    *_, packages, device = out.splitlines()
    assert packages == "problem: missing packages: pip install rich"
    assert device == "problem: jax finds no device, see above"


# (distribution, what it installs, its console script) -> whether it clashes with this one.
OTHERS = {
    ("dflash", "dflash/__init__.py", "dflash.cli:main"): True,  # Z-Lab's, of PyPI
    ("dflash", "dflash/__init__.py", "dflash.__main__:main"): True,
    ("dflash", "__editable__.pth", "dflash.__main__:main"): False,  # a clone, under an old name
    ("dflash-editable", "__editable__.pth", "dflash.cli:main"): True,
    (version.DISTRIBUTION, "dflash/__init__.py", "dflash.__main__:main"): False,
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_distribution_of_the_same_module_is_named(other, capsys, monkeypatch, tmp_path):
    name, file, script = other
    info = tmp_path / f"{name.replace('-', '_')}-9.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.0\n")
    (info / "RECORD").write_text(f"{file},,\n")
    (info / "entry_points.txt").write_text(f"[console_scripts]\ndflash = {script}\n")
    before = installation.clashing_distributions()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installation.clashing_distributions() == before + [name] * OTHERS[other]
    status, out = run(capsys, monkeypatch)
    remedy = f"pip uninstall {name} {version.DISTRIBUTION}, then install {version.DISTRIBUTION}"
    assert (remedy in out, status) == (OTHERS[other], int(OTHERS[other]))


def test_the_command_of_the_other_distribution_reaches_this_one(capsys, monkeypatch):
    """Its script imports `main` from `dflash.cli`, and would otherwise end with a traceback."""
    monkeypatch.setattr(sys, "argv", ["dflash", "--version"])
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert version.__version__ in capsys.readouterr().out


def test_a_jax_that_aborts_is_a_line(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag")
    found, fine = installation.devices()
    assert not fine
    assert found.startswith("none: ")
    assert "xla_no_such_flag" in found


def test_devices(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(installation, "_PROBE_SECONDS", 300)  # of a busy machine
    assert installation.devices() == ("1 × cpu", True)
