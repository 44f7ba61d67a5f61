"""Every config that ships loads, and what it states stays true to its sources."""

import dataclasses
import typing

import pytest
from support import reduced_recipes

from dflash.config import (
    benchmark_schema,
    loader,
    merging,
    registry,
    schema,
    strict_yaml,
    train_schema,
)

CONFIGS = merging.package_configs()
RUNNABLE = sorted(CONFIGS.glob("*.yml"))
BASES = sorted([*CONFIGS.glob("models/*.yml"), *CONFIGS.glob("drafters/*.yml")])
TRAINING = sorted(CONFIGS.glob("train/*.yml"))
BENCHMARKS = sorted(CONFIGS.glob("benchmark/*.yml"))
GENERIC = "target.checkpoint=assets/tiny_target", "data.files=[answers.jsonl]"
PAIRS = [CONFIGS / f"{name}_dflash.yml" for name in ("qwen3_4b", "qwen3_8b", "llama3_1_8b")]


@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.stem)
def test_a_runnable_config_loads_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = loader.load(f"configs/{path.name}")
    assert config.target.checkpoint
    assert config.prompts.text


OF_COMMANDS = {
    "train": (TRAINING, train_schema.TrainRun),
    "benchmark": (BENCHMARKS, benchmark_schema.BenchmarkRun),
}


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, path.name) for kind, (paths, _) in OF_COMMANDS.items() for path in paths],
)
def test_a_config_of_another_command_loads_from_anywhere(kind, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = f"configs/{kind}/{name}"
    overrides = GENERIC if name.removesuffix(".yml") in reduced_recipes.GENERIC else ()
    config = loader.load(path, overrides, schema=OF_COMMANDS[kind][1])
    assert config.target.checkpoint
    assert config.data.shares if kind == "train" else config.strategies
    header = (CONFIGS / kind / name).read_text(encoding="utf-8")
    assert f"python -m dflash.{kind} {path}" in header
    assert "Needs:" in header


@pytest.mark.parametrize("path", PAIRS, ids=lambda path: path.stem)
def test_the_header_gives_command_need_and_published_result(path):
    text = path.read_text(encoding="utf-8")
    header = "".join(line for line in text.splitlines(True) if line.startswith("#"))
    assert f"python -m dflash.decode configs/{path.name}" in header
    assert "Needs:" in header
    assert "Published" in header


def test_every_base_file_serves_some_runnable_config():
    used = set()
    for runnable in RUNNABLE:
        node, _ = strict_yaml.parse(runnable.read_text(encoding="utf-8"), runnable.name)
        bases = node.value["base"].value if "base" in node.value else ()
        used |= {CONFIGS / base.value for base in bases}
    assert set(BASES) - used == set()


def architecture_of(group: type) -> type | None:
    """Returns the class of a config group's architecture, or None."""
    hint = typing.get_type_hints(group).get("architecture")
    return next(filter(dataclasses.is_dataclass, typing.get_args(hint)), None)


def schema_of(node, group, entries, default):
    """Returns the schema of a file's target or drafter group, by its name."""
    values = node.value[group].value if group in node.value else {}
    name = values["name"].value if "name" in values else default
    return registry.load_schema(entries[name])


@pytest.mark.parametrize(
    "path", [*RUNNABLE, *BASES, *TRAINING, *BENCHMARKS], ids=lambda path: path.stem
)
def test_a_file_holds_only_what_differs_from_the_defaults(path):
    """A default has one home; stated twice, the copies drift apart."""
    node, _ = strict_yaml.parse(path.read_text(encoding="utf-8"), path.name)
    drafter = schema_of(node, "drafter", registry.DRAFTERS, "dflash")
    target = schema_of(node, "target", registry.TARGETS, "qwen3")
    groups = {
        ("target", "architecture"): architecture_of(target), ("drafter",): drafter,
        ("drafter", "architecture"): architecture_of(drafter), ("decode",): schema.DecodeConfig,
        ("mesh",): schema.MeshConfig, ("prompts",): schema.PromptsConfig,
        ("data",): train_schema.DataConfig, ("loss",): train_schema.LossConfig,
        ("optimizer",): train_schema.OptimizerConfig, ("train",): train_schema.TrainConfig,
        ("evaluation",): train_schema.EvaluationConfig,
        ("evaluation", "decode"): schema.DecodeConfig,
    }  # fmt: skip
    for keys, cls in groups.items():
        inner = node
        for key in keys:
            inner = inner.value.get(key, strict_yaml.Node({}, "")) if inner.value else inner
        for key, item in inner.value.items():
            if keys == ("drafter",) and key == "name":
                continue  # what chooses the class is said, not left to it
            default = cls.__dataclass_fields__[key].default
            assert item.value != default, f"{path}: {'.'.join(keys)}.{key} repeats its default"
