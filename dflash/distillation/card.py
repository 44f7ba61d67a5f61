"""Model card of a drafter: the README.md beside its weights that the Hugging Face Hub shows."""

import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash.checkpoints import checkpoint
from dflash.config import loader, strict_yaml
from dflash.config.distill_schema import DistillRun
from dflash.loading import models
from dflash.storage import hub

_FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)
_LICENSE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


def write(
    config: DistillRun,
    lengths: Sequence[int],
    trained: Mapping[str, Any],
    test: Mapping[str, Mapping[str, Any]],
) -> str:
    """Returns the text of the card.

    Args:
      lengths: Tokens of each answer in the training data, without its question.
      test: Results of decoding by data set; see `outputs.Summary` and `outputs.Comparison`.
    """
    target = hub.pinned(config.target.checkpoint)
    licence = target_licence(target)
    lines = [
        "---",
        *([f"license: {licence}"] if licence else []),
        *([f"base_model: {name_of(target)}"] if target.startswith(hub.PREFIX) else []),
        "library_name: dflash",
        "tags:",
        "- speculative-decoding",
        f"- {config.drafter.name}",
        "---",
        "",
        f"# A drafter for {name_of(target)}",
        "",
        f"Drafts tokens for `{name_of(target)}` by the strategy `{config.drafter.name}`; the "
        "target verifies them, so the output is its own. Made by `python -m dflash.distill`.",
        "",
        "```sh",
        f"python -m dflash.decode CONFIG target.checkpoint={target} \\",
        f"    drafter.name={config.drafter.name} drafter.checkpoint=.{_block_size(config)}",
        "```",
        "",
        "## Results",
        "",
        *_results(config, trained["best"], test),
        "",
        "## Data",
        "",
        *_data(config, lengths),
        "",
        "## Recipe",
        "",
        f"{trained['steps']:,} steps of {config.train.batch_size} × {config.data.length} tokens. "
        "What differs from the defaults of `python -m dflash.distill`:",
        "",
        "```yaml",
        strict_yaml.dump(_recipe(config)).rstrip(),
        "```",
        "",
        "## Licence",
        "",
        _licence(licence),
    ]
    return "\n".join(lines) + "\n"


def name_of(target: str) -> str:
    """Returns a target's name, such as Qwen/Qwen3-4B."""
    if target.startswith(hub.PREFIX):
        return hub.repository_of(target).removeprefix(hub.PREFIX)
    return pathlib.Path(target).name


def target_licence(target: str) -> str | None:
    """Returns the licence in the target's own model card, such as apache-2.0; None without one."""
    if target == models.RANDOM:
        return None
    readme = checkpoint.resolve(target) / "README.md"
    front = _FRONT_MATTER.match(readme.read_text(encoding="utf-8")) if readme.is_file() else None
    declared = _LICENSE.search(front[1]) if front else None
    return declared[1] if declared else None


def _block_size(config: DistillRun) -> str:
    """Returns the argument that lets measured times choose the block size, if the strategy can."""
    chain = hasattr(config.drafter, "block_size") and not getattr(config.drafter, "tree", None)
    return " drafter.block_size=auto" if chain else ""


def _licence(licence: str | None) -> str:
    if licence is None:
        return (
            "The target states no licence in its model card. The drafter has learned from the "
            "target's output, so the target's terms may bind it: find them before you publish."
        )
    return (
        f"The target's licence is {licence}. The drafter has learned from the target's output, so "
        "the target's terms bind it too."
    )


def _results(
    config: DistillRun, best: Mapping[str, Any] | None, test: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    if not test:
        yield "Not measured."
        return
    decode, devices = config.test.decode, next(iter(test.values()))["devices"]
    sampling = f"temperature {decode.temperature:g}" if decode.temperature else "greedy"
    yield (
        f"{config.test.prompts} prompts of each data set's test split, at most "
        f"{decode.max_new_tokens} tokens, {sampling}, {decode.batch_size} at a time, "
        f"{config.train.dtype}, on {len(devices)} × {devices[0]}. τ is the mean number of tokens "
        "per forward pass of the target; the speed-up is over the same loop without drafting."
    )
    yield ""
    yield "| data set | τ | speed-up | tokens/s | without drafting | same output | right |"
    yield "|---|---|---|---|---|---|---|"
    for task, result in test.items():
        plain = result["baseline"]
        yield (
            f"| {task} | {_number(result['tau'])} | {_number(plain['speed_up'])}× "
            f"| {_number(result['tokens_per_second'], 0)} "
            f"| {_number(plain['tokens_per_second'], 0)} "
            f"| {plain['identical']} of {plain['prompts']} | {_graded(result['answers'])} |"
        )
    if best:
        yield ""
        yield f"The weights are of step {best['step']:,}, the best by {best['goal']}."


def _data(config: DistillRun, lengths: Sequence[int]) -> Iterator[str]:
    amount = f"{len(lengths):,} answers of the target itself, {sum(lengths):,} tokens"
    if config.answers.made is not None:
        yield f"{amount}, from an earlier distillation."
    else:
        yield f"{amount}, to questions of these sources:"
        yield ""
        for file in config.answers.files:
            yield f"- {pathlib.Path(file).name}"
    other_shares = {name: share for name, share in config.data.shares.items() if name != "jsonl"}
    if other_shares:
        total = sum(config.data.shares.values())
        shares = ", ".join(f"{name} {share / total:.0%}" for name, share in other_shares.items())
        yield ""
        yield f"The rest of the rows are from these data sets: {shares}."


def _recipe(config: DistillRun) -> dict[str, Any]:
    groups = ("drafter", "answers", "data", "loss", "optimizer", "train")
    changed = loader.non_defaults(config)
    return {group: changed[group] for group in groups if changed.get(group)}


def _graded(answers: Mapping[str, int]) -> str:
    return "{correct} of {checked}".format(**answers) if answers else "–"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
