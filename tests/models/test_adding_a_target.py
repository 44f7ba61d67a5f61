"""The target family that docs/targets.md adds, built from the page itself."""

import importlib
import json
import re
import shlex
import textwrap

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import TESTS, exit_status, failure
from support.distributions import install
from support.golden import build_target
from support.models import make_sharding

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import loader, registry
from dflash.loading import models
from dflash.parallel import parameters

PAGE = (TESTS.parent / "docs" / "targets.md").read_text(encoding="utf-8")
PAGE = PAGE.partition("\n## Add a family\n")[2]
MODULES = {"dflash.models.mine": "page_mine", "my_package.": "page_"}  # Longer names included.


def blocks(language: str) -> list[str]:
    """Returns the page's code blocks in a language."""
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def renamed(text: str) -> str:
    """Returns the text with the names of the page's modules replaced by those of the test."""
    for old, new in MODULES.items():
        text = text.replace(old, new)
    return text


@pytest.fixture(autouse=True)
def installed(monkeypatch, tmp_path):
    """Installs the page's family as a package of its own, and writes the page's config."""
    model, config, line, registered = blocks("python")
    (inside,) = eval(f"{{{line}}}", {"Entry": registry.Entry}).items()
    assert inside[0] == "mine"
    names = (inside[1].implementation, inside[1].schema)
    assert all(name.replace("dflash.models.", "my_package.") in registered for name in names)
    (points,) = blocks("toml")
    group, point = re.fullmatch(r'\[project\.entry-points\."(.*?)"\]\n(.*)\n', points).groups()
    assert point.startswith("mine = ")
    modules = {"page_mine": model, "page_mine_config": config, "page_registered": registered}
    install(
        monkeypatch,
        tmp_path / "installed",
        f"[{group}]\n{renamed(point)}\n".replace('"', ""),
        {name: renamed(text) for name, text in modules.items()},
    )
    monkeypatch.chdir(tmp_path)
    (run,) = blocks("yaml")
    (tmp_path / "mine.yml").write_text(run)


def make_target():
    """Returns the target of the page's config with random weights."""
    config = loader.load("mine.yml").target
    source = models.find_target(config)
    target = models.build_target(config, source, dtype="float32", sharding=make_sharding())
    parameters.initialize(target, jax.random.key(0))
    return target


def save(target, directory, **changes):
    """Writes a checkpoint; `changes` replace fields of its config.json."""
    config = target.config_to_hf(target.arch) | changes
    config = {name: value for name, value in config.items() if value is not None}
    checkpoint.save(target, directory, config)


def test_the_command_decodes_losslessly(capsys):
    (command,) = re.findall(r"^    dflash decode (.*)$", PAGE, re.MULTILINE)
    main = importlib.import_module("dflash.decode").main
    assert not exit_status(main, *shlex.split(command), "--workdir=run"), capsys.readouterr().err
    with open("run/results.json") as file:
        assert json.load(file)["baseline"]["identical"] == 1


def test_its_keys_are_checked():
    stated = loader.load("mine.yml", ["target.architecture.num_experts=7"]).target.architecture
    assert (type(stated).__name__, stated.num_experts) == ("MineArchitecture", 7)
    overrides = ["target.architecture.num_experts=0"]
    said = failure(loader.load, "mine.yml", overrides, kind=errors.ConfigError)
    assert said.endswith("target.architecture.num_experts: expected an integer in [1, 4096], got 0")


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    written = make_target()
    save(written, tmp_path / "checkpoint")
    read = build_target(tmp_path / "checkpoint")
    assert read.arch == written.arch
    tokens = np.arange(12)[None]
    outputs = [
        jax.jit(target.forward)(tokens, tokens, np.ones_like(tokens))[0]
        for target in (written, read)
    ]
    np.testing.assert_array_equal(*outputs)
    tensors = load_file(next((tmp_path / "checkpoint").glob("*.safetensors")))
    expert = written.layers[1].mlp.experts.up_proj.kernel[...][2]
    np.testing.assert_array_equal(tensors["model.layers.1.mlp.experts.2.up_proj.weight"].T, expert)


def test_other_names_in_config_json_are_read(tmp_path):
    target = make_target()
    save(target, tmp_path / "checkpoint", num_experts=None, n_experts=target.arch.num_experts)
    assert build_target(tmp_path / "checkpoint").arch == target.arch


def test_an_error_names_the_field(tmp_path):
    save(make_target(), tmp_path / "checkpoint", num_dense_layers=-1)
    said = failure(build_target, tmp_path / "checkpoint")
    assert said == "config.json: num_dense_layers: expected an integer >= 0, got -1"
