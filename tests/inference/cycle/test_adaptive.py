"""Tests of decoding with a block size chosen for every cycle, through the engine."""

import functools

import numpy as np
import pytest
from support.engines import (
    check_plain,
    decode,
    divide_always,
    engine,
    expected,
    random_prompts,
    redrafted,
)
from support.models import drafter
from support.scripted_drafter import Script, ScriptedDrafter

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
    return engine(blank, batch_size=batch_size, sync_every=5, max_length=64, adaptive_blocks=True)


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
    done = check_plain(run, PROMPTS, limits, **how)
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


def test_a_run_begins_with_what_the_run_before_has_found_out():
    wrong = ScriptedDrafter(Script.chain(LENGTH, 7, True), [()] * 6, tree=False)
    run = redrafted(scripted_engine(1), wrong)
    run.cycle_seconds = whole_rows(run, SECONDS)
    first, *_, last = (sizes_of(decode(run, PROMPTS[:1], 32)) for _ in range(4))
    drafted = [sum(size > 1 for size in sizes) for sizes in (first, last)]
    assert drafted[0] > 3, "a stranger is given a chance"
    assert drafted[1] <= 1, "and not every time anew"


@pytest.mark.parametrize(("name", "batch_size"), [("dflash", 1), ("ngram", 3)])
def test_output_is_that_of_plain_decoding(name, batch_size):
    """With a real drafter; with the table that is measured in one case, which compiles more."""
    model = drafter(name, block_size=2)
    run = engine(model, batch_size=batch_size, max_length=64, adaptive_blocks=True)
    if (name, batch_size) != ("dflash", 1):
        run.cycle_seconds = whole_rows(run, SECONDS[: len(run.block_sizes)])
    limits = [20, 9, 1, 18, 2, 23]
    for temperature in (0.0, 0.8):
        done = check_plain(run, PROMPTS, limits, temperature=temperature)
        assert max(sizes_of(done)) <= 2


def test_from_the_longest_context_on_sequences_decode_plainly():
    model = drafter("dspark", block_size=5)
    model.longest_context = 24
    run = engine(model, batch_size=2, max_length=64, adaptive_blocks=True)
    divide_always(run)
    limits = [20, 9, 1, 18, 2, 23]
    done = check_plain(run, PROMPTS, limits)
    assert max(done[0].block_sizes) > 1
    long, length, late = done[3], len(PROMPTS[3]) + 1, []
    for count, size in zip(long.acceptance_lengths, long.block_sizes, strict=True):
        late += [size] * (length >= 24)
        length += count
    assert len(late) > 8
    assert set(late) == {1}
