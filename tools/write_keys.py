"""Writes docs/reference.md, the reference of all commands, and of the keys of their configs.

    python tools/write_keys.py

Commands come from their declarations; keys, defaults, bounds and explanations from the schemas
under dflash/config.
"""

import ast
import collections
import dataclasses
import importlib
import inspect
import pathlib
import textwrap
import tokenize
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from absl import flags

from dflash.cli.commands import COMMANDS
from dflash.cli.declaration import Subcommand
from dflash.config import registry, schema, serve_schema, train_schema

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "reference.md"
_RUNS = {
    "decode": schema.DecodeRun,
    "serve": serve_schema.ServeRun,
    "train": train_schema.TrainRun,
}
_INTRODUCTION = """# Reference

On this page you can look up every command with its flags, and every key of `decode`, `serve` and
`train`. `tools/write_keys.py` writes it.

    dflash COMMAND CONFIG [key=value ...] [--flags]

`python -m dflash.COMMAND` is the same. A config is a YAML file, looked up as given, then among the
configs of the package, so `configs/…` works in any directory; a checkpoint (`hf:org/name`, a
directory) may stand in its place. `key=value` arguments override it, with dots in the key and YAML
in the value; a list takes a bare value as a list of one. Flags control where and how to run. Every
error is one line that names the file, the key or the token, and the remedy:

    $ dflash decode configs/tiny_dflash.yml decode.sead=1
    error: command line: decode.sead: unknown key; did you mean 'decode.seed'?

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | the run failed: non-finite values, a full disk, a directory of another run |
| 2 | wrong usage, config, input or checkpoint, or a missing package; nothing was begun |
| 3 | `compile` only: the run does not fit, or exceeds a budget |
| 130, 143 | interrupted by ctrl-C or SIGTERM; the same command continues |

## Flags of several commands

"""
# What a page says about a command beyond its help.
_MORE = {
    "chat": "Accepted drafts are green, the target's own tokens bold; none if `NO_COLOR` is set or "
    "stdout is not a terminal. `/clear` begins a new conversation.",
    "decode": "[Decoding](decoding.md) explains prompts, strategies and outputs.",
    "serve": "[Serving](serving.md) explains endpoints, limits and metrics.",
    "train": "[Training a drafter](training_a_drafter.md) describes a complete training.",
    "distill": "[Training a drafter](training_a_drafter.md#one-command) describes its stages.",
    "benchmark": "[Measuring](measuring.md) defines every figure.",
    "sweep": "[Measuring](measuring.md#sweeps) explains the `sweep:` block and the table.",
    "compile": "[On TPUs](tpu.md#the-compile-report) explains the report.",
    "check": """Prompts are those of the config, or 16 general ones if it names at most one. The
target decodes them once, greedily; then only the drafter runs again, for each other value:

| field | other values that are tried |
|---|---|
| `target_layer_ids` | the layers before, and the layers after |
| `is_causal`, `sliding_window_non_causal` | the opposite |
| `layer_types` | full attention in every layer; or the stated window in every layer |
| `rope_theta`, `rope_scaling` | those of the target |
| `mask_token_id` | up to three special tokens that are named like a mask or padding |
| `drafter.window` | 64 to 4,096 positions, if a prompt is at least twice as long |
| `prompts.chat`, `prompts.thinking` | the opposite |

A field is suspicious if another value accepts a quarter more drafts, and a tenth of a token more
per cycle.""",
}
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
    "verify": "Rule that accepts drafts; [Decoding](decoding.md#verification) compares them",
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


def _flag_table(found: Iterable[flags.Flag]) -> str:
    """Returns a table of flags."""
    lines = ["| flag | meaning |\n|---|---|\n"]
    for flag in found:
        label = f"--[no]{flag.name}" if flag.boolean and flag.default else f"--{flag.name}"
        lines.append(f"| `{label}` | {flag.help} |\n")
    return "".join(lines)


def _command(name: str, spec: Subcommand, own_flags: Iterable[flags.Flag]) -> str:
    parts = [f"### {name}", spec.description, _MORE.get(name, "")]
    parts.append("" if spec.takes_config else f"    {spec.usage}")
    table = _flag_table(own_flags) if own_flags else ""
    parts += [table.rstrip(), "```\n{}\n```".format("\n".join(spec.examples))]
    parts.append(f"Exit status: {spec.statuses}." if spec.statuses else "")
    return "\n\n".join(filter(None, parts))


def commands() -> str:
    """Returns the sections of flags and commands."""
    shared, sections = {}, []
    for name in COMMANDS:
        spec = importlib.import_module(COMMANDS[name][0]).SUBCOMMAND
        values = spec.flag_values()
        shared |= {flag: values[flag] for flag in spec.shared}
        own_flags = [values[flag] for flag in values if flag not in (*spec.shared, "help", "h")]
        sections.append(_command(name, spec, own_flags))
    sections = [_flag_table(shared.values()) + "\n## Commands", *sections]
    return "\n\n".join(sections) + "\n"


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
    """Returns "=value" of a key's default; nothing if there is none, or if it is a group."""
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    if value is dataclasses.MISSING or value is None:
        return ""
    if isinstance(value, bool):
        return f"={str(value).lower()}"
    if isinstance(value, tuple | list):
        return f"=[{', '.join(map(str, value))}]"
    return "" if isinstance(value, Mapping) else f"={value}"


def _limits(field: dataclasses.Field, hint: Any) -> str:
    """Returns the choices or bounds of a field as a sentence, or nothing."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is typing.Literal:
            choices = ", ".join(f"`{choice}`" for choice in typing.get_args(part))
            is_number = int in typing.get_args(hint)
            return f"A number, or {choices}." if is_number else f"One of {choices}."
    low, high = field.metadata.get("minimum"), field.metadata.get("maximum")
    if low is not None and high is not None:
        return f"{low} to {high}."
    if low is None:
        return "" if high is None else f"At most {high}."
    return f"At least {low}."


def _meaning(key: str, words: str, limits: str) -> str:
    meaning = words or _WORDS.get(key.rpartition("decode.")[2], "")
    if meaning and not meaning.endswith((".", "…")):
        meaning += "."
    return f"{meaning} {limits}".strip().replace("|", r"\|")


def rows(declared: type, prefix: str, known: Mapping[type, str], *, groups: bool = True):
    """Yields a table row for each key of a group.

    Args:
      declared: Dataclass of the group.
      prefix: Dotted name of the group, with a dot at its end.
      known: Names of groups that are listed already, by their dataclass.
      groups: Whether keys of groups within the group are included.
    """
    words, hints = explanations(declared), typing.get_type_hints(declared)
    for field in dataclasses.fields(declared):
        key, hint = f"{prefix}{field.name}", hints[field.name]
        if key in _LEFT_OUT:
            continue
        if hint in known and prefix:
            yield f"| `{key}.*` | As `{known[hint]}.*`. |\n"
        elif dataclasses.is_dataclass(hint):
            yield from rows(hint, f"{key}.", known) if groups else ()
        else:
            meaning = _meaning(key, words.get(field.name, ""), _limits(field, hint))
            yield f"| `{key}{_default(field)}` | {meaning} |\n"
        for group in typing.get_args(hint):
            if dataclasses.is_dataclass(group) and group is not schema.RopeScaling:
                yield from rows(group, f"{key}.", known)


def _groups(declared: type) -> Iterator[tuple[str, type | None]]:
    """Yields the name and class of each group; first "" and None, for the keys in no group."""
    yield "", None
    hints = typing.get_type_hints(declared)
    for field in dataclasses.fields(declared):
        if dataclasses.is_dataclass(hints[field.name]):
            yield field.name, hints[field.name]


def _table(title: str, listed: Iterable[str]) -> str:
    return f"\n{title}\n\n| key and default | meaning |\n|---|---|\n{''.join(listed)}"


def keys() -> str:
    """Returns the tables of keys; each row stands once, with the first command that has it."""
    parts, seen, known = [], set(), {}
    for command, declared in _RUNS.items():
        parts.append(f"\n### Keys of {command}\n")
        for name, group in _groups(declared):
            found = rows(group or declared, f"{name}." if group else "", known, groups=bool(group))
            listed = [row for row in found if row not in seen]
            seen |= set(listed)
            known |= {group: name}
            if listed:
                summary = inspect.getdoc(group).partition("\n\n")[0] if group else ""
                title = f"`{name}`: {summary}" if group else "In no group:"
                parts.append(_table(" ".join(title.split()), listed))
    return "".join(parts) + _keys_of_strategies()


def _keys_of_strategies() -> str:
    """Returns the table of what strategies add to `drafter`, each row once."""
    strategies = collections.defaultdict(list)
    for name, entry in registry.DRAFTERS.items():
        for row in rows(registry.load(entry.schema), "drafter.", {}):
            if not row.startswith("| `drafter.name"):
                strategies[row].append(f"`{name}`")
    listed = [f"{row.rstrip()} {', '.join(names)} |\n" for row, names in strategies.items()]
    head = "| key and default | meaning | strategies |\n|---|---|---|\n"
    return f"\n### Keys of strategies\n\n{head}{''.join(sorted(listed))}"


_ABOUT_KEYS = """
## Keys

A key that several commands have is listed once, with the first of them, unless its default differs.
`--print_config` prints the keys of a config with their values. The architecture of a model is read
from its checkpoint and is left out.
"""


def page() -> str:
    """Returns the text of the page."""
    return "".join([_INTRODUCTION, commands(), _ABOUT_KEYS, keys()])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
