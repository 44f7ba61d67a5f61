"""Results of a decode run: one record per prompt, and their summary."""

import collections
import dataclasses
import importlib.metadata
import json
import math
import operator
import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from dflash.config.schema import INT32_MAX
from dflash.version import __version__


@dataclasses.dataclass(frozen=True)
class Record:
    """Finished prompt, one line of outputs.jsonl.

    Prompts of a batch overlap in time, so their `decode_ms` cannot be added up. Throughput comes
    from `decode_clock_s`, the engine's clock. Each record stores it, so that a resumed run knows
    the time that earlier runs took.
    """

    index: int
    prompt: str | tuple[Mapping[str, Any], ...] | None  # Text, messages, or None for token ids.
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    text: str
    finish_reason: Literal["stop", "length"]
    acceptance_lengths: tuple[int, ...]  # Tokens committed in each cycle, bonus included.
    prefill_ms: float  # Time from the start of the prefill to the first token.
    decode_ms: float  # Time from the first token to the last.
    decode_clock_s: float  # Time that the run had spent in decoding when this prompt finished.
    block_sizes: tuple[int, ...] = ()  # Rows verified in each cycle.

    @property
    def tau(self) -> float | None:
        """Mean acceptance length (τ); None for an output of one token."""
        return _mean(self.acceptance_lengths)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for an output of one token."""
        later_tokens = len(self.output_ids) - 1
        return self.decode_ms / later_tokens if later_tokens > 0 else None

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens after the first, per second; None for an output of one token."""
        return 1e3 / self.tpot_ms if self.tpot_ms else None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Figures over all records of a run; a figure that no record has is None."""

    tau: float | None  # Mean acceptance length over all cycles of all prompts.
    tokens_per_second: float | None  # Over all slots, without prefill and first tokens.
    ttft_ms: float | None  # Median time to first token over prompts.
    tpot_ms: float | None  # Median time per output token over prompts.
    acceptance_histogram: Mapping[str, int]  # Number of cycles by acceptance length, from "1".
    cycles: int
    prompts: int
    output_tokens: int
    decode_seconds: float
    # Number of cycles by block size.
    block_size_histogram: Mapping[str, int] = dataclasses.field(default_factory=dict)


def summarize(records: Iterable[Record], *, block_size: int) -> Summary:
    """Summarizes finished prompts.

    Throughput is (output tokens − first tokens) ÷ decoding time. The time that a killed run spent
    on unfinished prompts counts, too, so the throughput of a resumed run may be underestimated.

    Args:
      block_size: Longest possible acceptance length.
    Raises:
      ValueError: An acceptance length is outside 1 … block_size.
    """
    records = list(records)
    lengths = [length for record in records for length in record.acceptance_lengths]
    if lengths and not 1 <= min(lengths) <= max(lengths) <= block_size:
        raise ValueError(
            f"acceptance lengths {min(lengths)} … {max(lengths)} are not in 1 … {block_size}"
        )
    counts = collections.Counter(lengths)
    sizes = collections.Counter(size for record in records for size in record.block_sizes)
    decode_seconds = max((record.decode_clock_s for record in records), default=0.0)
    output_tokens = sum(len(record.output_ids) for record in records)
    later_tokens = sum(max(len(record.output_ids) - 1, 0) for record in records)
    return Summary(
        tau=_mean(lengths),
        tokens_per_second=later_tokens / decode_seconds if decode_seconds > 0 else None,
        ttft_ms=_median(record.prefill_ms for record in records),
        tpot_ms=_median(r.tpot_ms for r in records if r.tpot_ms is not None),
        acceptance_histogram={str(n): counts[n] for n in range(1, block_size + 1)},
        cycles=len(lengths),
        prompts=len(records),
        output_tokens=output_tokens,
        decode_seconds=decode_seconds,
        block_size_histogram={str(size): sizes[size] for size in sorted(sizes)},
    )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of a run with its baseline, the same prompts decoded without drafting."""

    tokens_per_second: float | None  # Throughput of the baseline; see `Summary`.
    speed_up: float | None  # Throughput of the run over that of the baseline.
    identical: int  # Number of prompts with the baseline's output ids.
    prompts: int


def compare(
    records: Mapping[int, Record], baseline: Mapping[int, Record], *, block_size: int
) -> Comparison:
    """Compares the finished prompts of a run, by index, with those of the baseline.

    Raises:
      ValueError: The prompts differ, or an acceptance length is outside 1 … block_size.
    """
    if records.keys() != baseline.keys():
        raise ValueError("run and baseline have finished different prompts")
    fast = summarize(records.values(), block_size=block_size).tokens_per_second
    plain = summarize(baseline.values(), block_size=1).tokens_per_second
    return Comparison(
        tokens_per_second=plain,
        speed_up=fast / plain if fast and plain else None,
        identical=sum(r.output_ids == baseline[i].output_ids for i, r in records.items()),
        prompts=len(records),
    )


def versions() -> dict[str, str]:
    """Returns the versions of the packages on which reported numbers depend."""
    packages = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")}
    return {"dflash": __version__, "python": platform.python_version(), **packages}


def encode(record: Record) -> bytes:
    """Returns a record as a line of outputs.jsonl."""
    fields = {**dataclasses.asdict(record), "tau": record.tau}
    # `item` converts NumPy's numbers to Python's.
    text = json.dumps(
        fields, ensure_ascii=False, allow_nan=False, default=operator.methodcaller("item")
    )
    # Tokens can spell half a surrogate pair, which a JSON escape can encode, but UTF-8 cannot.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def decode(line: bytes) -> Record:
    """Parses a line of outputs.jsonl; raises ValueError, which names the field, if damaged."""
    try:
        fields = json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(fields, dict):
        raise ValueError("not an object")
    # Lines of earlier versions lack this field.
    fields.setdefault("block_sizes", [])
    missing = [f.name for f in dataclasses.fields(Record) if f.name not in fields]
    if missing:
        raise ValueError(f"no {', '.join(missing)}")
    values = {field.name: fields[field.name] for field in dataclasses.fields(Record)}
    for name, problem in _problems(values):
        raise ValueError(f"{name}: {problem}")
    lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return Record(**values | lists)


_TIMES = ("prefill_ms", "decode_ms", "decode_clock_s")
# Lists of integers, with the minimum of an item.
_INTEGERS = {"prompt_ids": 0, "output_ids": 0, "acceptance_lengths": 1, "block_sizes": 1}


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if not _is_integer(values["index"], 0):
        yield "index", f"expected an integer >= 0, got {values['index']!r}"
    prompt = values["prompt"]
    messages = isinstance(prompt, list) and prompt and all(isinstance(m, dict) for m in prompt)
    if not (prompt is None or isinstance(prompt, str) or messages):
        yield "prompt", "expected text, messages or null"
    if not isinstance(values["text"], str):
        yield "text", "expected text"
    if values["finish_reason"] not in ("stop", "length"):
        yield "finish_reason", f"expected stop or length, got {values['finish_reason']!r}"
    for name in _TIMES:
        value = values[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            yield name, f"expected a finite number >= 0, got {value!r}"
    valid = True
    for name, low in _INTEGERS.items():
        if not isinstance(values[name], list):
            valid = False
            yield name, "expected a list"
        elif not all(_is_integer(item, low) for item in values[name]):
            valid = False
            yield name, f"expected integers >= {low}"
    if valid:
        yield from _cycle_problems(values)


def _cycle_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    lengths, sizes = values["acceptance_lengths"], values["block_sizes"]
    if sizes and len(sizes) != len(lengths):
        yield "block_sizes", f"{len(sizes)} items, but {len(lengths)} acceptance_lengths"
    elif any(length > size for length, size in zip(lengths, sizes, strict=False)):
        yield "acceptance_lengths", "more tokens than rows in a cycle (see block_sizes)"
    later = len(values["output_ids"]) - 1
    if sum(lengths) != later:
        yield "acceptance_lengths", f"sum to {sum(lengths)}, not to len(output_ids) - 1 = {later}"


def _is_integer(value: Any, low: int) -> bool:
    return type(value) is int and low <= value <= INT32_MAX


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return statistics.median(values) if values else None
