"""Tests of rejection through the engine, against the exact distribution of its target."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from support import engines, models
from support.rejection import VOCAB, chi_square, make_params

from dflash.drafters.eagle3.drafter import Eagle3
from dflash.drafters.eagle3_config import BeamTree, Eagle3Architecture, Eagle3Config
from dflash.inference.pages import Slot
from dflash.inference.request import Request, RequestSampling
from dflash.parallel import parameters

SLOTS, ROUNDS, PROMPT, TEMPERATURE = 512, 48, (3, 1, 4, 1, 5), 2.5


def beams(arch):
    """An EAGLE-3 drafter of small trees, whose drafts are certain of themselves."""
    config = Eagle3Config(
        tree=BeamTree(budget=4, top_k=2, depth=2),
        architecture=Eagle3Architecture(target_layer_ids=(0, 1)),
    )
    placed = models.make_sharding(*models.ONE_DEVICE)
    model = Eagle3.create(config, None, arch, dtype=jnp.dtype("float32"), sharding=placed)
    parameters.initialize(model, jax.random.key(1))
    return model


FORMS = {
    "chain": lambda arch: models.drafter("dflash", block_size=3, arch=arch),
    # In a short pass these weights draft less sharply, and are refused more often.
    "tree": lambda arch: models.drafter(
        "dflash", block_size=3, arch=arch, tree=True, short_pass=True
    ),
    "beams": beams,
}


@functools.cache
def full_engine(form: str):
    """An engine, its slots all holding one prompt, and the token after it."""
    small = models.target(vocab_size=VOCAB)
    model = FORMS[form](small.arch)
    run = engines.engine(
        model, on=small, batch_size=SLOTS, sync_every=2, max_length=16, verify="rejection"
    )
    request = Request(0, PROMPT, 16 - len(PROMPT), RequestSampling(temperature=TEMPERATURE))
    state = run.new_state()
    for i in range(SLOTS):
        state = run.admit(state, Slot(i, run.layout.standing_pages(i)), request)
    return run, state, int(state.anchor[0])


def engine_pvalue(run, form: str) -> float:
    """How well the two tokens after a prompt and its first token fit the target, by chi-square."""
    _, start, anchor = full_engine(form)
    firsts, seconds, accepted = [], [], 0
    for i in range(ROUNDS):
        noise = dataclasses.replace(start.sampling, seed=make_params(SLOTS, seed=i).seed)
        state = dataclasses.replace(start, sampling=noise)
        _, report = run.generate(jax.tree.map(jnp.copy, state))
        tokens, counts = np.asarray(report.tokens), np.asarray(report.num_committed)
        firsts.append(tokens[0, :, 0])
        seconds.append(np.where(counts[0] > 1, tokens[0, :, 1], tokens[1, :, 0]))
        accepted += np.count_nonzero(counts[0] > 1)
    first, second = np.concatenate(firsts), np.concatenate(seconds)
    assert len(first) >= 20_000
    assert 0.1 < accepted / len(first) < 0.9, "both accepting and refusing must happen"
    small = models.target(vocab_size=VOCAB)
    return chi_square(first, second, exact_joint(small, anchor))


def exact_joint(small, anchor: int) -> np.ndarray:
    """p(t1, t2 | prompt, anchor), [V, V], from the target's logits."""
    texts = np.array([(*PROMPT, anchor, token) for token in range(VOCAB)], np.int32)
    logits = np.stack([engines.all_logits(small, text[None]) for text in texts])
    probs = scipy.special.softmax(logits.astype(np.float64) / TEMPERATURE, axis=-1)
    return probs[0, -2][:, None] * probs[:, -1]


@pytest.mark.parametrize("form", FORMS)
def test_rejection_through_the_engine_follows_the_target(form):
    run, _, _ = full_engine(form)
    assert engine_pvalue(run, form) > 1e-3
