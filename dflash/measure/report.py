"""Report of a benchmark: plots, and an HTML page with figures, plots and replays."""

import base64
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from dflash.inference.pages import Slot
from dflash.inference.request import Request
from dflash.measure import plots, workload
from dflash.measure.bench import Bench
from dflash.measure.cells import Cell
from dflash.measure.engine import MeasuredEngine
from dflash.measure.samples import TaskRound
from dflash.measure.workload import Item
from dflash.runs.directory import RunDirectory
from dflash.text.prompts import Prompt
from dflash.text.tokenizer import IncrementalDecoder, Tokenizer

PAGE = "report.html"
_TEMPLATE = "page.html"
_PLACEHOLDER = "@DATA@"


def record(
    engine: MeasuredEngine, request: Request, lengths: Sequence[int], tokenizer: Tokenizer
) -> dict[str, Any]:
    """Decodes a prompt cycle by cycle, and returns its text as JSON values.

    They are the text of the first token, which prefill returns, and a frame for each cycle: its
    number of tokens, the text of each accepted draft, that of the target's own token (empty if the
    sequence ended before it), and the text of each rejected draft.

    Args:
      lengths: Acceptance lengths to force; empty leaves acceptance to verification.
    """
    engine.follow([lengths])
    slot = Slot(0, engine.layout.standing_pages(0))
    state = engine.admit(engine.new_state(), slot, request)
    decoder = IncrementalDecoder(tokenizer)
    first = decoder.push([int(jax.device_get(state.anchor)[0])])
    frames = []
    while jax.device_get(state.active)[0]:
        state, tokens, counts, proposal = engine.run("show_cycle", state)
        tokens, counts, proposal = jax.device_get((tokens, counts, proposal))
        committed = tokens[0, : counts[0]].tolist()
        parents = None if proposal.parents is None else proposal.parents[0]
        num_accepted, rejected = split(proposal.tokens[0].tolist(), parents, committed)
        texts = [decoder.push([token]) for token in committed]
        frames.append(
            {
                "tokens": len(committed),
                "accepted": texts[:num_accepted],
                "bonus": "".join(texts[num_accepted:]),
                "rejected": [tokenizer.decode([token]) for token in rejected],
            }
        )
    return {"first": first, "frames": frames}


def split(
    drafted: Sequence[int], parents: Sequence[int] | np.ndarray | None, committed: Sequence[int]
) -> tuple[int, list[int]]:
    """Splits a cycle's drafts into accepted and rejected ones.

    Args:
      drafted: Token of each draft.
      parents: Row that each draft continues, counted from the anchor; None for a chain.
    Returns:
      The number of accepted drafts, which come first in `committed`; and the tokens of the rejected
      drafts, in order.
    """
    parents = range(len(drafted)) if parents is None else parents
    row, taken = 0, set()
    for token in committed:
        children = [
            draft
            for draft, parent in enumerate(parents)
            if parent == row and drafted[draft] == token
        ]
        if not children:
            break
        taken.add(children[0])
        row = children[0] + 1
    return len(taken), [token for draft, token in enumerate(drafted) if draft not in taken]


def write(
    bench: Bench,
    cells: Sequence[Cell],
    done: Sequence[TaskRound],
    values: dict[str, Any],
    notes: Sequence[str],
    directory: RunDirectory,
) -> None:
    """Writes the plots and the page."""
    note = workload.forced_note(bench.config)
    drawn = {
        "speedup": plots.speedups(cells, bench.baseline, note),
        "acceptance": plots.survival(cells, note),
        "cost": plots.costs(cells),
    }
    for name, png in drawn.items():
        directory.write(f"{name}.png", png)
    replays = _record_replays(bench, cells, done) if jax.process_count() == 1 else {}
    directory.write(PAGE, render_page(values, notes=notes, pictures=drawn, replays=replays))


def render_page(
    results: Mapping[str, Any],
    *,
    notes: Sequence[str],
    pictures: Mapping[str, bytes],
    replays: Mapping[str, Mapping[str, Any]],
) -> str:
    """Returns the page as HTML."""
    strategies = [cell["strategy"] for cell in results.get("cells", ())]
    slots = plots.strategy_slots(strategies)
    data = {
        "results": results,
        "notes": list(notes),
        "colors": {name: plots.color_of(slots.get(name)) for name in strategies},
        "plots": {name: base64.b64encode(png).decode() for name, png in pictures.items()},
        "replays": replays,
    }
    # Escape "<", because only "</" and "<!--" have a meaning inside a script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = importlib.resources.files("dflash.measure").joinpath(_TEMPLATE)
    return template.read_text(encoding="utf-8").replace(_PLACEHOLDER, text)


def _record_replays(bench: Bench, cells: Sequence[Cell], done: Sequence[TaskRound]) -> dict:
    """Replays a prompt of each task with every strategy, untimed: the one with the longest output.

    Returns:
      By task, the prompt's text and the replay of each strategy.
    """
    size = bench.config.replay_tokens
    if not size or not bench.engines:
        return {}
    replays = {}
    for task in bench.workload.tasks:
        item = _longest(bench, task, done)
        request, by_strategy = bench.request(item, at_most=size), {}
        for name, engine in bench.engines.items():
            if not engine.has_parts:
                continue  # A replay runs single cycles, which cannot choose block sizes.
            cell = next(cell for cell in cells if (cell.task, cell.strategy) == (task, name))
            tokenizer = bench.jobs[name].tokenizer
            by_strategy[name] = {
                **record(engine, request, item.lengths or (), tokenizer),
                "ttft_ms": cell.ttft_ms,
                "cycle_ms": cell.cost_ms.cycle if cell.cost_ms else 0.0,
            }
        replays[task] = {"prompt": _as_text(item.prompt), "strategies": by_strategy}
    return replays


def _longest(bench: Bench, task: str, done: Sequence[TaskRound]) -> Item:
    lengths = {
        completion.id: len(completion.output_ids)
        for round_ in done
        for sample in round_.samples
        if (sample.task, sample.strategy) == (task, bench.baseline)
        for completion in sample.completions
    }
    return max(bench.workload.tasks[task], key=lambda item: lengths.get(item.prompt.index, 0))


def _as_text(prompt: Prompt) -> str:
    if prompt.messages is not None:
        return "\n".join(message["content"] for message in prompt.messages)
    return prompt.text or f"{len(prompt.ids)} random tokens"
