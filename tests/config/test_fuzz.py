"""No traceback for any config: hundreds of damaged files and odd overrides, seeded."""

import random

import pytest

from dflash import errors
from dflash.config import benchmark_schema, loader, schema, train_schema
from dflash.config import sweep_points as sweeps

RUNS = {
    schema.DecodeRun: "random_tiny_dflash.yml",
    train_schema.TrainRun: "train/qwen3_4b_dflash.yml",
    benchmark_schema.BenchmarkRun: "benchmark/random_tiny.yml",
}
DEEP = 100_000
WORDS = """
    null ~ true no 0 -1 1 1.5 1e3 1e-400 1e400 .nan -.inf 2147483647 2147483648 4294967296
    1000000000000 999999999999999999 999999999999999999999999999999 -9999999999 a auto random [] {}
    [0] [[[]]] {a:1} [1,a,null] a:b ' " *x !!int % # \udcff \x00 "\\0" "\\ud800"
"""
VALUES = (
    *("", "{a: 1}", "a: b", "- a", "&x a", "é" * 300, "x" * 5000, "[" * 30 + "]" * 30),
    *("[" * DEEP, "{a: " * DEEP, "[" * 60 + "]" * 60),
    *WORDS.split(),
)
HOSTILE = (
    *("[" * DEEP, "a: " + "{b: " * DEEP, "- " * DEEP, "\n".join(" " * n + "a:" for n in range(99))),
    *('base: ["a\\0b"]', f"base: [{'x' * 5000}]", "base: [.]", "base: [c.yml]", "base: {a: b}"),
    *("a: &x [*x]", "? [a]\n: b", "%YAML 9\n---\na: 1", "a: 1\n---\nb: 2", "a: 'x", "\t", "\x00"),
    *("a: 1\na: 2", "[1, 2]", "3", "target: 3", "target: {architecture: {head_dim: 9}}", "a.b: 1"),
)


def keys_of(tree):
    return [key for key, _ in loader.flatten(loader.to_dict(tree))]


def quietly(load):
    """Loads configs; what is wrong with them must be lines, and what is right can be written."""
    problems, found = (), ()
    try:
        found = load()
    except errors.ConfigError as error:
        problems = error.problems or ("",)
    assert all(line and "\n" not in line and len(line) <= 1001 for line in problems)
    for config in found:
        loader.to_yaml(config).encode()
        loader.config_hash(config)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_overrides(run):
    chance = random.Random(7)
    keys = keys_of(loader.load(RUNS[run], schema=run))
    keys += ["drafter", "decode", "a", "decode.seed.x", "target.architecture", ".".join("a" * DEEP)]
    for _ in range(20):
        given = [f"{chance.choice(keys)}={chance.choice(VALUES)}" for _ in range(3)]
        quietly(lambda given=given: [loader.load(RUNS[run], given, run)])


def test_sweep_overrides():
    chance = random.Random(7)
    keys = ["decode.seed", "drafter", "prompts.text", "dtype", "a", ".".join("a" * DEEP), "decode"]
    blocks = ["sweep.product.", "sweep.zip.", "sweep.", "sweep.run.", "sweep.product.decode."]
    for _ in range(30):
        given = [f"{chance.choice(blocks)}{chance.choice(keys)}={chance.choice(VALUES)}"]
        quietly(
            lambda given=given: [
                point.config
                for point in sweeps.load("random_tiny_dflash.yml", given).points.values()
            ]
        )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_files(write, text):
    write("c.yml", text)
    for load in (loader.load, sweeps.load):
        with pytest.raises(errors.ConfigError):
            load("c.yml")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", ".", "", "~", "\udcff"])
def test_hostile_names(name):
    with pytest.raises(errors.ConfigError):
        loader.load(name)


def test_damaged_files(write, tmp_path):
    """A shipped config with a few characters removed, repeated or replaced."""
    chance = random.Random(7)
    whole = loader.to_yaml(loader.load("random_tiny_dflash.yml"))
    for _ in range(100):
        text = whole
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(text))
            middle = chance.choice(["", text[at : at + 9], *"\x00\t\n{[:-#'\"&*!|>%@é0", "9" * 20])
            text = text[:at] + middle + text[at + chance.randint(0, 9) :]
        (tmp_path / "c.yml").write_text(text, encoding="utf-8")
        quietly(lambda: [loader.load(tmp_path / "c.yml")])
