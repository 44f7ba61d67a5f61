"""Studies of single costs: a cycle and its parts, verification by rows, drafting by block size."""

import dataclasses
import functools
import statistics
import types
from collections.abc import Iterable, Iterator, Mapping

import jax.numpy as jnp

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun, StudyConfig
from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Proposal
from dflash.loading import models
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure import roofline, warnings
from dflash.measure.engine import MeasuredEngine, Probe, seconds_of
from dflash.measure.forced import FixedDrafter
from dflash.measure.plots import Line
from dflash.measure.roofline import Machine
from dflash.measure.studies.result import (
    Step,
    StudyResult,
    in_turns,
    machine_note,
    with_warnings,
)
from dflash.models.decoder import Decoder

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (64, 512, 2048, 8192, 32768)
DRAFT_CONTEXTS = (64, 2048)
BLOCK_SIZES = (2, 4, 8, 16, 32)
CYCLE_CONTEXTS = (128,)


def cycle(config: BenchmarkRun) -> Iterator[Step]:
    """Compares the cost of a cycle in the decode loop with the sum of its two forwards."""
    jobs = _loaded(benches.prepare_models(config))
    context = _contexts(config.study, jobs, CYCLE_CONTEXTS)[0]
    target = next(iter(jobs.values())).target
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(target.sharding)
    probes = {}
    for name, job in jobs.items():
        yield Step(f"compiling {name}", 0)
        engine = _engine(config.decode, target, job.drafter, context)
        probes[name] = Probe(engine, engine.standing(context))
    calls = {
        name: lambda probe=probe: (probe.cycle_ms(), probe.draft_ms(), probe.verify_ms())
        for name, probe in probes.items()
    }
    result = functools.partial(_cycle_result, config.decode, jobs, machine, context)
    yield from in_turns(calls, config.study.repeats, str, result)


def _cycle_result(
    decode: DecodeConfig,
    jobs: Mapping[str, Job],
    machine: Machine,
    context: int,
    times: Mapping[str, list[tuple[float, float, float]]],
) -> StudyResult:
    rows = [
        _cycle_row(decode, name, jobs[name], machine, context, taken)
        for name, taken in times.items()
    ]
    lines = [
        Line(
            key,
            [row["rows"] for row in rows],
            [row[f"{key}_ms"] for row in rows],
            flagged=[bool(row[warnings.KEY]) for row in rows],
            roofline_of="cycle" if key == "roofline" else None,
        )
        for key in ("cycle", "draft", "verify", "roofline")
    ]
    notes = [f"context {context} tokens, batch {decode.batch_size}", machine_note(machine)]
    title = "Cost of a cycle and of its parts"
    return StudyResult(title, rows, lines, "rows", "milliseconds", notes=notes)


def _cycle_row(
    decode: DecodeConfig,
    name: str,
    job: Job,
    machine: Machine,
    context: int,
    times: list[tuple[float, float, float]],
) -> dict:
    rows, batch = job.drafter.block_size, decode.batch_size
    least = _verify_roofline_ms(decode, job.target, machine, rows, context)
    least_draft = roofline.draft_work(job.target, job.drafter, batch=batch).ideal_ms(machine)
    cycle_ms, draft_ms, verify_ms = map(statistics.median, zip(*times, strict=True))
    ratios = [cycle / (draft + verify) for cycle, draft, verify in times]
    return with_warnings(
        {
            "strategy": name,
            "rows": rows,
            "cycle_ms": cycle_ms,
            "draft_ms": draft_ms,
            "verify_ms": verify_ms,
            "cycle_over_parts": statistics.median(ratios),
            "roofline_ms": least + least_draft,
        },
        (
            *warnings.of_cost(cycle_ms, (draft_ms, verify_ms)),
            *warnings.of_forward("verification", verify_ms, least),
            *warnings.of_forward("the draft", draft_ms, least_draft),
        ),
    )


def verify(config: BenchmarkRun) -> Iterator[Step]:
    """Measures how the cost of verification depends on the number of rows."""
    only_target = dataclasses.replace(config, strategies={})
    job = next(iter(_loaded(benches.prepare_models(only_target)).values()))
    contexts, counts = _contexts(config.study, {"": job}, CONTEXTS), config.study.values or ROWS
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(job.target.sharding)
    engine_of = functools.partial(_rows_engine, config.decode, job, contexts, max(counts))
    engines = {count: engine_of(count) for count in counts}
    state = engines[counts[0]].standing(contexts[0])

    def verify_ms(context: int, count: int) -> float:
        nonlocal state
        state = engines[count].at_length(state, context)
        seconds, (state, report) = seconds_of(engines[count].dispatch, state)
        return 1e3 * seconds / max(int(report.cycles), 1)

    calls = {
        (context, count): functools.partial(verify_ms, context, count)
        for context in contexts
        for count in counts
    }
    result = functools.partial(_verify_result, config.decode, job.target, machine)
    yield from in_turns(
        calls, config.study.repeats, lambda key: f"{key[1]} rows, context {key[0]}", result
    )


def _verify_result(
    decode: DecodeConfig,
    target: Decoder,
    machine: Machine,
    times: Mapping[tuple[int, int], list[float]],
) -> StudyResult:
    """Makes the result from times by context and number of rows."""
    medians = {key: statistics.median(taken) for key, taken in times.items()}
    contexts, counts = (tuple(dict.fromkeys(column)) for column in zip(*times, strict=True))
    rows = []
    for (context, count), verify_ms in medians.items():
        least = _verify_roofline_ms(decode, target, machine, count, context)
        row = {
            "context": context,
            "rows": count,
            "verify_ms": verify_ms,
            "over_one_row": verify_ms / medians[context, counts[0]],
            "roofline_ms": least,
            "over_roofline": verify_ms / least,
        }
        rows.append(with_warnings(row, warnings.of_forward("verification", verify_ms, least)))
    lines = []
    for context in contexts:
        context_rows = [row for row in rows if row["context"] == context]
        lines += _with_roofline(f"context {context}", context_rows, "rows", "verify_ms")
    notes = [
        f"batch {decode.batch_size}; over_one_row compares with {counts[0]} row(s) at the "
        "same context",
        machine_note(machine),
    ]
    title, x = "Cost of verification by rows", "rows per sequence"
    return StudyResult(title, rows, lines, x, "milliseconds", log=True, notes=notes)


def _verify_roofline_ms(
    decode: DecodeConfig, target: Decoder, machine: Machine, rows: int, context: int
) -> float:
    sizes = {"batch": decode.batch_size, "rows": rows, "context": context}
    return roofline.target_work(target, **sizes, kv_dtype=decode.kv_dtype).ideal_ms(machine)


def draft(config: BenchmarkRun) -> Iterator[Step]:
    """Measures how the cost of a draft depends on the block size."""
    sizes = config.study.values or BLOCK_SIZES
    keys = [(name, size) for name in config.strategies for size in sizes]
    variants = {
        f"{name} {size}": with_block_size(name, config.strategies[name], size)
        for name, size in keys
    }
    jobs = _loaded(benches.prepare_models(dataclasses.replace(config, strategies=variants)))
    target = next(iter(jobs.values())).target
    contexts = _contexts(config.study, jobs, DRAFT_CONTEXTS)
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(target.sharding)
    rows: list[dict] = []
    for place, context in enumerate(contexts):
        probes = {}
        for name, size in keys:
            yield Step(f"compiling {name} {size}, context {context}", place / len(contexts))
            engine = _engine(config.decode, target, jobs[f"{name} {size}"].drafter, context)
            probes[name, size] = Probe(engine, engine.standing(context))

        def result(times, context=context, before=tuple(rows)) -> StudyResult:
            rows[:] = before
            for (name, size), taken in times.items():
                drafter = jobs[f"{name} {size}"].drafter
                work = roofline.draft_work(target, drafter, batch=config.decode.batch_size)
                least = work.ideal_ms(machine)
                rows.append(_draft_row(name, context, size, statistics.median(taken), least))
            return _draft_result(config.decode, machine, list(rows))

        calls = {key: probe.draft_ms for key, probe in probes.items()}

        def describe(key: tuple[str, int], context=context) -> str:
            return f"{key[0]} {key[1]}, context {context}"

        for step in in_turns(calls, config.study.repeats, describe, result):
            yield step.within(place / len(contexts), 1 / len(contexts))


def _draft_row(name: str, context: int, size: int, draft_ms: float, least: float) -> dict:
    return with_warnings(
        {
            "strategy": name,
            "context": context,
            "block_size": size,
            "draft_ms": draft_ms,
            "roofline_ms": least,
            "over_roofline": draft_ms / least,
        },
        warnings.of_forward("the draft", draft_ms, least),
    )


def _draft_result(decode: DecodeConfig, machine: Machine, rows: list[dict]) -> StudyResult:
    lines = []
    for name, context in dict.fromkeys((row["strategy"], row["context"]) for row in rows):
        draft_rows = [row for row in rows if (row["strategy"], row["context"]) == (name, context)]
        lines += _with_roofline(f"{name}, context {context}", draft_rows, "block_size", "draft_ms")
    notes = [f"batch {decode.batch_size}", machine_note(machine)]
    title, y = "Cost of a draft by block size", "milliseconds"
    return StudyResult(title, rows, lines, "block size", y, log=True, notes=notes)


def _with_roofline(name: str, rows: list[dict], x: str, y: str) -> tuple[Line, Line]:
    """Returns the line of a column of rows, and the line of their rooflines."""
    places, flagged = [row[x] for row in rows], [bool(row[warnings.KEY]) for row in rows]
    return (
        Line(name, places, [row[y] for row in rows], flagged=flagged),
        Line(
            f"its roofline ({name})",
            places,
            [row["roofline_ms"] for row in rows],
            roofline_of=name,
        ),
    )


def with_block_size(name: str, drafter, size: int):
    """Returns a drafter's config with another block size.

    Random weights get an architecture of at least that block size.

    Raises:
      ConfigError: The strategy has no block size.
    """
    if not hasattr(drafter, "block_size"):
        raise errors.ConfigError(
            f"strategies.{name}: drafter {drafter.name!r} has no block_size to vary; "
            "remove the strategy"
        )
    shape = drafter.architecture
    trained = getattr(shape, "block_size", size)
    if drafter.checkpoint == models.RANDOM and shape is not None and trained < size:
        shape = dataclasses.replace(shape, block_size=size)
    return dataclasses.replace(drafter, block_size=size, architecture=shape)


def _loaded(jobs: dict[str, Job]) -> dict[str, Job]:
    """Reads all weights, those of the shared target once."""
    first = next(iter(jobs.values()))
    first.load_target()
    for job in jobs.values():
        job.load_drafter()
    return jobs


def _contexts(study: StudyConfig, jobs: dict[str, Job], usual: Iterable[int]) -> tuple[int, ...]:
    """Returns the contexts of the config, or those of the default ones that the target supports.

    Raises:
      ConfigError: A context in the config is longer than the target supports.
    """
    longest = next(iter(jobs.values())).target.arch.max_position_embeddings
    beyond = [context for context in study.contexts if context > longest]
    if beyond:
        raise errors.ConfigError(
            f"study.contexts: {beyond[0]} exceeds the {longest} positions that the target supports"
        )
    return study.contexts or tuple(context for context in usual if context <= longest)


def _engine(decode: DecodeConfig, target, drafter, context: int) -> MeasuredEngine:
    """Returns an engine with room for a context and one dispatch of fully accepted cycles."""
    room = context + (decode.sync_every + 1) * drafter.block_size
    return MeasuredEngine(target, drafter, decode, max_length=room)


def _rows_engine(
    decode: DecodeConfig, job: Job, contexts: tuple[int, ...], most: int, count: int
) -> MeasuredEngine:
    """Returns an engine that verifies `count` rows, with a cache layout independent of `count`."""
    batch, drafts = decode.batch_size, count - 1
    form = types.SimpleNamespace(
        feature_layers=(), num_draft_tokens=drafts, has_probs=False, longest_path=count
    )
    tokens = jnp.broadcast_to(jnp.arange(drafts) % job.target.arch.vocab_size, (batch, drafts))
    room = max(contexts) + (decode.sync_every + 1) * most - count
    fixed = FixedDrafter(Proposal(tokens.astype(jnp.int32)), form)
    return MeasuredEngine(job.target, fixed, decode, max_length=room)
