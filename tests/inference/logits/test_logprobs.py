"""Log-probabilities, and plain decoding under controls, against one forward over the whole text."""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from support.engines import logits_before, make_requests, random_prompts, shared_engine
from support.models import make_sampling, target

from dflash.inference.logits import logprobs
from dflash.inference.request import RequestOutput, Tokens
from dflash.offline import decoding

PROMPTS = random_prompts([5, 17, 9, 33])
ASKED = [3, None, 0, 20]  # likeliest tokens that each prompt asks for


def run(form: str):
    return shared_engine("none" if form == "none" else "dflash", tree=form == "tree")


def decode(form: str, **how):
    """Completions, and all that was told of each request."""
    requests = make_requests(PROMPTS, 20, each=[{"logprobs": asked} for asked in ASKED], **how)
    done, told = {}, {i: [] for i in range(len(PROMPTS))}
    for event in decoding.decode(run(form), requests):
        if isinstance(event, RequestOutput):
            done[event.id] = event
        elif isinstance(event, Tokens):
            assert len(event.logprobs) == (0 if ASKED[event.id] is None else len(event.ids))
            told[event.id] += event.logprobs
    return done, told


@pytest.mark.parametrize("how", [{}, {"temperature": 0.9, "top_k": 5, "presence_penalty": 1.0}])
@pytest.mark.parametrize("form", ["none", "chain", "tree"])
def test_they_are_those_of_one_forward(form, how):
    """Of the raw logits, whatever a token was drawn from; the first token's too."""
    done, told = decode(form, **how)
    for i, prompt in enumerate(PROMPTS):
        if ASKED[i] is None:
            assert told[i] == []
            continue
        ids = done[i].output_ids
        logits = logits_before(target(), prompt, ids)
        wanted = scipy.special.log_softmax(logits, axis=-1)
        assert len(told[i]) == len(ids) == 20
        for token, row, found in zip(ids, wanted, told[i], strict=True):
            assert found.logprob == pytest.approx(row[token], abs=1e-4)
            assert len(found.top_ids) == len(found.top_logprobs) == ASKED[i]
            best = np.sort(row)[::-1][: ASKED[i]]
            np.testing.assert_allclose(found.top_logprobs, best, atol=1e-4)
            np.testing.assert_allclose(row[list(found.top_ids)], best, atol=1e-4)
        drawn = under_sampling(logits, ids, **how)
        np.testing.assert_allclose([found.sampled_logprob for found in told[i]], drawn, atol=1e-4)


def under_sampling(logits, ids, *, temperature=1.0, top_k=None, presence_penalty=0.0):
    """Log-probabilities of tokens under the distribution that they were drawn from, by hand."""
    found = []
    for place, row in enumerate(logits.astype(np.float64)):
        row[list(set(ids[:place]))] -= presence_penalty
        row /= temperature
        kept = np.sort(row)[-top_k:] if top_k else row
        found.append(row[ids[place]] - np.log(np.exp(kept).sum()))
    return found


def test_a_small_vocabulary_has_fewer_likeliest_tokens():
    logits = jnp.log(jnp.array([[[0.5, 0.2, 0.3]]]))
    params = make_sampling([0.0])
    ids, wanted = jnp.array([[2]]), jnp.array([True])
    found = logprobs.of_tokens(lambda: (logits, logits), params, ids, wanted, logits.shape[-1])
    assert found.top_ids.tolist() == [[[0, 2, 1]]]
    assert float(found.drawn[0, 0]) == pytest.approx(np.log(0.3), abs=1e-6)


def test_plain_decoding_under_controls_is_what_one_forward_says():
    """The baseline itself: a greedy token is the largest of the logits, shaped by hand."""
    how = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3}
    done, _ = decode("none", logit_bias=((4, 1.5),), min_new_tokens=6, stop_ids=(0, 4), **how)
    for i, prompt in enumerate(PROMPTS):
        ids = done[i].output_ids
        assert len(ids) > 6
        for place, row in enumerate(logits_before(target(), prompt, ids).astype(np.float64)):
            said = list(ids[:place])
            row[4] += 1.5
            for token in {*prompt, *said}:
                row[token] = row[token] / 1.3 if row[token] > 0 else row[token] * 1.3
            for token in set(said):
                row[token] -= 0.7 + 0.3 * said.count(token)
            if place < 6:
                row[[0, 4]] = -np.inf
            assert row[ids[place]] > row.max() - 1e-4, (i, place)
