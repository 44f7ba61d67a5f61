"""Study of verification: how its cost depends on the number of rows and on the context."""

import dataclasses
import functools
import statistics
import types
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from dflash import errors
from dflash.config.benchmark_schema import BenchmarkRun, StudyConfig
from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Proposal
from dflash.loading.job import Job
from dflash.measure import bench as benches
from dflash.measure import roofline, warnings
from dflash.measure.engine import MeasuredEngine, seconds_of
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


def verify(config: BenchmarkRun) -> Iterator[Step]:
    """Measures how the cost of verification depends on the number of rows."""
    (job,) = benches.prepare_models(dataclasses.replace(config, strategies={})).values()
    job.load_weights()
    contexts, counts = _contexts(config.study, job.target), config.study.values or ROWS
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
        sizes = {"batch": decode.batch_size, "rows": count, "context": context}
        work = roofline.target_work(target, **sizes, kv_dtype=decode.kv_dtype)
        least_ms = work.ideal_ms(machine)
        row = {
            "context": context,
            "rows": count,
            "verify_ms": verify_ms,
            "over_one_row": verify_ms / medians[context, counts[0]],
            "roofline_ms": least_ms,
            "over_roofline": verify_ms / least_ms,
        }
        rows.append(with_warnings(row, warnings.of_forward("verification", verify_ms, least_ms)))
    lines = []
    for context in contexts:
        name, shown = f"context {context}", [row for row in rows if row["context"] == context]
        flagged = [bool(row[warnings.KEY]) for row in shown]
        least = [row["roofline_ms"] for row in shown]
        lines += [
            Line(name, counts, [row["verify_ms"] for row in shown], flagged=flagged),
            Line(f"its roofline ({name})", counts, least, roofline_of=name),
        ]
    notes = [
        f"batch {decode.batch_size}; over_one_row compares with {counts[0]} row(s) at the "
        "same context",
        machine_note(machine),
    ]
    title, x = "Cost of verification by rows", "rows per sequence"
    return StudyResult(title, rows, lines, x, "milliseconds", log=True, notes=notes)


def _contexts(study: StudyConfig, target: Decoder) -> tuple[int, ...]:
    """Returns the contexts of the config, or those of the default ones that the target supports.

    Raises:
      ConfigError: A context in the config is longer than the target supports.
    """
    longest = target.arch.max_position_embeddings
    beyond = [context for context in study.contexts if context > longest]
    if beyond:
        raise errors.ConfigError(
            f"study.contexts: {beyond[0]} exceeds the {longest} positions that the target supports"
        )
    return study.contexts or tuple(context for context in CONTEXTS if context <= longest)


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
