"""Differences of outputs: what rounding explains, and faults that were planted."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import (
    decode,
    decode_all,
    engine,
    expected,
    logits_before,
    make_requests,
    random_prompts,
)
from support.models import drafter, make_target, target

from dflash.config import schema
from dflash.inference import difference
from dflash.layers.cache import PagedCache

CONFIG = schema.DecodeConfig(page_size=16)
(PROMPT,) = random_prompts([11])
((OUTPUT, _),) = expected([PROMPT], [16])


def explain(drafted, model=None, plain=OUTPUT, **how):
    (request,) = make_requests([PROMPT], 16, **how)
    return difference.explain(model or target(), CONFIG, request, plain, drafted)


def test_equal_outputs_have_no_difference():
    assert explain(OUTPUT) is None


@pytest.mark.parametrize("position", [0, 9])
def test_the_gap_is_that_of_the_logits(position):
    logits = logits_before(target(), PROMPT, OUTPUT)[position]
    other = int(np.argsort(logits)[-2])
    found = explain((*OUTPUT[:position], other, *OUTPUT[position + 1 :]))
    assert (found.position, found.tokens) == (position, (OUTPUT[position], other))
    assert found.gap == pytest.approx(logits.max() - logits[other], abs=1e-5)
    assert found.unit == pytest.approx(np.spacing(logits.max()))
    assert found.is_fault
    assert f"a fault: {found.gap:.2g} nats" in str(found)


def test_drawn_tokens_are_told_apart_by_their_noise():
    """The plain token beats all others by its score, though not always by its logit."""
    how = {"temperature": 0.8, "seed": 3}
    ((plain, _),) = expected([PROMPT], [16], **how)
    logits = logits_before(target(), PROMPT, plain)
    drawn = next(i for i, token in enumerate(plain) if token != logits[i].argmax())
    likeliest = int(logits[drawn].argmax())
    found = explain((*plain[:drawn], likeliest), plain=plain, **how)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), len(PROMPT) + drawn)
    scores = logits[drawn] + 0.8 * np.asarray(jax.random.gumbel(key, logits[drawn].shape))
    assert scores.argmax() == plain[drawn]
    assert found.gap == pytest.approx(scores.max() - scores[likeliest], abs=1e-5)


def test_penalties_and_biases_count():
    """A bias that makes the second likeliest token nearly as likely makes a near tie."""
    logits = logits_before(target(), PROMPT, OUTPUT)[0]
    first, second = np.argsort(logits)[[-1, -2]]
    bias = float(np.nextafter(np.float32(logits[first] - logits[second]), np.float32(0)))
    found = explain((int(second),), logit_bias=((int(second), bias),))
    assert not found.is_fault
    assert "near tie (" in str(found)
    assert "ulp of float32)" in str(found)


def test_an_output_that_ends_early_is_a_fault():
    found = explain(OUTPUT[:5])
    assert (found.position, found.tokens) == (5, (OUTPUT[5], None))
    assert found.is_fault
    assert str(found) == f"token 6 is the end, plain decoding has {OUTPUT[5]}: a fault"


def test_a_token_that_cannot_be_drawn_is_a_fault():
    second, third = np.argsort(logits_before(target(), PROMPT, OUTPUT)[0])[[-2, -3]].tolist()
    found = explain((third,), plain=(second,), temperature=0.8, seed=3, top_k=2)
    assert str(found) == f"token 1 is {third}, plain decoding has {second}: a fault"


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_planted_fault_is_no_near_tie(kv_dtype):
    """Scales of the final norm that are wrong by half."""
    model = make_target(dtype=jnp.bfloat16)
    graph, weights = nnx.split(model)
    wrong = nnx.merge(graph, jax.tree.map(lambda x: x, weights))
    scale = wrong.norm.scale.get_value()
    wrong.norm.scale.set_value(scale.at[::2].multiply(1.5))
    prompts = random_prompts([9, 12, 7, 10])
    plain, other = (
        decode(engine(on=each, kv_dtype=kv_dtype, batch_size=4), prompts, 12)
        for each in (model, wrong)
    )
    pairs = [
        (request, one.output_ids, two.output_ids)
        for request, one, two in zip(make_requests(prompts, 12), plain, other, strict=True)
    ]
    config = schema.DecodeConfig(page_size=16, kv_dtype=kv_dtype)
    found = [difference.explain(model, config, *pair) for pair in pairs]
    assert any(each is not None and each.is_fault for each in found)
    assert all(math.isfinite(each.gap) for each in found if each)


def test_stale_rows_of_a_cache_are_a_fault(monkeypatch):
    """Rows of a tree's accepted path that are not moved to their places."""
    monkeypatch.setattr(PagedCache, "commit", lambda self, *arguments: self)
    run = engine(drafter("dflash", tree=True, block_size=4), batch_size=4)
    prompts = random_prompts([9, 12, 7, 10])
    requests = make_requests(prompts, 24)
    pairs = zip(requests, expected(prompts, [24] * 4), decode_all(run, requests), strict=True)
    found = [
        difference.explain(target(), CONFIG, request, plain, drafted.output_ids)
        for request, (plain, _), drafted in pairs
    ]
    assert any(each is not None and each.is_fault for each in found)
