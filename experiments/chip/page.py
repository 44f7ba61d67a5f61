"""The page of measured settings, as Markdown with plots."""

import itertools
import pathlib
import statistics
from collections.abc import Iterable, Iterator, Sequence

from matplotlib.figure import Figure

from dflash.measure import plots
from dflash.measure.plots import Line
from dflash.storage import files

PARTS = ("draft", "forward", "unembed", "sampling", "commit", "rest")
_AXES = ("model", "weights", "batch", "context", "temperature")
_NOTES = """
## How it was measured

* All weights are random, and the context is as long in every slot but not computed: times depend
  on neither. Drafts of random weights are nearly always rejected, so no speed-up is measured.
* "over fewest rows" divides by the cycle of the same model, weights, batch, context and
  temperature with the fewest rows: plain decoding, where it was measured.
* **cycle** is a dispatch of the decode loop divided by its turns; medians over the repeats.
* **draft**, **forward** (target without its head), **unembed** (head and argmax) and **commit**
  (moving the rows of a tree's path, and what the drafter observes) each ran alone in a loop on
  the device, less the time of an empty loop. **sampling** is what noise, the check for finite
  logits and acceptance add to a loop of unembed: a difference of two loops. **rest** is the cycle
  without all of these; it is below 0 where XLA overlaps or fuses across parts.
* **(×)** is the time over its floor: weights and context read once, or the matrix products at
  peak, whichever takes longer. The draft's floor counts all weights of the drafter, those that
  observe included, and the target's head. sampling, commit and rest have none. Below 1×, the
  time or the rates are wrong: do not trust that setting.
* The peak of memory is that of the process so far; "temporary" is the compiler's figure for a
  dispatch. Compiling includes tracing; "cached" programs came from the disk.
* The oracle's drafts are the plain output with some wrong tokens, so that drafts are accepted at
  all lengths. "exact oracle" is with `decode.exact=true`. A near tie is a difference that rounding
  explains; a fault is one that it does not (`dflash/inference/difference.py`).
"""


def write(store: dict, directory: pathlib.Path) -> None:
    """Writes chip.md and its plots for the content of chip.json."""
    groups: dict[str, list[dict]] = {"cycles": [], "rows": [], "equality": []}
    for figures in store["settings"].values():
        if "error" not in figures:
            groups[figures["part"]].append(figures)
    drawn = {"cycles": _bars, "rows": _curves}
    for part, draw in drawn.items():
        if groups[part]:
            files.write_whole(directory / f"{part}.png", draw(groups[part]))
    files.write_whole(directory / "chip.md", "\n".join(_lines(store, groups)) + "\n")


def _lines(store: dict, groups: dict[str, list[dict]]) -> Iterator[str]:
    call, count = store["calls"][-1], len(store["settings"])
    failed = [figures for figures in store["settings"].values() if "error" in figures]
    left = call["left_out"]
    yield f"# Decoding on {call['device']}\n"
    yield f"{count - len(failed)} settings measured, {len(failed)} failed, {len(left)} left out.\n"
    yield from _answers(groups["cycles"])
    yield from _table(("call", "commit", "command"), map(_call, store["calls"]))
    machine = call["machine"]
    yield ", ".join(f"{name} {version}" for name, version in call["versions"].items()) + "."
    yield (
        f"Floors: {machine['flops_per_s'] / 1e12:.3g} TFLOP/s and "
        f"{machine['bytes_per_s'] / 1e9:.4g} GB/s ({machine['source']}). Each loop has "
        f"{call['turns']} turns; medians of {call['repeats']} timings.\n"
    )
    titles = {"cycles": "Cost of a cycle, in ms", "rows": "Cost of verification by rows, in ms"}
    for part, title in titles.items():
        if groups[part]:
            yield f"## {title}\n\n![{title}]({part}.png)\n"
            yield from _costs(sorted(groups[part], key=lambda one: (_point(one), one["rows"])))
    timed = [one["dispatch_ms"] for one in groups["cycles"] + groups["rows"]]
    if timed:
        yield f"A dispatch of empty turns takes {statistics.median(timed):.3f} ms (median).\n"
    if groups["equality"]:
        yield "## Outputs identical to plain decoding\n"
        head = "drafter", "identical", "acceptance length", "first differences"
        yield from _table((*_AXES, *head), map(_equality, groups["equality"]))
    if failed:
        yield "## Failed\n"
        for one in failed:
            yield f"* {one['part']}, {', '.join(_cells(one))}, {one['strategy']}: {one['error']}"
    if left:
        yield "\n## Left out, for lack of time\n\nThe same command continues with these.\n"
        yield from (f"* {key}" for key in left)
    yield _NOTES


def _answers(cycles: Sequence[dict]) -> Iterator[str]:
    """Yields a line for each drafter at the point of the first plain setting."""
    plain = next((one for one in cycles if one["strategy"] == "plain"), None)
    same = [one for one in cycles if plain and _point(one) == _point(plain) and one is not plain]
    for one in same:
        token, cycle = plain["ms"]["cycle"], one["ms"]["cycle"]
        yield (
            f"* {_name(one, one['strategy'])}: a plain token takes {token:.2f} ms and a cycle "
            f"{cycle:.2f} ms: drafting pays above a mean acceptance length (τ) of "
            f"{cycle / token:.2f}."
        )
    yield ""


def _table(head: Sequence[str], rows: Iterable[Sequence]) -> Iterator[str]:
    for line in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "/") for cell in line) + " |"
    yield ""


def _call(call: dict) -> tuple[str, ...]:
    return call["date"], call["commit"], f"`{call['command']}`"


def _point(one: dict) -> tuple:
    return tuple(one[axis] for axis in _AXES)


def _cells(one: dict) -> list[str]:
    return [pathlib.PurePath(one["model"]).stem, *map(str, _point(one)[1:])]


def _ms(one: dict, name: str) -> str:
    ms, floor = one["ms"][name], one["floor_ms"].get(name)
    return f"{ms:.3f} ({ms / floor:.2f}× of {floor:.3f})" if floor else f"{ms:.3f}"


def _costs(timed: Sequence[dict]) -> Iterator[str]:
    """Yields a table of settings, those of the same point together, the fewest rows first."""
    head = "strategy", "rows", "cycle", *PARTS, "over fewest rows", "memory, GB", "compiling, s"
    fewest: dict[tuple, dict] = {}
    rows = []
    for one in timed:
        least = fewest.setdefault(_point(one), one)
        memory = ", ".join(f"{name} {size:.2f}" for name, size in one["memory_gb"].items())
        seconds = [program["seconds"] for program in one["compile"].values()]
        cached = sum(program["cached"] for program in one["compile"].values())
        rows.append([
            *_cells(one), one["strategy"], one["rows"],
            *(_ms(one, name) for name in ("cycle", *PARTS)),
            f"{one['ms']['cycle'] / least['ms']['cycle']:.2f}", memory,
            f"{sum(seconds):.0f} ({len(seconds)} programs, {cached} cached)",
        ])  # fmt: skip
    yield from _table((*_AXES, *head), rows)


def _equality(one: dict) -> list:
    identical = f"{one['identical']} of {one['of']}, {one['new_tokens']} tokens each"
    differences = "; ".join(one["differences"]) or "none"
    return [*_cells(one), one["strategy"], identical, f"{one['acceptance_length']:.2f}",
            differences]  # fmt: skip


def _name(one: dict, *more: str) -> str:
    model, weights, batch, context, temperature = _cells(one)
    return f"{model}, {weights}, B {batch}, {context}, T {temperature}" + ", ".join(("", *more))


def _bars(cycles: Sequence[dict]) -> bytes:
    """Plots the parts of each cycle as stacked bars, the cycle itself and its floor as ticks."""
    figure = Figure(figsize=(10.0, 1.4 + 0.3 * len(cycles)), layout="constrained")
    axes, names = figure.add_subplot(), [_name(one, one["strategy"]) for one in cycles]
    begin = [0.0] * len(cycles)
    for slot, part in enumerate(PARTS):
        widths = [max(one["ms"][part], 0.0) for one in cycles]
        axes.barh(names, widths, 0.7, left=begin, color=plots.color_of(slot), label=part)
        begin = list(map(sum, zip(begin, widths, strict=True)))
    for label, key, color in (("cycle", "ms", plots.RED), ("floor", "floor_ms", plots.INK)):
        places = [one[key]["cycle"] for one in cycles]
        axes.scatter(places, names, marker="|", s=160, color=color, zorder=3, label=label)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.legend(loc="outside upper center", ncol=8, frameon=False)
    return plots.png(figure)


def _curves(rows: Sequence[dict]) -> bytes:
    """Plots the time of a cycle by rows, and its floor."""
    lines = []
    for _, group in itertools.groupby(sorted(rows, key=_point), _point):
        ordered = sorted(group, key=lambda one: one["rows"])
        places, name = [one["rows"] for one in ordered], _name(ordered[0])
        floors = [one["floor_ms"]["cycle"] for one in ordered]
        lines += [
            Line(name, places, [one["ms"]["cycle"] for one in ordered]),
            Line(f"floor ({name})", places, floors, roofline_of=name),
        ]
    axes = {"x": "rows per sequence", "y": "milliseconds of a cycle"}
    return plots.curves(lines, title="Cost of verification by rows", **axes, log=True)
