"""Tests of decoding with a block size chosen for every cycle, through the engine."""

import functools

import numpy as np
import pytest
from support.engines import (
    decode,
    engine,
    expected,
    make_requests,
    occupied,
    random_prompts,
    redrafted,
)
from support.models import drafter
from support.scripted_drafter import Script, ScriptedDrafter

from dflash.compiler import hlo
from dflash.drafters.none import NoDrafter
from dflash.inference.cycle import backlog
from dflash.inference.cycle.choice import POOL_MEMORY, only
from dflash.inference.engine import Engine

LENGTH = 128  # positions that a script covers
SIZES = (1, 2, 4, 8)
# Drafting costs half a plain cycle, each further row a tenth: worth it, if drafts are any good.
SECONDS = (1.0, 1.6, 1.8, 2.2)
PROMPTS = random_prompts([1, 16, 9, 17, 5, 2])


def whole_rows(run: Engine, seconds) -> np.ndarray:
    """A table by which all sequences verify the same number of rows."""
    seconds = np.atleast_2d(seconds)
    others = len(run.rules.choices) - seconds.shape[1]
    return np.pad(seconds, ((0, 0), (0, others)), constant_values=np.inf)


@functools.cache
def scripted_engine(batch_size: int) -> Engine:
    blank = ScriptedDrafter(Script.chain(LENGTH, 7, True), [()] * 6, tree=False)
    run = engine(blank, batch_size=batch_size, sync_every=5, max_length=64, adaptive_blocks=True)
    return run


def decode_scripted(
    wrong, limits, *, batch_size: int, temperature: float, index: int, seconds=SECONDS
):
    """Completions of a drafter that is wrong where the script says; their tokens are checked."""
    how = {"temperature": temperature, "first_index": index}
    whole = expected(PROMPTS, [32] * len(PROMPTS), **how)
    texts = [(*prompt, *ids) for prompt, (ids, _) in zip(PROMPTS, whole, strict=True)]
    model = ScriptedDrafter(Script.chain(LENGTH, 7, wrong), texts, tree=False)
    run = redrafted(scripted_engine(batch_size), model)
    run.cycle_seconds = whole_rows(run, seconds)
    done = decode(run, PROMPTS, limits, **how)
    wanted = expected(PROMPTS, limits, **how)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    for one in done:
        pairs = zip(one.acceptance_lengths, one.block_sizes, strict=True)
        assert all(1 <= length <= size for length, size in pairs)
    return done


def sizes_of(done) -> list[int]:
    return [size for one in done for size in one.block_sizes]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_drafter_that_is_always_wrong_is_left_alone(batch_size, temperature):
    limits = [32] * 6
    done = decode_scripted(
        True, limits, batch_size=batch_size, temperature=temperature, index=batch_size
    )
    sizes = sizes_of(done)
    assert set(sizes) <= set(SIZES)
    assert sizes.count(1) > 0.9 * len(sizes)
    assert max(sizes) > 1, "nothing was ever tried"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch_size", [1, 5])
def test_a_drafter_that_is_always_right_gets_the_largest_block(batch_size, temperature):
    limits = [32, 25, 32, 18, 32, 32]
    done = decode_scripted(
        False, limits, batch_size=batch_size, temperature=temperature, index=10 + batch_size
    )
    for one in done:
        # The last tokens before the limit need no whole block.
        assert set(one.block_sizes[:-1]) == {8}
        assert set(one.acceptance_lengths[:-1]) == {8}


@pytest.mark.parametrize(("wrong_until", "index"), [(14, 40), (18, 50)])
def test_a_drafter_that_comes_right_later_remembers_all_it_missed(wrong_until, index):
    """A scripted drafter drafts wrongly if a single row of its memory is.

    It comes right while there is text enough left for a trial, which takes little.
    """
    wrong = np.arange(LENGTH)[:, None] < wrong_until
    done = decode_scripted(
        wrong, [32] * 6, batch_size=5, temperature=0.8, index=index, seconds=(1.0, 1.4, 1.8, 2.2)
    )
    late = [length for one in done for length in one.acceptance_lengths if length > 1]
    assert late, "drafting was never taken up again"
    assert 1 in sizes_of(done)


def test_rows_that_cost_less_beside_long_contexts_are_drafted_there():
    """A block costs 24 times a plain cycle after 8 tokens, and not twice as much after 32."""
    table = [[1.0, 90.0, 90.0, 24.0], [13.0, 90.0, 90.0, 24.0]]
    options = {"batch_size": 1, "temperature": 0.0, "index": 90}
    (one, *_) = decode_scripted(False, [32] * 6, **options, seconds=table)
    trial, *sizes = one.block_sizes
    assert trial == 8, "the first trial has the size that promises most"
    first = sizes.index(8)
    length = len(PROMPTS[0]) + 1 + sum(one.acceptance_lengths[: first + 1])
    assert 12 < length < 28
    assert set(sizes[:first]) == {1}
    assert sizes[first : first + 2] == [8, 8]


def test_a_run_begins_with_what_the_run_before_has_found_out():
    wrong = ScriptedDrafter(Script.chain(LENGTH, 7, True), [()] * 6, tree=False)
    run = redrafted(scripted_engine(1), wrong)
    run.cycle_seconds = whole_rows(run, SECONDS)
    first, *_, last = (sizes_of(decode(run, PROMPTS[:1], 32)) for _ in range(4))
    drafted = [sum(size > 1 for size in sizes) for sizes in (first, last)]
    assert drafted[0] > 3, "a stranger is given a chance"
    assert drafted[1] <= 1, "and not every time anew"


def test_it_learns_from_each_cycle_what_the_room_before_it_allowed():
    """The rates of the pool follow from what cycles committed, their sizes and the room they had.

    The sequence ends at its limit, soon after a refused draft: had the room after a cycle counted,
    that refusal would have taught nothing.
    """
    prompt, limit = PROMPTS[1], 13
    ((ids, _),) = expected([prompt], [32], temperature=0.0)
    wrong = np.zeros((LENGTH, 8), bool)
    wrong[:, 2:] = True  # two drafts are right in every cycle
    model = ScriptedDrafter(
        Script.chain(LENGTH, 7, wrong), [(*prompt, *ids)] + [()] * 5, tree=False
    )
    run = redrafted(scripted_engine(1), model)
    state = occupied(run, make_requests([prompt], limit))
    tried, accepted = np.array(state.choice.pool.tried), np.zeros(7)
    assert not tried.any(), "it begins with what an earlier run has found out"
    left, cycles = limit - 1, []
    while state.active[0]:
        state, report = run.generate(state)
        for i in range(int(report.cycles)):
            cycles.append((int(report.num_committed[i, 0]), int(report.block_sizes[i, 0])))
    for committed, size in cycles:
        useful = min(size - 1, committed - 1 + (committed < left))
        now = (np.arange(7) < useful).astype(float)
        fade = (1 - 1 / POOL_MEMORY) ** now[0]
        tried = tried * fade + now
        accepted = accepted * fade + now * (np.arange(7) < committed - 1)
        left -= committed
    assert left == 0
    np.testing.assert_allclose(state.choice.pool.tried, tried, rtol=1e-5)
    np.testing.assert_allclose(state.choice.pool.accepted, accepted, rtol=1e-5)
    assert tried[2] > accepted[2] == 0, "no refused draft has taught anything"


def test_a_backlog_is_observed_only_where_it_is_cleared():
    """XLA may move work that no iteration changes out of a loop, where it would always be done."""
    run = engine(drafter("dflash"), batch_size=1, adaptive_blocks=True)
    module = hlo.parse(run.program("generate").as_text())
    # The body of the outer loop: one loop per choice, and one that clears the backlog.
    (turn,) = (
        computation.instructions
        for computation in module.computations.values()
        if sum(one.opcode == "while" for one in computation.instructions) > len(run.rules.choices)
    )
    work = {"dot", "fusion", "custom-call"}
    assert not [one.name for one in turn if "/drafter/" in one.op_name and one.opcode in work]


def test_long_plain_stretches_fill_the_backlog():
    """More plain cycles in a row than rows can be put aside."""
    run = engine(
        drafter("dflash"),
        batch_size=2,
        sync_every=16,
        max_length=96 + backlog.ROWS,
        adaptive_blocks=True,
    )
    run.cycle_seconds = (1.0, *[60.0] * (len(run.rules.choices) - 1))
    limit = 2 * backlog.ROWS + 9
    done = decode(run, PROMPTS[:3], limit)
    plain = decode(
        engine(NoDrafter(), batch_size=2, max_length=96 + backlog.ROWS), PROMPTS[:3], limit
    )
    assert [one.output_ids for one in done] == [one.output_ids for one in plain]
    assert all(set(one.block_sizes[1:]) == {1} for one in done), "only the first cycle is a trial"


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("dflash", 1), ("dflash", 3), ("autoregressive", 5), ("dspark", 3), ("ngram", 3)],
)
def test_output_is_that_of_plain_decoding(name, batch_size):
    """With a real drafter; with the table that is measured in one case, which compiles more."""
    model = drafter(name, block_size=3)
    run = engine(model, batch_size=batch_size, max_length=64, adaptive_blocks=True)
    if (name, batch_size) != ("dflash", 1):
        run.cycle_seconds = whole_rows(run, SECONDS[: len(run.block_sizes)])
    limits = [20, 9, 1, 18, 2, 23]
    for temperature in (0.0, 0.8):
        done = decode(run, PROMPTS, limits, temperature=temperature)
        wanted = expected(PROMPTS, limits, temperature=temperature)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted
        assert max(sizes_of(done)) <= 3
        if run.rules.choices.mean_rows:
            check_divided(run, limits, temperature)


def check_divided(run, limits, temperature):
    """Decodes with rows that are divided among sequences, with and without controls."""
    measured, first = run.cycle_seconds, len(run.block_sizes)
    run.cycle_seconds = tuple(only(first, len(run.rules.choices)).tolist())
    for options in ({}, {"presence_penalty": 1.5}):
        done = decode(run, PROMPTS, limits, temperature=temperature, logprobs=2, **options)
        wanted = expected(PROMPTS, limits, temperature=temperature, **options)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted
        assert len(set(sizes_of(done))) > 2, "all sequences verify as many rows"
    run.cycle_seconds = measured


def test_subtrees_of_different_sizes_are_verified_together():
    """Each sequence verifies the first drafts of its tree, which are a tree of whatever shape."""
    how, limits = {"temperature": 0.8, "first_index": 3}, [32, 20, 9, 1, 32, 30]
    wanted = expected(PROMPTS, [32] * 6, **how)
    texts = [(*prompt, *ids) for prompt, (ids, _) in zip(PROMPTS, wanted, strict=True)]
    script = Script.random_tree(LENGTH, 3, np.random.default_rng(1), depth=2)
    model = ScriptedDrafter(script, texts, tree=True, depth=2)
    run = engine(model, batch_size=3, sync_every=5, max_length=64, adaptive_blocks=True)
    run.cycle_seconds = tuple(only(len(run.block_sizes), len(run.rules.choices)).tolist())
    done = decode(run, PROMPTS, limits, **how)
    assert [(one.output_ids, one.finish_reason) for one in done] == expected(PROMPTS, limits, **how)
    pairs = [
        pair for one in done for pair in zip(one.acceptance_lengths, one.block_sizes, strict=True)
    ]
    assert all(length <= size for length, size in pairs)
    assert max(length for length, _ in pairs) == 3, "no path was accepted"
    assert len({size for _, size in pairs}) > 2, "all sequences verify as many rows"


def test_from_the_longest_context_on_sequences_decode_plainly():
    model = drafter("dflash", block_size=5)
    model.longest_context = 24
    run = engine(model, batch_size=2, max_length=64, adaptive_blocks=True)
    run.cycle_seconds = tuple(only(len(run.block_sizes), len(run.rules.choices)).tolist())
    limits = [20, 9, 1, 18, 2, 23]
    done = decode(run, PROMPTS, limits, temperature=0.0)
    wanted = expected(PROMPTS, limits, temperature=0.0)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    assert max(done[0].block_sizes) > 1
    long, length, late = done[3], len(PROMPTS[3]) + 1, []
    for count, size in zip(long.acceptance_lengths, long.block_sizes, strict=True):
        late += [size] * (length >= 24)
        length += count
    assert len(late) > 8
    assert set(late) == {1}
