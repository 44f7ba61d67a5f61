"""What shapes logits: against plain Python, row by row; and that nobody else pays for it."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core
from support.engines import engine
from support.models import ARCHITECTURE, drafter, target

from dflash.inference.cycle import cycle
from dflash.inference.cycle import tree as trees
from dflash.inference.logits import controls, logprobs
from dflash.inference.request import Request, RequestSampling

VOCAB, LENGTH, DRAFTS = 40, 12, 4
few = settings(max_examples=60)
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(tokens, min_size=1, max_size=5)
requests = st.builds(
    lambda prompt, least, stop_ids, **sampling: Request(
        0, tuple(prompt), 50, RequestSampling(**sampling), tuple(stop_ids), min_new_tokens=least
    ),
    prompt=texts,
    least=st.integers(0, 9),
    stop_ids=st.lists(tokens, max_size=2),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3).map(
        lambda found: tuple(found.items())
    ),
)
parents = st.tuples(*(st.integers(0, g) for g in range(DRAFTS))) | st.none()
cases = st.tuples(requests, texts, st.lists(tokens, min_size=DRAFTS, max_size=DRAFTS))


def shaped_by_hand(logits, request: Request, output, allowed) -> np.ndarray:
    """The logits of one row, which follows the prompt and `output`; see `controls.py`."""
    logits, sampling = logits.astype(np.float64), request.sampling
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    for token in {*request.prompt, *output}:
        factor = sampling.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token in output:
        logits[token] -= sampling.frequency_penalty
    for token in set(output):
        logits[token] -= sampling.presence_penalty
    if len(output) < request.min_new_tokens:
        logits[list(request.stop_ids)] = -np.inf
    return np.where(allowed, logits, -np.inf)


@jax.jit
def shape(logits, asked, length, stop_ids, drafts, ancestry, allowed):
    return controls.shape_logits(logits, asked, length, stop_ids, drafts, ancestry, allowed)


@few
@given(st.tuples(cases, cases), parents, st.integers(0, 99))
def test_rows_are_shaped_as_one_after_the_other(pair, parents, seed):
    """Chains and trees; two sequences of a batch do not mix."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, DRAFTS + 1, VOCAB)).astype(np.float32)
    may_follow = rng.random(logits.shape) < 0.8
    words = np.packbits(
        np.pad(may_follow, ((0, 0), (0, 0), (0, 24))), axis=-1, bitorder="little"
    ).view(np.int32)
    asked = [controls.of_request(request, tuple(said), LENGTH) for request, said, _ in pair]
    asked = jax.tree.map(lambda *leaves: np.stack(leaves), *asked)
    stop_ids = np.array([[*request.stop_ids, -1, -1][:2] for request, *_ in pair], np.int32)
    length = np.array([len(request.prompt) + len(said) for request, said, _ in pair], np.int32)
    drafts = np.array([drafts for *_, drafts in pair], np.int32)
    ancestry = None
    if parents is not None:
        ancestry = trees.from_parents(jnp.array([parents, parents], jnp.int32)).ancestry
    found = shape(logits, asked, length, stop_ids, drafts, ancestry, words)
    for b, (request, said, mine) in enumerate(pair):
        output = {0: list(said)}
        for g, token in enumerate(mine):
            output[g + 1] = [*output[g if parents is None else parents[g]], token]
        for row, after in output.items():
            wanted = shaped_by_hand(logits[b, row], request, after, may_follow[b, row])
            np.testing.assert_allclose(found[b, row], wanted, atol=1e-5)


def test_text_grows_by_what_was_committed():
    asked = [controls.of_request(Request(0, (7,) * n, 9), (5,) * 2, 8) for n in (1, 4)]
    asked = jax.tree.map(lambda *leaves: np.stack(leaves), *asked)
    start, count = np.array([3, 6], np.int32), np.array([2, 5], np.int32)
    more = np.arange(10, 20, dtype=np.int32).reshape(2, 5)
    text = jax.jit(lambda *args: asked.with_tokens(*args).token_ids)(start, more, count)
    assert text.tolist() == [[7, 5, 5, 10, 11, 0, 0, 0], [7, 7, 7, 7, 5, 5, 15, 16]]


ALONE = {
    "least": {"min_new_tokens": 2},
    "presence": {"sampling": RequestSampling(presence_penalty=0.5)},
    "frequency": {"sampling": RequestSampling(frequency_penalty=-0.5)},
    "repetition": {"sampling": RequestSampling(repetition_penalty=2.0)},
    "bias": {"sampling": RequestSampling(logit_bias=((3, 1.0),))},
}


@pytest.mark.parametrize("kind", ALONE)
def test_each_control_alone_changes_logits(kind):
    request = Request(0, (1, 2, 3), 9, stop_ids=(5,), **ALONE[kind])
    pair = [controls.of_request(each, (), LENGTH) for each in (request, Request(1, (1,), 9))]
    both = jax.tree.map(lambda *rows: jnp.stack(rows), *pair)
    length = jnp.array([4, 4])
    assert bool(both.shapes(length, jnp.array([True, True])))
    assert not bool(both.shapes(length, jnp.array([False, True])))
    # Stop tokens are allowed again once the output is long enough.
    assert bool(both.shapes(length + 1, jnp.array([True, True]))) == (kind != "least")


# --- what others pay -----------------------------------------------------------------------------

MANY = 1009  # tokens of a vocabulary that is larger than all else


def large_steps(function, *arguments) -> collections.Counter:
    """What a program computes of the vocabulary's size, while nobody asks for anything."""
    return collections.Counter(_large_steps(jax.make_jaxpr(function)(*arguments).jaxpr))


def _large_steps(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(core.jaxprs_in_params(equation.params))
        scope = str(equation.source_info.name_stack)
        if equation.primitive.name == "cond" and scope.endswith(("if_shaped", "if_logprobs")):
            inner = inner[:1]  # the branch that is taken
        for one in inner:
            yield from _large_steps(one)
        for variable in equation.outvars:
            if getattr(variable.aval, "size", 0) >= MANY and not inner:
                yield equation.primitive.name, variable.aval.shape


def judge_at_once(state, block, logits, rules, allowed):
    return cycle.apply_rule(block, logits, rules.sampler(state), rules)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("tree", [False, True])
def test_nobody_else_pays(tree, verify, monkeypatch):
    """A cycle computes nothing of [B, R, V] for controls that nobody asks for."""
    arch = dataclasses.replace(ARCHITECTURE, vocab_size=MANY)
    model = drafter("dflash", block_size=5, tree=tree, arch=arch)
    run = engine(model, on=target(vocab_size=MANY), batch_size=2, verify=verify)

    def one_cycle(state):
        size = model.block_size
        return cycle.cycle(run.target, model, state, rules=run.rules, block_size=size)

    state = run.abstract_state()
    found = large_steps(one_cycle, state)
    monkeypatch.setattr(cycle, "judge", judge_at_once)
    without = lambda rows, params, ids, *_: logprobs.zeros(ids.shape, MANY)  # noqa: E731
    monkeypatch.setattr(logprobs, "of_tokens", without)
    assert found == large_steps(one_cycle, state)
    assert found.total() > 0
