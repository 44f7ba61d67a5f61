"""Writes docs/keys.md, the reference of all keys of `dflash train` and `dflash serve`.

    python tools/write_keys.py

Keys, defaults, bounds and explanations come from the schemas under dflash/config.
"""

import ast
import dataclasses
import inspect
import pathlib
import textwrap
import tokenize
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from dflash.config import registry, schema, serve_schema, train_schema

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "keys.md"
_RUNS = {"dflash train": train_schema.TrainRun, "dflash serve": serve_schema.ServeRun}
_INTRODUCTION = """# Keys of train and serve

On this page you can look up every key of `dflash train` and `dflash serve`, with its default and
its bounds. `tools/write_keys.py` writes it from the schemas. `--print_config` prints the keys of a
config with their values.

[Training a drafter](training_a_drafter.md), [Decoding](decoding.md) and [Serving](serving.md)
explain what the keys are for. A group that both commands have is listed once, unless its defaults
differ. The architecture of a model is read from its checkpoint and is left out.
"""
_HEAD = "| key | default | meaning |\n|---|---|---|\n"
_LEFT_OUT = ("target.architecture", "drafter.architecture")
# Keys whose names say it all in the schemas.
_WORDS = {
    "sharding_rules": "Mesh axes over which each logical axis of an array is split",
    "dtype": "Dtype of weights and activations",
    "drafter.name": "Strategy; [the list](supported.md#strategies)",
    "optimizer.learning_rate": "Highest learning rate",
    "optimizer.schedule": "Shape of the learning rate after the warm-up",
    "optimizer.beta1": "Decay of AdamW's mean of gradients",
    "optimizer.beta2": "Decay of AdamW's mean of squared gradients",
    "optimizer.epsilon": "AdamW's epsilon",
    "top_p": "Smallest probability mass to sample from",
    "presence_penalty": "Subtracted from the logits of tokens in the output",
    "frequency_penalty": "Subtracted once for each occurrence in the output",
    "seed": "Seed of the noise",
    "max_new_tokens": "Maximum number of output tokens",
    "verify": "Rule that accepts drafts; [Decoding](decoding.md) compares them",
    "ignore_eos": "Go on after the checkpoint's stop tokens",
    "batch_size": "Sequences that are decoded at the same time",
    "drafter.block_size": "Rows that the target verifies in a cycle, anchor included",
    "drafter.ngram_size": "Tokens of an n-gram",
    "mesh.data": "Replicas with slots of their own",
    "mesh.fsdp": "Shards of the weights and, in training, of the optimizer's state",
    "mesh.tensor": "Shards of heads, mlp and vocabulary",
    "mesh.expert": "Shards of the experts",
    "prompts.text": "List of prompts",
    "prompts.file": "JSONL file of prompts",
}


def explanations(declared: type) -> dict[str, str]:
    """Returns the comment of each field of a dataclass: beside it, or in the lines above."""
    found: dict[str, str] = {}
    for base in reversed(declared.__mro__):
        if dataclasses.is_dataclass(base):
            own = _explanations_in(textwrap.dedent(inspect.getsource(base)))
            found |= {name: words for name, words in own.items() if words}
    return found


def _explanations_in(source: str) -> dict[str, str]:
    comments: dict[int, tuple[str, bool]] = {}  # By line: text, and whether the line has code.
    for token in tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__):
        if token.type == tokenize.COMMENT:
            beside = bool(token.line[: token.start[1]].strip())
            comments[token.start[0]] = token.string.lstrip("# "), beside
    found = {}
    (definition,) = ast.parse(source).body
    for node in definition.body:
        if isinstance(node, ast.AnnAssign):
            lines = range(node.lineno, node.end_lineno + 1)
            words = [comments[line][0] for line in lines if line in comments]
            above = node.lineno - 1
            while not words and above in comments and not comments[above][1]:
                above -= 1
            if not words:
                words = [comments[line][0] for line in range(above + 1, node.lineno)]
            found[node.target.id] = " ".join(words)
    return found


def _default(field: dataclasses.Field) -> str:
    made = field.default_factory
    value = field.default if made is dataclasses.MISSING else made()
    if value is dataclasses.MISSING:
        return "required"
    if value is None:
        return "–"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple | list):
        return f"`[{', '.join(str(item) for item in value)}]`"
    if isinstance(value, Mapping):
        return "see `--print_config`" if value else "`{}`"
    return f"`{value}`"


def _limits(field: dataclasses.Field, hint: Any) -> str:
    """Returns the choices or bounds of a field as a sentence, or nothing."""
    for one in (hint, *typing.get_args(hint)):
        if typing.get_origin(one) is typing.Literal:
            choices = ", ".join(f"`{choice}`" for choice in typing.get_args(one))
            is_number = int in typing.get_args(hint)
            return f"A number, or {choices}." if is_number else f"One of {choices}."
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}."
    if low is None:
        return "" if high is None else f"At most {high}."
    return f"At least {low}."


def rows(declared: type, prefix: str, *, groups: bool = True) -> Iterator[str]:
    """Yields a table row for each key of a group.

    Args:
      declared: Dataclass of the group.
      prefix: Dotted name of the group, with a dot at its end.
      groups: Whether keys of groups within the group are included.
    """
    words, hints = explanations(declared), typing.get_type_hints(declared)
    for field in dataclasses.fields(declared):
        key = f"{prefix}{field.name}"
        if key in _LEFT_OUT:
            continue
        if dataclasses.is_dataclass(hints[field.name]):
            yield from rows(hints[field.name], f"{key}.") if groups else ()
            continue
        meaning = words.get(field.name) or _WORDS.get(key.rpartition("decode.")[2], "")
        if meaning and not meaning.endswith((".", "…")):
            meaning += "."
        meaning = f"{meaning} {_limits(field, hints[field.name])}".strip().replace("|", r"\|")
        yield f"| `{key}` | {_default(field)} | {meaning} |\n"
        for group in typing.get_args(hints[field.name]):
            if dataclasses.is_dataclass(group) and group is not schema.RopeScaling:
                yield from rows(group, f"{key}.")


def _groups(declared: type) -> dict[str, type]:
    hints = typing.get_type_hints(declared)
    names = [field.name for field in dataclasses.fields(declared)]
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def page() -> str:
    """Returns the text of the page."""
    parts, seen = [_INTRODUCTION], set()
    for command, declared in _RUNS.items():
        parts.append(f"\n## {command}\n\n{_HEAD}{''.join(rows(declared, '', groups=False))}")
        for name, group in _groups(declared).items():
            if group not in seen:
                seen.add(group)
                summary = inspect.getdoc(group).partition("\n\n")[0].replace("\n", " ")
                table = "".join(rows(group, f"{name}."))
                parts.append(f"\n### `{name}` of {command}\n\n{summary}\n\n{_HEAD}{table}")
    parts.append("\n## Strategies\n\nKeys that a strategy adds to `drafter`, in all commands.\n")
    for name, entry in registry.DRAFTERS.items():
        table = "".join(rows(registry.load(entry.schema), "drafter."))
        parts.append(f"\n### `drafter.name={name}`\n\n{_HEAD}{table}")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
