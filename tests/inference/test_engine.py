"""Tests of the engine's programs and calls."""

import jax
import numpy as np
import pytest
from support.engines import decode, engine, random_prompts
from support.models import drafter

from dflash.inference.engine import Slot

COMPILATION = "/jax/core/compile/backend_compile_duration"


@pytest.fixture(scope="module")
def compiled():
    run = engine(drafter("dflash", block_size=3), batch_size=2, max_length=50, stop_ids=(9, 4, 9))
    told = []
    run.compile([3, 33], lambda name, seconds: told.append((name, seconds)))
    return run, told


def test_programs_are_few_and_known_beforehand(compiled):
    run, told = compiled
    names = [" ".join(map(str, key)) for key in run.program_names([3, 33])]
    per_bucket = [f"{kind} {b}" for b in (16, 64) for kind in ("new_prefix", "prefill", "insert")]
    assert names == ["new_state", *per_bucket, "generate", "release"]
    assert [name for name, _ in told] == names
    assert all(seconds >= 0 for _, seconds in told)
    assert run.program_names(range(1, 17)) == run.program_names([16])


def test_nothing_compiles_once_compiled(compiled):
    run, _ = compiled
    compilations = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, seconds, **_: compilations.append(event) if event == COMPILATION else None
    )
    jax.jit(lambda x: x + 1)(np.float32(1))
    assert compilations, "compilations are not being counted"
    compilations.clear()
    done = decode(run, random_prompts([3, 40, 16]), [5, 9, 1])
    assert [one.index for one in done] == [0, 1, 2]
    assert compilations == []


def test_stop_ids_are_a_set(compiled):
    assert compiled[0].stop_ids == (4, 9)


@pytest.mark.parametrize("length", [0, 50])
def test_a_prompt_must_fit(compiled, length):
    with pytest.raises(ValueError, match=f"prompt of {length} tokens, expected 1 to 49"):
        compiled[0].prefill((1,) * length)


@pytest.mark.parametrize("pages", [0, 2, 5])
def test_a_slot_must_own_the_pages_of_its_sequence(compiled, pages):
    run, _ = compiled
    slot, prefix = Slot(1, tuple(range(1, 1 + pages))), run.prefill((1, 2))
    with pytest.raises(ValueError, match=f"slot 1 has {pages} pages; 40 tokens take 3, a sequ"):
        run.insert(run.new_state(), prefix, slot, 40)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33, 48])
def test_what_prefill_holds_does_not_depend_on_bucket_and_chunks(compiled, length):
    """A prompt's rows are the same within a prompt that is longer by a token."""
    run, _ = compiled
    (prompt,) = random_prompts([length])
    prefix = run.prefill(prompt)
    assert prefix.length.tolist() == [length]
    longer = run.prefill((*prompt, int(prefix.anchor[0])))
    for mine, theirs in zip(rows(prefix, length), rows(longer, length), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


def rows(prefix, count: int) -> list[np.ndarray]:
    """The first rows of every layer's keys and values, each [K, count, H]."""
    leaves = map(np.asarray, jax.tree.leaves(prefix.cache.layers))
    return [
        pages[:, 1:].reshape(pages.shape[0], -1, pages.shape[-1])[:, :count] for pages in leaves
    ]
