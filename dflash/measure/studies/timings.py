"""Studies of single costs: a cycle and its parts, verification by rows, drafting by block size."""

import dataclasses
import functools
import statistics
import types
from collections.abc import Iterable, Iterator

import jax.numpy as jnp

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.drafters.base import Proposal
from dflash.loading import models, weights
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure import roofline, warnings
from dflash.measure.engine import MeasuredEngine, seconds_of
from dflash.measure.forced import Canned
from dflash.measure.parts import Probe
from dflash.measure.plots import Line
from dflash.measure.studies.result import (
    DOUBTS,
    Step,
    StudyResult,
    doubted,
    in_turns,
    machine_note,
)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (64, 512, 2048, 8192, 32768)
DRAFT_CONTEXTS = (64, 2048)
BLOCK_SIZES = (2, 4, 8, 16, 32)
CYCLE_CONTEXTS = (128,)


def cycle(config: BenchmarkRun) -> Iterator[Step]:
    """Compares the cost of a cycle in the decode loop with the sum of its two forwards."""
    jobs = _loaded(benches.prepare_models(config))
    context = _contexts(config, jobs, CYCLE_CONTEXTS)[0]
    target, batch = next(iter(jobs.values())).target, config.decode.batch_size
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(target.sharding)
    probes = {}
    for name, job in jobs.items():
        yield Step(f"compiling {name}", 0)
        engine = _engine(config, target, job.drafter, context)
        probes[name] = Probe(engine, engine.standing(context))

    def row(name: str, some: list[tuple[float, float, float]]) -> dict:
        drafter = jobs[name].drafter
        least = roofline.target_work(
            target, batch=batch, rows=drafter.block_size, context=context,
            kv_dtype=config.decode.kv_dtype,
        ).ideal_ms(machine)  # fmt: skip
        least_draft = roofline.draft_work(target, drafter, batch=batch).ideal_ms(machine)
        columns = [statistics.median(column) for column in zip(*some, strict=True)]
        whole, draft, verify = columns
        ratios = [whole / (draft + verify) for whole, draft, verify in some]
        return doubted(
            {
                "strategy": name,
                "rows": drafter.block_size,
                **dict(zip(("cycle_ms", "draft_ms", "verify_ms"), columns, strict=True)),
                "cycle_over_parts": statistics.median(ratios),
                "roofline_ms": least + least_draft,
            },
            (
                *warnings.of_cost(whole, (draft, verify)),
                *warnings.of_forward("verification", verify, least),
                *warnings.of_forward("the draft", draft, least_draft),
            ),
        )

    def result(times) -> StudyResult:
        rows = [row(name, some) for name, some in times.items()]
        lines = [
            Line(
                key,
                [row["rows"] for row in rows],
                [row[f"{key}_ms"] for row in rows],
                doubtful=[bool(row[DOUBTS]) for row in rows],
                roofline_of="cycle" if key == "roofline" else None,
            )
            for key in ("cycle", "draft", "verify", "roofline")
        ]
        notes = [f"context {context} tokens, batch {batch}", machine_note(machine)]
        title = "A cycle beside its parts"
        return StudyResult(title, rows, lines, "rows", "milliseconds", notes=notes)

    calls = {
        name: lambda probe=probe: (probe.cycle_ms(), probe.draft_ms(), probe.verify_ms())
        for name, probe in probes.items()
    }
    yield from in_turns(calls, config.study.repeats, str, result)


def verify(config: BenchmarkRun) -> Iterator[Step]:
    """Measures how the cost of verification depends on the number of rows."""
    only_target = dataclasses.replace(config, strategies={})
    job = next(iter(_loaded(benches.prepare_models(only_target)).values()))
    contexts = _contexts(config, {"": job}, CONTEXTS)
    counts, batch = config.study.values or ROWS, config.decode.batch_size
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(job.target.sharding)
    engines = {count: _rows_engine(config, job, count, max(counts), contexts) for count in counts}
    state = engines[counts[0]].standing(contexts[0])

    def verify_ms(context: int, count: int) -> float:
        nonlocal state
        state = engines[count].at_length(state, context)
        seconds, (state, report) = seconds_of(engines[count].generate, state)
        return 1e3 * seconds / max(int(report.cycles), 1)

    def row(context: int, count: int, taken: float, one: float) -> dict:
        least = roofline.target_work(
            job.target, batch=batch, rows=count, context=context,
            kv_dtype=config.decode.kv_dtype,
        ).ideal_ms(machine)  # fmt: skip
        return doubted(
            {
                "context": context,
                "rows": count,
                "verify_ms": taken,
                "over_one_row": taken / one,
                "roofline_ms": least,
                "over_roofline": taken / least,
            },
            warnings.of_forward("verification", taken, least),
        )

    def result(times) -> StudyResult:
        middle = {key: statistics.median(some) for key, some in times.items()}
        rows = [row(*key, taken, middle[key[0], counts[0]]) for key, taken in middle.items()]
        lines = [
            line
            for context in contexts
            for line in _with_roofline(
                f"context {context}",
                [row for row in rows if row["context"] == context],
                "rows",
                "verify_ms",
            )
        ]
        notes = [
            f"batch {batch}; over_one_row compares with {counts[0]} row(s) at the same context",
            f"the ridge of two-byte weights is at {machine.ridge_rows:.0f} rows in all",
            machine_note(machine),
        ]
        title, x = "Cost of verification by rows", "rows per sequence"
        return StudyResult(title, rows, lines, x, "milliseconds", log=True, notes=notes)

    calls = {
        (context, count): functools.partial(verify_ms, context, count)
        for context in contexts
        for count in counts
    }
    yield from in_turns(
        calls, config.study.repeats, lambda key: f"{key[1]} rows, context {key[0]}", result
    )


def draft(config: BenchmarkRun) -> Iterator[Step]:
    """Measures how the cost of a draft depends on the block size."""
    sizes, batch = config.study.values or BLOCK_SIZES, config.decode.batch_size
    variants = {
        f"{name} {size}": with_block_size(name, drafter, size)
        for name, drafter in config.strategies.items()
        for size in sizes
    }
    keys = [(name, size) for name in config.strategies for size in sizes]
    varied = dataclasses.replace(config, strategies=variants)
    jobs = _loaded(benches.prepare_models(varied))
    target = next(iter(jobs.values())).target
    contexts = _contexts(config, jobs, DRAFT_CONTEXTS)
    yield Step("measuring the machine", 0)
    machine = roofline.machine_of(target.sharding)
    rows: list[dict] = []

    def row(context: int, name: str, size: int, taken: float) -> dict:
        work = roofline.draft_work(target, jobs[f"{name} {size}"].drafter, batch=batch)
        least = work.ideal_ms(machine)
        return doubted(
            {
                "strategy": name,
                "context": context,
                "block_size": size,
                "draft_ms": taken,
                "roofline_ms": least,
                "over_roofline": taken / least,
            },
            warnings.of_forward("the draft", taken, least),
        )

    def result(context: int, before: list[dict], times) -> StudyResult:
        nonlocal rows
        rows = before + [row(context, *key, statistics.median(some)) for key, some in times.items()]
        lines = [
            line
            for name, place in dict.fromkeys((one["strategy"], one["context"]) for one in rows)
            for line in _with_roofline(
                f"{name}, context {place}",
                [one for one in rows if (one["strategy"], one["context"]) == (name, place)],
                "block_size",
                "draft_ms",
            )
        ]
        notes = [f"batch {batch}", machine_note(machine)]
        title, y = "Cost of a draft by block size", "milliseconds"
        return StudyResult(title, rows, lines, "block size", y, log=True, notes=notes)

    for place, context in enumerate(contexts):
        probes = {}
        for name, size in keys:
            yield Step(f"compiling {name} {size}, context {context}", place / len(contexts))
            engine = _engine(config, target, jobs[f"{name} {size}"].drafter, context)
            probes[name, size] = Probe(engine, engine.standing(context))
        calls = {key: probe.draft_ms for key, probe in probes.items()}
        named = functools.partial(_draft_name, context)
        done = functools.partial(result, context, rows)
        for step in in_turns(calls, config.study.repeats, named, done):
            yield step.within(place / len(contexts), 1 / len(contexts))


def _draft_name(context: int, key: tuple[str, int]) -> str:
    return f"{key[0]} {key[1]}, context {context}"


def _with_roofline(name: str, rows: list[dict], x: str, y: str) -> tuple[Line, Line]:
    """Returns the line of a column of rows, and the line of their rooflines."""
    places, doubtful = [row[x] for row in rows], [bool(row[DOUBTS]) for row in rows]
    return (
        Line(name, places, [row[y] for row in rows], doubtful=doubtful),
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
            f"strategies.{name}: drafter {drafter.name!r} has no block_size to vary; leave it out"
        )
    shape = drafter.architecture
    trained = getattr(shape, "block_size", size)
    if drafter.checkpoint == models.RANDOM and shape is not None and trained < size:
        shape = dataclasses.replace(shape, block_size=size)
    return dataclasses.replace(drafter, block_size=size, architecture=shape)


def _loaded(jobs: dict[str, Job]) -> dict[str, Job]:
    """Reads all weights, those of the shared target once."""
    first = next(iter(jobs.values()))
    sharding = first.target.sharding
    weights.load(first.target, first.target_source, sharding)
    for job in jobs.values():
        weights.load(job.drafter, job.drafter_source, sharding)
    return jobs


def _contexts(config: BenchmarkRun, jobs: dict[str, Job], usual: Iterable[int]) -> tuple[int, ...]:
    """Returns the contexts of the config, or those of the default ones that the target supports.

    Raises:
      ConfigError: A context in the config is longer than the target supports.
    """
    longest = next(iter(jobs.values())).target.arch.max_position_embeddings
    beyond = [context for context in config.study.contexts if context > longest]
    if beyond:
        raise errors.ConfigError(
            f"study.contexts: {beyond[0]} is more than the {longest} positions that the target "
            "was made for"
        )
    return config.study.contexts or tuple(one for one in usual if one <= longest)


def _engine(config: BenchmarkRun, target, drafter, context: int) -> MeasuredEngine:
    """Returns an engine with room for a context and one dispatch of fully accepted cycles."""
    room = context + (config.decode.sync_every + 1) * drafter.block_size
    return MeasuredEngine(target, drafter, config.decode, max_length=room)


def _rows_engine(
    config: BenchmarkRun, job: Job, count: int, most: int, contexts: tuple[int, ...]
) -> MeasuredEngine:
    """Returns an engine that verifies `count` rows, with a cache layout independent of `count`."""
    batch, drafts = config.decode.batch_size, count - 1
    form = types.SimpleNamespace(
        feature_layers=(), num_draft_tokens=drafts, has_probs=False, longest_path=count
    )
    tokens = jnp.broadcast_to(jnp.arange(drafts) % job.target.arch.vocab_size, (batch, drafts))
    room = max(contexts) + (config.decode.sync_every + 1) * most - count
    canned = Canned(Proposal(tokens.astype(jnp.int32)), form)
    return MeasuredEngine(job.target, canned, config.decode, max_length=room)
