"""Text forms of a run's results for its display: lines, table rows and bars."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.runs import outputs

MARK = "?"  # Suffix of a figure that is not trustworthy.
HISTOGRAM_WIDTH = 40  # Characters of the longest bar.
EXCERPT_WIDTH = 24  # Characters of a prompt in a table.
PROMPT_LINES = 6  # Lines of a prompt that are quoted before its answer.
PROMPT_CHARACTERS = 400  # Characters of a prompt that are quoted before its answer.
EMPTY_ROWS = 2  # Number of adjacent histogram rows without a cycle that are merged to one.

# Generated text may hold control characters, which could move the cursor or worse. Terminals get
# Unicode's pictures of them; files and pipes get the text unchanged.
_CONTROL_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(128, 160), "�"),
}


def quoted(prompt: str) -> list[str]:
    """Returns a prompt as lines that begin with ">"; a long prompt is truncated."""
    text = visible(prompt.strip()[:PROMPT_CHARACTERS])
    lines = text.splitlines()[:PROMPT_LINES]
    num_hidden = len(prompt.strip()) - len("\n".join(lines))
    more = [f"… and {num_hidden} more characters"] if lines and num_hidden > 0 else []
    return [f"> {line}".rstrip() for line in (*lines, *more)]


def summary_line(record: outputs.Record) -> str:
    """Returns one line about a finished prompt."""
    parts = [token_count(len(record.output_ids)), record.finish_reason]
    if record.tau is not None:
        parts.insert(0, f"τ {record.tau:.2f}")
    if record.tpot_ms is not None:
        parts.append(f"{record.tpot_ms:.2f} ms per token")
    return " · ".join(parts)


def result_rows(summary: outputs.Summary) -> list[tuple[str, str]]:
    """Returns the names and values of a summary to show."""
    return [
        ("τ", number(summary.tau, " tokens per cycle")),
        ("throughput", number(summary.tokens_per_second, " tokens/s")),
        ("time to first token", number(summary.ttft_ms, " ms (median)")),
        ("time per token", number(summary.tpot_ms, " ms (median)")),
        ("prompts", str(summary.prompts)),
        ("output tokens", str(summary.output_tokens)),
        ("cycles", str(summary.cycles)),
    ]


def event_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns the names and values of an engine's own counts; see `Usage.facts`."""
    events = facts.get("events", {})
    rows = [(name.replace("_", " "), str(count)) for name, count in sorted(events.items())]
    return [("time per cycle", number(facts["mean_cycle_ms"], " ms (mean)")), *rows] if rows else []


def comparison_rows(
    records: Mapping[int, outputs.Record],
    baseline: Mapping[int, outputs.Record],
    summary: outputs.Summary,
    comparison: outputs.Comparison,
    *,
    busy: bool = False,
) -> list[tuple[str, ...]]:
    """Returns table rows that compare a run with its baseline: one per prompt, and a total.

    A cycle takes at least as long as a plain step, so a speed-up above τ is marked.

    Args:
      busy: Mark every speed-up, since other processes used the processor.
    """

    def row(title, tau, fast, plain, identical):
        ratio = fast / plain if fast and plain else None
        doubtful = ratio is not None and (busy or ratio > (tau or ratio))
        mark = MARK if doubtful else ""
        speeds = (number(fast, "", 0), number(plain, "", 0), number(ratio, "×") + mark)
        return (title, number(tau), *speeds, identical)

    rows = []
    for index, record in records.items():
        plain = baseline[index]
        same = "yes" if record.output_ids == plain.output_ids else "no"
        speeds = record.tokens_per_second, plain.tokens_per_second
        rows.append(row(_excerpt(record), record.tau, *speeds, same))
    same = "yes" if comparison.identical == comparison.prompts else "no"
    if same == "no":
        same += f" ({comparison.identical} of {comparison.prompts})"
    speeds = summary.tokens_per_second, comparison.tokens_per_second
    return [*rows, row("all", summary.tau, *speeds, same)]


def histogram_lines(histogram: Mapping[str, int]) -> list[str]:
    """Returns a bar chart of acceptance lengths, with percentages, as lines of text.

    Adjacent lengths without any cycle share one line.
    """
    total = sum(histogram.values())
    largest = max(histogram.values())
    rows: list[tuple[str, int]] = []
    for is_empty, adjacent in itertools.groupby(histogram.items(), lambda row: not row[1]):
        run = list(adjacent)
        together = is_empty and len(run) >= EMPTY_ROWS
        rows += [(f"{run[0][0]}–{run[-1][0]}", 0)] if together else run
    return [
        f"{length:>5} {100 * count / total:5.1f} % "
        f"{'█' * round(HISTOGRAM_WIDTH * count / largest)}".rstrip()
        for length, count in rows
    ]


def prompt_text(prompt: str | Sequence[Mapping[str, Any]] | None) -> str:
    """Returns the text of a prompt, or of a conversation's last message; "" for token ids."""
    if prompt is None or isinstance(prompt, str):
        return prompt or ""
    return str(prompt[-1].get("content"))


def _excerpt(record: outputs.Record) -> str:
    if record.prompt is None:
        return f"prompt {record.index}"
    line = next(iter(prompt_text(record.prompt).strip().splitlines()), "")
    return line if len(line) <= EXCERPT_WIDTH else line[: EXCERPT_WIDTH - 1] + "…"


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    """Returns a number with its unit, or – for None."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def token_count(count: int) -> str:
    """Returns a number of tokens as text, such as "1 token"."""
    return f"{count} token{'' if count == 1 else 's'}"


def visible(text: str) -> str:
    """Returns text for a terminal, with pictures in place of control characters."""
    return text.translate(_CONTROL_PICTURES)
