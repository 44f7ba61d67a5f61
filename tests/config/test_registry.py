"""Drafters and targets of installed distributions, found by their entry points."""

import functools

import pytest
import support
from support.distributions import install

from dflash import errors
from dflash.config import loader, registry, schema

ENTRY = (
    "from dflash.config.registry import Entry\n"
    'REPEAT = Entry("made_repeat:Repeat", "made_keys:Keys")\n'
)
KEYS = """
import dataclasses
from dflash.config.schema import (DrafterConfig, option)

@dataclasses.dataclass(frozen=True)
class Keys(DrafterConfig):
    name: str = "repeat"
    count: int = option(4, minimum=1, maximum=64)
"""
POINT = "[dflash.drafters]\nrepeat = made_registered:REPEAT\n"
BUILT_IN = list(registry.DRAFTERS)
failure = functools.partial(support.failure, kind=errors.ConfigError)


@pytest.fixture
def made(monkeypatch, tmp_path):
    """Installs a distribution with these entry points, in a directory of its own."""

    def make(points=POINT, name="made-up", **modules):
        modules = {"made_registered": ENTRY, "made_keys": KEYS} | modules
        install(monkeypatch, tmp_path / name, points, modules, name=name)

    return make


def test_a_distribution_adds_a_drafter(made):
    assert "repeat" not in registry.DRAFTERS
    made()
    assert list(registry.DRAFTERS) == [*BUILT_IN, "repeat"]
    assert len(registry.DRAFTERS) == len(BUILT_IN) + 1
    assert registry.DRAFTERS["repeat"] == registry.Entry("made_repeat:Repeat", "made_keys:Keys")
    assert "repeat" not in registry.TARGETS
    config = loader.load(None, ["target.checkpoint=x", "drafter.name=repeat", "drafter.count=3"])
    assert config.drafter.count == 3
    assert failure(loader.load, None, ["target.checkpoint=x", "drafter.name=repeta"]) == (
        "command line: drafter.name: unknown name 'repeta'; did you mean 'repeat'?"
    )


def test_a_distribution_adds_a_target(made):
    made("[dflash.targets]\nmine = made_registered:REPEAT\n")
    assert registry.TARGETS["mine"].implementation == "made_repeat:Repeat"
    assert "mine" not in registry.DRAFTERS


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import nowhere", "cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        ("",
         "cannot be loaded: AttributeError: module 'made_registered' has no attribute 'REPEAT'"),
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("REPEAT = 'made_repeat:Repeat'", "expected a dflash.config.registry.Entry, got str"),
    ],
)  # fmt: skip
def test_a_bad_distribution_is_named(made, source, reason):
    made(made_registered=source)
    assert failure(registry.find, registry.DRAFTERS, "repeat", "drafter.name") == (
        "made-up 0.1: entry point dflash.drafters: repeat = made_registered:REPEAT: "
        f"{reason}; fix or uninstall the distribution"
    )
    assert registry.DRAFTERS["none"].schema == "dflash.config.schema:DrafterConfig"


def test_classes_that_are_not_there_are_named(made):
    made()
    entry = registry.DRAFTERS["repeat"]
    assert issubclass(registry.load(entry.schema), schema.DrafterConfig)
    assert failure(registry.load, entry.implementation) == (
        "made_repeat:Repeat: cannot be imported: No module named 'made_repeat'"
    )


def test_built_in_names_are_taken(made):
    made("[dflash.drafters]\nngram = made_registered:REPEAT\n")
    for name in ("ngram", "dflash", "nonesuch"):
        assert failure(registry.find, registry.DRAFTERS, name, "drafter.name") == (
            "made-up 0.1: entry point dflash.drafters: ngram = made_registered:REPEAT: the name "
            "'ngram' is taken by dflash: rename the entry point, or uninstall the distribution"
        )


def test_names_of_other_distributions_are_taken(made):
    made()
    made(name="second")
    with pytest.raises(errors.ConfigError, match=r"is taken by (made-up|second) 0\.1"):
        list(registry.DRAFTERS)


def test_distributions_cost_nothing_until_a_name_is_asked_for():
    code = """
        import sys
        import dflash.config.registry
        assert "importlib.metadata" not in sys.modules
        assert "ngram" in dflash.config.registry.DRAFTERS
        assert dflash.config.registry.TARGETS["qwen3"]
        assert "jax" not in sys.modules
    """
    support.run_python(code, check=True)
