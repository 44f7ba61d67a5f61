"""Differences of outputs: what rounding explains, and faults that were planted."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.engines import (
    decode,
    engine,
    expected,
    logits_before,
    make_requests,
    outcomes,
    random_prompts,
    retargeted,
    untraced_cycles,
)
from support.models import make_target, target

from dflash.config import schema
from dflash.inference import difference
from dflash.layers.cache import PagedCache

CONFIG = schema.DecodeConfig(page_size=16)
(PROMPT,) = random_prompts([11])


@functools.cache
def output() -> tuple[int, ...]:
    """The plain output."""
    ((ids, _),) = expected([PROMPT], [16])
    return ids


@functools.cache
def logits() -> np.ndarray:
    """The logits before each token of the plain output, float64."""
    return logits_before(target(), PROMPT, output()).astype(np.float64)


def explain(drafted, plain=None, **how):
    (request,) = make_requests([PROMPT], 16, **how)
    return difference.explain(target(), CONFIG, request, plain or output(), drafted)


def test_equal_outputs_have_no_difference():
    assert explain(output()) is None


@pytest.mark.parametrize("position", [0, 9])
def test_the_gap_is_that_of_the_logits(position):
    row, plain = logits()[position], output()
    other = int(np.argsort(row)[-2])
    found = explain((*plain[:position], other, *plain[position + 1 :]))
    assert (found.position, found.tokens) == (position, (plain[position], other))
    assert found.gap == pytest.approx(row.max() - row[other], abs=1e-5)
    assert found.unit == pytest.approx(np.spacing(np.float32(row.max())))
    assert found.is_fault
    assert f"a fault: {found.gap:.2g} nats" in str(found)


def test_drawn_tokens_are_told_apart_by_their_noise():
    """The plain token beats all others by its score, though not always by its logit."""
    how = {"temperature": 0.8, "seed": 3}
    ((plain, _),) = expected([PROMPT], [16], **how)
    rows = logits_before(target(), PROMPT, plain)
    drawn = next(i for i, token in enumerate(plain) if token != rows[i].argmax())
    likeliest = int(rows[drawn].argmax())
    found = explain((*plain[:drawn], likeliest), plain=plain, **how)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(3), 0), len(PROMPT) + drawn)
    scores = rows[drawn] + 0.8 * np.asarray(jax.random.gumbel(key, rows[drawn].shape))
    assert scores.argmax() == plain[drawn]
    assert found.gap == pytest.approx(scores.max() - scores[likeliest], abs=1e-5)


def nearly(least: float) -> float:
    """The largest float32 below a bias that makes up for a difference of logits."""
    return float(np.nextafter(np.float32(least), np.float32(0)))


def test_penalties_and_biases_count():
    """A bias that makes the second likeliest token nearly as likely makes a near tie."""
    first, second = np.argsort(logits()[0])[[-1, -2]].tolist()
    bias = nearly(logits()[0, first] - logits()[0, second])
    found = explain((second,), logit_bias=((second, bias),))
    assert not found.is_fault
    assert "near tie (" in str(found)
    assert "ulp of float32)" in str(found)


def test_an_output_that_ends_early_is_a_fault():
    plain = output()
    found = explain(plain[:5])
    assert (found.position, found.tokens) == (5, (plain[5], None))
    assert found.is_fault
    assert str(found) == f"token 6 is the end, plain decoding has {plain[5]}: a fault"


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_token_that_a_filter_leaves_out_is_as_far_as_from_its_border(name):
    """A filter that keeps the two likeliest tokens, and a draft of the third."""
    row = logits()[0]
    first, second, third = np.argsort(row)[[-1, -2, -3]].tolist()
    chances = np.exp(row / 0.8) / np.exp(row / 0.8).sum()
    both = chances[first] + chances[second]
    value, gap = {
        "top_k": (2, row[second] - row[third]),
        "top_p": (float(0.9 * both), -0.8 * np.log(0.9)),  # The first one alone has less.
        "min_p": (float(chances[second] / chances[first]), row[second] - row[third]),
    }[name]
    how = {"temperature": 0.8, "seed": 3, name: value}
    found = explain((third,), plain=(second,), **how)
    assert found.gap == pytest.approx(gap, abs=1e-4)
    assert found.is_fault


def test_a_tie_at_the_border_of_a_filter_is_near():
    second, third = np.argsort(logits()[0])[[-2, -3]].tolist()
    bias = nearly(logits()[0, second] - logits()[0, third])
    how = {"temperature": 0.8, "seed": 3, "top_k": 2, "logit_bias": ((third, bias),)}
    assert not explain((third,), plain=(second,), **how).is_fault


def test_an_excluded_token_is_a_fault():
    second, third = np.argsort(logits()[0])[[-2, -3]].tolist()
    found = explain((third,), plain=(second,), min_new_tokens=3, stop_ids=(third,))
    assert str(found) == f"token 1 is {third}, plain decoding has {second}: a fault"


PROMPTS = random_prompts([9, 12, 7, 10])


def explain_all(model, config, limit: int, plain, drafted) -> list:
    """Explains differences to plain outcomes, and asserts that one of them is a fault."""
    requests = make_requests(PROMPTS, limit)
    found = [
        difference.explain(model, config, request, ids, other.output_ids)
        for request, (ids, _), other in zip(requests, plain, drafted, strict=True)
    ]
    assert any(each is not None and each.is_fault for each in found)
    return found


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_planted_fault_is_no_near_tie(kv_dtype):
    """Scales of the final norm that are wrong by half."""
    model = make_target(dtype=jnp.bfloat16)
    graph, weights = nnx.split(model)
    wrong = nnx.merge(graph, jax.tree.map(lambda x: x, weights))
    scale = wrong.norm.scale.get_value()
    wrong.norm.scale.set_value(scale.at[::2].multiply(1.5))
    run = engine(on=model, kv_dtype=kv_dtype, batch_size=4)
    plain, other = (decode(each, PROMPTS, 12) for each in (run, retargeted(run, wrong)))
    config = schema.DecodeConfig(page_size=16, kv_dtype=kv_dtype)
    found = explain_all(model, config, 12, outcomes(plain), other)
    assert all(math.isfinite(each.gap) for each in found if each)


def test_stale_rows_of_a_cache_are_a_fault(monkeypatch):
    """Rows of a tree's accepted path that are not moved to their places."""
    run = untraced_cycles("dflash", PROMPTS, tree=True)
    monkeypatch.setattr(PagedCache, "commit", lambda self, *arguments: self)
    explain_all(target(), CONFIG, 24, expected(PROMPTS, [24] * 4), decode(run, PROMPTS, 24))
