"""Logits that are not finite end their sequence, and the message says where they began."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import failure
from support.engines import (
    completions,
    decode,
    drain,
    make_requests,
    outcomes,
    random_prompts,
    retargeted,
    shared_engine,
    without_prefix_cache,
)
from support.models import ARCHITECTURE, random_module

from dflash import errors
from dflash.inference.cycle import verify
from dflash.inference.engine import Engine
from dflash.inference.logits import nonfinite
from dflash.inference.scheduler import Scheduler
from dflash.models.dense import Qwen3
from dflash.parallel import parameters

PROMPTS = random_prompts([5, 9])


def make_target() -> Qwen3:
    return random_module(Qwen3, ARCHITECTURE)


@functools.cache
def sound_engine(name: str) -> Engine:
    return without_prefix_cache(retargeted(shared_engine(name), make_target()))


def damaged(name: str, path: str, value: float, at=...) -> Engine:
    """An engine that shares its programs, with a value in a tensor of its target."""
    target = make_target()
    param = dict(parameters.named_parameters(target))[path]
    param.set_value(param.get_value().at[at].set(value))
    return retargeted(sound_engine(name), target)


def message(run: Engine, **how) -> str:
    return failure(decode, run, PROMPTS, 12, kind=errors.NumericsError, **how)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("path", "at", "stage", "tensor"),
    [
        ("layers.1.mlp.down_proj.kernel", (3, 3), "layer 1 (of 0 to 1)", "layers.1.mlp.down_proj"),
        # A single column: all other logits are finite.
        ("lm_head.kernel", (slice(None), 7), "the output head", "lm_head"),
        ("norm.scale", 3, "the final norm", "norm"),
    ],
)
def test_a_tensor_with_a_nan_is_named(path, at, stage, tensor, temperature):
    said = message(damaged("none", path, jnp.nan, at), temperature=temperature)
    assert said.startswith(
        "prompt 0: the target's logits for token 1 of the output (position 5) are not finite; "
        f"the first that gives such values is {stage}: its weights are not: "
    )
    assert tensor in said.rpartition(": ")[2]


def test_weights_may_be_finite_and_their_products_not():
    said = message(damaged("none", "layers.0.mlp.up_proj.kernel", 3e38))
    assert "layer 0 (of 0 to 1): its weights are finite, so its values exceed float32" in said


def test_the_sequence_and_the_position_are_those_of_the_first_bad_token():
    """A token's embedding is damaged: all is well until it is said."""
    whole = decode(sound_engine("none"), PROMPTS, 12, temperature=0.8)
    # Of the second prompt, a token that neither prompt holds nor the first output.
    before = {*PROMPTS[0], *PROMPTS[1], *whole[0].output_ids}
    output = whole[1].output_ids
    place = next(i for i, token in enumerate(output) if i and token not in before)
    run = damaged("none", "embed_tokens.embedding", jnp.inf, output[place])
    said = message(run, temperature=0.8)
    assert said.startswith(
        f"prompt 1: the target's logits for token {place + 2} of the output "
        f"(position {9 + place + 1}) are not finite; the first that gives such values is "
        "the embedding: its weights are not: model.embed_tokens.weight"
    )


def test_a_row_counts_only_if_it_commits_a_token():
    """Rows past the accepted ones come of refused drafts; a tree's rows are those of its path."""
    logits = np.zeros((2, 3, 5), np.float32)
    logits[0, 2, 4], logits[1, 1, 0] = np.nan, np.inf
    picked = jnp.argmax(jnp.array(logits), axis=-1)
    finite = nonfinite.finite_rows(jnp.array(logits), picked)
    assert finite.tolist() == [[True, True, False], [True, False, True]]
    result = verify.VerifyResult(jnp.array([1, 1]), jnp.array([[0, 1], [0, 2]]), jnp.array([0, 0]))
    assert result.along(finite).tolist() == [[True, True], [True, True]]
    chain = result._replace(path=None)
    assert chain.along(finite).tolist() == finite.tolist()


@pytest.mark.parametrize("name", ["none", "dflash"])
def test_a_sequence_with_nonfinite_logits_ends_alone(name):
    """The others go on, and so do those that take its slot and its pages afterwards."""
    whole = decode(sound_engine(name), [*PROMPTS, PROMPTS[0]], 12)
    used = {token for prompt in PROMPTS for token in prompt}
    used |= {token for one in whole for token in one.output_ids}
    bad = next(token for token in range(ARCHITECTURE.vocab_size) if token not in used)
    run = damaged(name, "embed_tokens.embedding", jnp.inf, bad)
    prompts = [PROMPTS[0], (3, bad, 4), PROMPTS[1], (bad,), PROMPTS[0]]
    one = Scheduler(run)
    done = completions(drain(one, make_requests(prompts, 12)))
    assert [done[i].output_ids for i in (0, 2, 4)] == [each.output_ids for each in whole]
    assert all(done[i].error is None for i in (0, 2, 4))
    for i in (1, 3):
        assert (done[i].finish_reason, done[i].output_ids) == ("error", ())
        assert str(done[i].error).startswith(f"prompt {i}: the target's logits for token 1 of")
    assert one.stats().pages_used == 0


def test_rows_that_another_sequence_has_damaged_are_computed_again():
    run = sound_engine("none")
    whole = decode(run, PROMPTS, 12)
    one, events = Scheduler(run), []
    for request in make_requests(PROMPTS, 12):
        one.submit(request)
    while len(events) < 2:  # Until both prompts have their first token.
        events += one.step()
    state = one._batch.state
    pools = jax.tree.map(lambda pages: pages * jnp.nan, state.cache.layers)
    cache = dataclasses.replace(state.cache, layers=pools)
    one._batch.state = dataclasses.replace(state, cache=cache)
    done = completions(events + drain(one))
    assert outcomes(done) == outcomes(whole)
    assert [each.error for each in done] == [None, None]
