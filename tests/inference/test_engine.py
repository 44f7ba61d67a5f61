import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.engines import (
    count_compilations,
    decode,
    make_requests,
    occupied,
    random_prompts,
    shared_engine,
    with_programs,
)
from support.models import drafter, make_architecture

from dflash.inference.pages import Slot
from dflash.inference.prefill import GREEDY, PrefillChunk
from dflash.inference.request import Request


@pytest.fixture(scope="module")
def compiled():
    """The shared engine, of which two programs were missing, and the progress of compiling them."""
    base, told = shared_engine("dflash"), []
    run = with_programs(base, base.program_names([3, 33])[:-2])
    run.compile([3, 33], lambda ready, total: told.append((ready, total)))
    return run, told


def test_programs_are_few_and_known_beforehand(compiled):
    run, told = compiled
    names = ["-".join(map(str, key)) for key in run.program_names([3, 33])]
    first = "new_state new_prefill_state prefill-16 unconstrained-1 insert generate release"
    assert names == [*first.split(), "set_pages", "new_context", "store", "restore"]
    assert told == [(0, 2), (1, 2), (2, 2)]
    assert run.program_names(range(1, 17)) == run.program_names([16])


def test_nothing_compiles_once_compiled(compiled):
    run, told = compiled
    before = list(told)
    run.compile([3, 33], lambda ready, total: told.append((ready, total)))
    assert told == before, "there was nothing left to tell"
    prompts = random_prompts([3, 40, 16])
    with count_compilations() as compilations:
        greedy = decode(run, prompts, [5, 9, 1])
        other = {"temperature": 0.9, "top_k": 5, "top_p": 0.7, "seed": 3, "stop_ids": (9, 4, 9)}
        drawn = decode(run, prompts, [4, 8, 2], **other)
    assert [one.id for one in (*greedy, *drawn)] == [0, 1, 2, 0, 1, 2]
    assert compilations == []


@pytest.mark.parametrize("length", [0, 96])
def test_a_prompt_must_fit(compiled, length):
    run, _ = compiled
    with pytest.raises(ValueError, match=f"prompt of {length} tokens, expected 1 to 95"):
        run.admit(run.new_state(), Slot(0, (1, 2, 3)), Request(0, (1,) * length, 1))


@pytest.mark.parametrize("length", [0, 17])
def test_a_piece_is_at_most_a_chunk(compiled, length):
    run, _ = compiled
    piece = PrefillChunk.of((1,) * 40, 0, length, Slot(0, (1, 2, 3)), GREEDY, fresh=True)
    with pytest.raises(
        ValueError, match=f"chunks of {length} to {length} tokens, expected 1 to 16"
    ):
        run.prefill(run.new_state(), run.new_prefill_state(), {0: piece})


def test_a_sequence_that_comes_back_continues_from_what_it_had_said(compiled):
    """Whatever a prefill would draw."""
    run, _ = compiled
    slot = Slot(1, run.layout.standing_pages(1))
    drawn = int(run.admit(run.new_state(), slot, Request(0, (1, 2), 30)).anchor[1])
    other = (drawn + 1) % run.vocab_size
    for stop_ids, active in (((), True), ((other,), False), ((drawn,), True)):
        request = Request(0, (1, 2), 30, stop_ids=stop_ids)
        state = run.admit(run.new_state(), slot, request, (other,))
        assert int(state.anchor[1]) == other
        assert int(state.length[1]) == 3
        assert bool(state.active[1]) == active


def test_the_device_decides_whether_the_first_token_is_the_last(compiled):
    run, _ = compiled
    slot = Slot(1, run.layout.standing_pages(1))
    drawn = int(run.admit(run.new_state(), slot, Request(0, (1, 2), 30)).anchor[1])
    for request, active in (
        (Request(0, (1, 2), 2), True),
        (Request(0, (1, 2), 1), False),
        (Request(0, (1, 2), 9, stop_ids=(drawn,)), False),
    ):
        state = run.admit(run.new_state(), slot, request)
        assert (int(state.anchor[1]), bool(state.active[1])) == (drawn, active)


def test_other_weights_must_be_of_the_same_shapes(compiled):
    run, _ = compiled
    with pytest.raises(ValueError, match="differ in shape or dtype"):
        run.set_drafter(drafter("dflash", block_size=4, arch=make_architecture(hidden_size=64)))


def test_a_program_of_ones_own(compiled):
    """It reads the models and the state, and may hand a changed state on."""
    run, _ = compiled
    run.add_program("lengths", lambda target, drafter, state: state.length + 1)
    run.add_program("longer", lambda target, drafter, state: (replace_length(state, 7), 5))
    state = run.new_state()
    assert run.run("lengths", state).tolist() == [2] * 5
    longer, five = run.run("longer", state)
    assert (longer.length.tolist(), int(five)) == ([7] * 5, 5)
    assert state.anchor.is_deleted(), "a program that returns a state consumes the one before"


def test_an_empty_slot_asks_for_nothing(compiled):
    """A released slot must not keep a greedy batch drawing noise, nor hold pages."""
    run, _ = compiled
    state = occupied(run, make_requests(random_prompts([3, 4]), 9, temperature=0.8))
    state = run.release(state, 0)
    assert np.flatnonzero(state.active).tolist() == [1]
    assert state.sampling.temperature[1] > 0
    assert state.cache.page_table[1].any()
    state = run.release(state, 1)
    assert not state.active.any()
    assert not state.sampling.temperature.any()
    assert not state.cache.page_table.any()


def replace_length(state, length: int):
    return dataclasses.replace(state, length=jnp.full_like(state.length, length))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_what_a_prompt_leaves_does_not_depend_on_its_chunks(compiled, length):
    """A prompt's rows are the same within a prompt that is longer by a token."""
    run, _ = compiled
    (prompt,) = random_prompts([length])
    slot = Slot(1, run.layout.standing_pages(1))
    state = run.admit(run.new_state(), slot, Request(0, prompt, 1))
    assert int(state.length[1]) == length + 1
    mine = rows(state, slot, length)
    longer = run.admit(run.new_state(), slot, Request(0, (*prompt, int(state.anchor[1])), 1))
    for one, other in zip(mine, rows(longer, slot, length), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def rows(state, slot: Slot, count: int) -> list[np.ndarray]:
    """A slot's first rows of every layer's keys and values, target and drafter: [K, count, H]."""
    leaves = [np.asarray(pool)[:, list(slot.pages)] for pool in state.cache.pools]
    leaves += [np.asarray(leaf)[slot.index] for leaf in jax.tree.leaves(state.drafter)]
    return [leaf.reshape(leaf.shape[0], -1, leaf.shape[-1])[:, :count] for leaf in leaves]
