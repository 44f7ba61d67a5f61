"""Studies of single costs: a cycle and its parts, verification by rows, drafting by block size."""

import dataclasses
import statistics
import types
from collections.abc import Iterable

import jax.numpy as jnp

from dflash import errors
from dflash.checkpoints import assembly
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.drafters.base import Proposal
from dflash.inference import weights
from dflash.measure import bench as benches
from dflash.measure import roofline
from dflash.measure.engine import MeasuredEngine, seconds_of
from dflash.measure.forced import Canned
from dflash.measure.parts import Probe
from dflash.measure.studies.result import StudyResult, machine_note
from dflash.offline.job import Job

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS = (64, 512, 2048, 8192, 32768)
DRAFT_CONTEXTS = (64, 2048)
BLOCK_SIZES = (2, 4, 8, 16, 32)
CYCLE_CONTEXTS = (128,)


def cycle(config: BenchmarkRun) -> StudyResult:
    """What a cycle in the loop costs beside the sum of its two forwards, for every strategy."""
    jobs = _loaded(benches.prepare_models(config))
    context = _contexts(config, jobs, CYCLE_CONTEXTS)[0]
    probes = {}
    for name, job in jobs.items():
        engine = _engine(config, job.target, job.drafter, context)
        probes[name] = Probe(engine, engine.standing(context))
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in probes}
    for _ in range(1 + config.study.repeats):
        for name, probe in probes.items():
            times[name].append((probe.cycle_ms(), probe.draft_ms(), probe.verify_ms()))
    first = next(iter(jobs.values()))
    machine = roofline.machine_of(first.target.sharding)
    rows = []
    for name, some in times.items():
        some = some[1:]  # the first ones are slower than all others
        drafter, batch = jobs[name].drafter, config.decode.batch_size
        ideal = roofline.target_work(
            first.target, batch=batch, rows=drafter.block_size, context=context,
            kv_dtype=config.decode.kv_dtype,
        ).ideal_ms(machine)  # fmt: skip
        ideal += roofline.draft_work(first.target, drafter, batch=batch).ideal_ms(machine)
        columns = [statistics.median(column) for column in zip(*some, strict=True)]
        ratios = [whole / (draft + verify) for whole, draft, verify in some]
        rows.append(
            {
                "strategy": name,
                "rows": drafter.block_size,
                **dict(zip(("cycle_ms", "draft_ms", "verify_ms"), columns, strict=True)),
                "cycle_over_parts": statistics.median(ratios),
                "roofline_ms": ideal,
            }
        )
    lines = {
        key: ([row["rows"] for row in rows], [row[f"{key}_ms"] for row in rows])
        for key in ("cycle", "draft", "verify", "roofline")
    }
    notes = [f"context {context} tokens, batch {config.decode.batch_size}", machine_note(machine)]
    return StudyResult(
        "A cycle beside its parts", rows, lines, "rows", "milliseconds", ("roofline",), False, notes
    )


def verify(config: BenchmarkRun) -> StudyResult:
    """Is verification flat in its rows?"""
    only_target = dataclasses.replace(config, strategies={})
    job = next(iter(_loaded(benches.prepare_models(only_target)).values()))
    contexts = _contexts(config, {"": job}, CONTEXTS)
    counts = config.study.values or ROWS
    engines = {count: _rows_engine(config, job, count, max(counts), contexts) for count in counts}
    state = engines[counts[0]].standing(contexts[0])
    times: dict[tuple[int, int], list[float]] = {}
    for _ in range(1 + config.study.repeats):
        for context in contexts:
            for count, engine in engines.items():
                state = engine.at_length(state, context)
                seconds, (state, report) = seconds_of(engine.generate, state)
                taken = 1e3 * seconds / max(int(report.cycles), 1)
                times.setdefault((context, count), []).append(taken)
    machine = roofline.machine_of(job.target.sharding)
    batch = config.decode.batch_size
    rows, lines = [], {}
    for context in contexts:
        middle = {count: statistics.median(times[context, count][1:]) for count in counts}
        lines[f"context {context}"] = (list(middle), list(middle.values()))
        ideals = {}
        for count, taken in middle.items():
            work = roofline.target_work(
                job.target, batch=batch, rows=count, context=context,
                kv_dtype=config.decode.kv_dtype,
            )  # fmt: skip
            ideals[count] = work.ideal_ms(machine)
            rows.append(
                {
                    "context": context,
                    "rows": count,
                    "verify_ms": taken,
                    "over_one_row": taken / middle[counts[0]],
                    "roofline_ms": ideals[count],
                    "over_roofline": taken / ideals[count],
                }
            )
        lines[f"roofline, context {context}"] = (list(ideals), list(ideals.values()))
    dashed = [name for name in lines if name.startswith("roofline")]
    notes = [
        f"batch {batch}; over_one_row compares with {counts[0]} row(s) at the same context",
        f"the ridge of two-byte weights is at {machine.ridge_rows:.0f} rows in all",
        machine_note(machine),
    ]
    title = "Cost of verification by rows"
    return StudyResult(title, rows, lines, "rows per sequence", "milliseconds", dashed, True, notes)


def draft(config: BenchmarkRun) -> StudyResult:
    """What a draft costs by block size."""
    sizes = config.study.values or BLOCK_SIZES
    variants = {}
    for name, drafter in config.strategies.items():
        for size in sizes:
            variants[f"{name} {size}"] = with_block_size(name, drafter, size)
    jobs = _loaded(benches.prepare_models(dataclasses.replace(config, strategies=variants)))
    first = next(iter(jobs.values()))
    contexts = _contexts(config, jobs, DRAFT_CONTEXTS)
    machine = roofline.machine_of(first.target.sharding)
    rows, lines = [], {}
    for context in contexts:
        probes = {}
        for label in variants:
            job = jobs[label]
            engine = _engine(config, job.target, job.drafter, context)
            probes[label] = Probe(engine, engine.standing(context))
        times = {label: [] for label in probes}
        for _ in range(1 + config.study.repeats):
            for label, probe in probes.items():
                times[label].append(probe.draft_ms())
        for name in config.strategies:
            middle = {size: statistics.median(times[f"{name} {size}"][1:]) for size in sizes}
            lines[f"{name}, context {context}"] = (list(middle), list(middle.values()))
            for size, taken in middle.items():
                work = roofline.draft_work(
                    first.target, jobs[f"{name} {size}"].drafter, batch=config.decode.batch_size
                )
                ideal = work.ideal_ms(machine)
                rows.append(
                    {
                        "strategy": name,
                        "context": context,
                        "block_size": size,
                        "draft_ms": taken,
                        "roofline_ms": ideal,
                        "over_roofline": taken / ideal,
                    }
                )
    ideals = {row["block_size"]: row["roofline_ms"] for row in rows}
    lines["roofline"] = (list(ideals), list(ideals.values()))
    notes = [f"batch {config.decode.batch_size}", machine_note(machine)]
    title = "Cost of a draft by block size"
    return StudyResult(title, rows, lines, "block size", "milliseconds", ("roofline",), True, notes)


def with_block_size(name: str, drafter, size: int):
    """A drafter's config with another block; random weights are made for at least that block.

    Raises:
      ConfigError: the strategy has no such key.
    """
    if not hasattr(drafter, "block_size"):
        raise errors.ConfigError(
            f"strategies.{name}: drafter {drafter.name!r} has no block_size to vary; leave it out"
        )
    shape = drafter.architecture
    trained = getattr(shape, "block_size", size)
    if drafter.checkpoint == assembly.RANDOM and shape is not None and trained < size:
        shape = dataclasses.replace(shape, block_size=size)
    return dataclasses.replace(drafter, block_size=size, architecture=shape)


def _loaded(jobs: dict[str, Job]) -> dict[str, Job]:
    """Reads all weights, the target's once."""
    first = next(iter(jobs.values()))
    sharding = first.target.sharding
    weights.load(first.target, first.target_source, sharding)
    for job in jobs.values():
        weights.load(job.drafter, job.drafter_source, sharding)
    return jobs


def _contexts(config: BenchmarkRun, jobs: dict[str, Job], usual: Iterable[int]) -> tuple[int, ...]:
    """The contexts asked for; of the usual ones, those that the target was made for.

    Raises:
      ConfigError: one that was asked for is beyond the target.
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
    """An engine with room for a context and one dispatch of fully accepted cycles."""
    room = context + (config.decode.sync_every + 1) * drafter.block_size
    return MeasuredEngine(target, drafter, config.decode, max_length=room)


def _rows_engine(
    config: BenchmarkRun, job: Job, count: int, most: int, contexts: tuple[int, ...]
) -> MeasuredEngine:
    """An engine that verifies `count` rows; all of them lay out their caches alike."""
    batch, drafts = config.decode.batch_size, count - 1
    form = types.SimpleNamespace(
        feature_layers=(), num_draft_tokens=drafts, has_probs=False, longest_path=count
    )
    tokens = jnp.broadcast_to(jnp.arange(drafts) % job.target.arch.vocab_size, (batch, drafts))
    room = max(contexts) + (config.decode.sync_every + 1) * most - count
    canned = Canned(Proposal(tokens.astype(jnp.int32)), form)
    return MeasuredEngine(job.target, canned, config.decode, max_length=room)
