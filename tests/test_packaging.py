"""Tests of what gets installed, and that the README and the checks say the same."""

import itertools
import os
import pathlib
import re
import tomllib
import zipfile

import pytest
import yaml
from support import run_python

from dflash import version
from dflash.cli import installation

ROOT = pathlib.Path(__file__).parent.parent
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "dflash", "configs")
BUILD = "import sys; from setuptools import build_meta; build_meta.{}(sys.argv[1])"


def build(hook, tmp_path_factory) -> pathlib.Path:
    """The wheel that a build hook makes of a copy of the sources."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        # Links do: the build only reads them, and writes beside them.
        (copy / name).symlink_to(ROOT / name)
    target = tmp_path_factory.mktemp("wheel")
    done = run_python(BUILD.format(hook), target, cwd=copy)
    assert done.returncode == 0, done.stderr
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    with zipfile.ZipFile(build("build_wheel", tmp_path_factory)) as opened:
        yield opened


def tree(folder: str, suffix: str) -> set[str]:
    return {p.relative_to(ROOT).as_posix() for p in (ROOT / folder).rglob(f"*{suffix}")}


def test_wheel_holds_every_module_and_config(wheel):
    names = set(wheel.namelist())
    modules = tree("dflash", ".py")
    configs = {f"dflash/{name}" for name in tree("configs", ".yml")}
    others = set().union(*(tree("dflash", suffix) for suffix in (".html", ".cc", ".h")))
    others.add("dflash/py.typed")
    assert modules
    assert configs
    assert (modules | configs | others) - names == set()
    files = {name for name in names if ".dist-info/" not in name}
    assets = {name for name in files if name.startswith("dflash/assets/")}
    assert files - modules - configs - others - assets == set()


def test_configs_have_one_suffix():
    """Others would not be installed."""
    files = [path for path in (ROOT / "configs").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".yml"}


def test_an_editable_install_is_a_path_and_no_hook(tmp_path_factory):
    """A directory named dflash in the working directory comes before a hook, not before a path."""
    with zipfile.ZipFile(build("build_editable", tmp_path_factory)) as opened:
        names = [name for name in opened.namelist() if ".dist-info/" not in name]
        assert [name for name in names if not name.endswith(".pth")] == []
        (path,) = opened.read(names[0]).decode().splitlines()
    assert (pathlib.Path(path) / "dflash" / "__init__.py").is_file()


def test_the_command_is_installed(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert wheel.read(name).decode() == "[console_scripts]\ndflash = dflash.__main__:main\n"


def test_every_install_command_names_this_distribution_and_one_of_its_extras():
    """`dflash` on PyPI is another project, which `pip install 'dflash[tpu]'` would install."""
    extras = {name for name, _, _ in installation.EXTRAS}
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "dflash").rglob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    texts += [version.install_command(extra) for extra in extras]
    found = set(re.findall(r"pip install '([\w.-]+)\[([\w,]+)\]'", "\n".join(texts)))
    assert len(found) > 5
    assert {name for name, _ in found} <= {version.DISTRIBUTION, "."}
    assert {extra for _, names in found for extra in names.split(",")} <= extras


def test_nothing_is_pinned():
    """Only lower bounds, but for torch, whose newer wheels bring CUDA along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounded = {
        re.match(r"[\w.-]+", requirement).group()
        for requirement in itertools.chain(*groups)
        if re.search(r"==|<|~=", requirement.partition(";")[0])
    }
    assert bounded == {"torch"}


def test_readme_and_checks_agree():
    """`.ci/run` runs what the README tells people to run."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("'.[test,hf,parity", "\npython -m pytest -n 2"):
        assert command in readme
        assert command in script
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_citation_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version.__version__
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert f"version = {{{version.__version__}}}" in page
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {version.__version__}\n" in changes
