"""DFlash2 and DSpark: golden vectors of a block, and the same block in training."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from safetensors.numpy import load_file
from support.golden import GOLDEN, TableHeads, golden, load
from support.models import greedy, make_sharding
from support.training import observed, weights_of, whole_rows, with_weights

from dflash import errors
from dflash.checkpoints import files
from dflash.config import schema
from dflash.config.train_schema import LossConfig
from dflash.drafters.base_config import ConditionalTree
from dflash.drafters.dflash2 import DFlash2, convolve
from dflash.drafters.dflash2_config import DFlash2Architecture
from dflash.drafters.dspark import DSpark
from dflash.drafters.parts.blocks import Anchors
from dflash.drafters.parts.conditioned import fitted
from dflash.layers.losses import TrainBatch

KINDS = ("vanilla", "gated", "rnn")
DIRECTORIES = {"dflash2": "dflash2_v32/draft"} | {
    kind: f"dspark_v32/draft_{kind}" for kind in KINDS
}
CASES = tuple(DIRECTORIES)
CONTEXT = 13
TOLERANCE = {"rtol": 0, "atol": 1e-4}
GREEDY = greedy(1)


def kind_of(case: str):
    return DFlash2 if case == "dflash2" else DSpark


def folder(case: str) -> str:
    return DIRECTORIES[case].partition("/")[0]


@functools.cache
def model(case: str, calibration=(), **options):
    drafter = load(kind_of(case), GOLDEN / DIRECTORIES[case], **options)
    drafter.calibration = calibration
    return drafter


@functools.cache
def heads(case: str) -> TableHeads:
    """Returns the target's embedding and head, which DSpark checkpoints contain a copy of."""
    if case == "dflash2":
        tensors = load_file(GOLDEN / folder(case) / "target_heads.safetensors")
    else:
        tensors = load_file(GOLDEN / DIRECTORIES[case] / "model.safetensors")
    return TableHeads(tensors["embed_tokens.weight"], tensors["lm_head.weight"])


@functools.cache
def inputs(case: str):
    """Returns the features [1, C, ·] of the context, and the anchor int32 [1]."""
    tensors = load_file(GOLDEN / folder(case) / "inputs.safetensors")
    features, anchor = tensors["context_features"], tensors["anchor_token"]
    return jnp.asarray(features)[None], jnp.asarray(anchor, jnp.int32)


@functools.cache
def drafted(case: str, **options) -> dict[str, np.ndarray]:
    """Returns hidden states, base logits and tokens of the block after the golden context."""
    drafter, (features, anchor) = model(case, **options), inputs(case)
    lent = heads(case)

    @jax.jit
    def run():
        state, count = observed(drafter, features, None), jnp.asarray([CONTEXT])
        hidden, _ = drafter.run_block(state, anchor, count, lent)
        proposal, after = drafter.draft(state, anchor, count, GREEDY, lent)
        assert after is state
        found = {"hidden": hidden, "base": lent.unembed(hidden), "tokens": proposal.tokens}
        optional = {"parents": proposal.parents, "confidence": proposal.confidence}
        return found | {name: x for name, x in optional.items() if x is not None}

    return jax.tree.map(lambda x: np.asarray(x[0]), run())


def vectors(case: str) -> dict[str, np.ndarray]:
    found = golden(folder(case))
    if case == "dflash2":
        return found
    return {name[len(case) + 1 :]: x for name, x in found.items() if name.startswith(f"{case}/")}


@pytest.mark.parametrize("case", CASES)
def test_golden_block(case):
    found, wanted = drafted(case), vectors(case)
    np.testing.assert_allclose(found["hidden"], wanted["block_hidden"], **TOLERANCE)
    np.testing.assert_allclose(found["base"], wanted["base_logits"], **TOLERANCE)
    np.testing.assert_array_equal(found["tokens"], wanted["draft_tokens"])
    rows = slice(model(case).first_row, None)
    np.testing.assert_array_equal(found["base"][rows].argmax(-1), wanted["base_argmax"])
    assert (wanted["draft_tokens"] != wanted["base_argmax"]).any(), "nothing was corrected"


@functools.cache
def conditioner(case: str):
    drafter = model(case)
    return jax.jit(
        lambda previous, hidden, memory: drafter.condition(
            previous, drafter.prepare(hidden), memory
        )
    )


def condition_along(case: str):
    """Yields each position's hidden state, base logits, previous token and vectors [1, r]."""
    drafter, found, (_, anchor) = model(case), drafted(case), inputs(case)
    rows = slice(drafter.first_row, None)
    condition = conditioner(case)
    memory, previous = drafter.fresh_memory(1), anchor
    positions = zip(found["hidden"][rows], found["base"][rows], found["tokens"], strict=True)
    for hidden, base, token in positions:
        made, memory = condition(previous, hidden[None], memory)
        yield hidden[None], base[None], previous, made
        previous = np.array([token], np.int32)


def one_prefix(rows):
    """Gives arrays [B, …] of a draft position an axis of prefixes."""
    return jax.tree.map(lambda x: x[:, None], rows)


def test_golden_candidates():
    drafter, wanted = model("dflash2"), golden("dflash2_v32")
    for k, (_, base, _, made) in enumerate(condition_along("dflash2")):
        likely = drafter.choices(base)
        scores, sampler = drafter.correct(one_prefix(likely), one_prefix(made), GREEDY)
        np.testing.assert_array_equal(likely.tokens[0], wanted["candidate_ids"][k])
        np.testing.assert_allclose(scores[0, 0], wanted["candidate_scores"][k], **TOLERANCE)
        np.testing.assert_array_equal(sampler.vocabulary.target_ids[0, 0], likely.tokens[0])


def test_chains_come_with_confidence():
    found, odds = drafted("gated"), vectors("gated")["confidence_logits"]
    np.testing.assert_allclose(found["confidence"], 1 / (1 + np.exp(-odds)), **TOLERANCE)
    assert "confidence" not in drafted("dflash2")


@pytest.mark.parametrize("case", ["dflash2", "gated"])
def test_a_calibration_gives_chains_confidence_and_changes_no_token(case):
    """Drafts 1, 2 … 3 and 4 onwards have an (a, b) each."""
    pairs = (1.0, 0.0), (0.5, -0.25), (2.0, 0.125)
    stated, found = (drafted(case, calibration=these) for these in (pairs[:1], pairs))
    np.testing.assert_array_equal(found["tokens"], drafted(case)["tokens"])
    a, b = np.array([pairs[i] for i in (0, 1, 1, 2, 2, 2, 2, 2)][: len(found["tokens"])]).T
    odds = scipy.special.logit(stated["confidence"])
    wanted = scipy.special.expit(a * odds + b)
    np.testing.assert_allclose(found["confidence"], wanted, rtol=1e-4)
    if case == "dflash2":
        first = golden("dflash2_v32")["candidate_scores"][0]
        chance = scipy.special.softmax(first).max()
        np.testing.assert_allclose(stated["confidence"][0], chance, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_golden_corrections_and_confidence(kind):
    drafter, wanted = model(kind), vectors(kind)

    @jax.jit
    def correct(hidden, base, previous, made):
        likely = one_prefix(drafter.choices(base))
        logits, sampler = drafter.correct(likely, one_prefix(made), GREEDY)
        assert sampler is GREEDY
        return logits[0, 0], drafter.confidence(hidden, previous)[0]

    for k, position in enumerate(condition_along(kind)):
        logits, odds = correct(*position)
        np.testing.assert_allclose(logits, wanted["corrected_logits"][k], **TOLERANCE)
        np.testing.assert_allclose(odds, wanted["confidence_logits"][k], **TOLERANCE)


@pytest.mark.parametrize("tree", [None, ConditionalTree(budget=12, width=4)], ids=["chain", "tree"])
@pytest.mark.parametrize("case", ["dflash2", "rnn"])
def test_fewer_drafts_are_the_first_ones_of_all(case, tree):
    """The whole block is run, as in training."""
    drafter, (features, anchor) = model(case, tree=tree), inputs(case)
    lent, position = heads(case), jnp.asarray([CONTEXT])

    @jax.jit
    def fewer():
        state = observed(drafter, features, None)
        return drafter.draft_fewer(3, state, anchor, position, GREEDY, lent)[0]

    found, whole = fewer(), drafted(case, tree=tree)
    np.testing.assert_array_equal(found.tokens[0], whole["tokens"][:3])
    if tree is not None:
        np.testing.assert_array_equal(found.parents[0], whole["parents"][:3])
        np.testing.assert_allclose(found.confidence[0], whole["confidence"][:3], rtol=1e-5)


def plain_tree(case: str, tree: ConditionalTree, calibration=()) -> list[tuple[int, ...]]:
    """Returns the paths of a tree's drafts, best first, by one prefix at a time."""
    drafter, found = model(case, calibration, tree=tree), drafted(case)
    hidden, base = (found[name][drafter.first_row :] for name in ("hidden", "base"))
    names = np.argsort(-base, axis=-1, kind="stable")[:, : tree.candidates]

    @jax.jit
    def children(previous, memory, k):
        prepared = drafter.prepare(jnp.asarray(hidden)[k][None])
        made, memory = drafter.condition(previous, prepared, memory)
        return jnp.asarray(base)[k] + drafter.bias(made)[0], memory

    level, kept = [((), 0.0, inputs(case)[1], drafter.fresh_memory(1))], []
    for k in range(drafter.num_positions):
        longer = []
        for path, total, previous, memory in level:
            logits, after = children(previous, memory, k)
            scores = scipy.special.log_softmax(np.asarray(logits, np.float64)[names[k]])
            if calibration:
                slope, offset = calibration[min(int(np.log2(k + 1)), len(calibration) - 1)]
                odds = scipy.special.logit(np.exp(scores))
                scores = np.log(scipy.special.expit(slope * odds + offset))
            for token, score in zip(names[k].tolist(), scores, strict=True):
                longer.append(((*path, token), total + score, jnp.asarray([token]), after))
        level = sorted(longer, key=lambda node: -node[1])[: tree.width]
        kept += level
    return [node[0] for node in sorted(kept, key=lambda node: -node[1])[: tree.budget]]


@pytest.mark.parametrize(
    "calibration", [(), ((0.5, -0.5), (2.0, 0.5))], ids=["stated", "calibrated"]
)
@pytest.mark.parametrize("case", ["dflash2", "gated", "rnn"])
def test_trees_are_those_of_a_plain_search(case, calibration):
    tree = ConditionalTree(budget=12, width=3, candidates=9)
    found = drafted(case, calibration=calibration, tree=tree)
    paths = []
    for token, parent in zip(found["tokens"].tolist(), found["parents"].tolist(), strict=True):
        paths.append((*(paths[parent - 1] if parent else ()), token))
    assert paths == plain_tree(case, tree, calibration)
    assert max(map(len, paths)) > 2


def test_trees_choose_among_more_tokens_than_chains():
    """The scores of a tree are probabilities among all tokens of a small vocabulary."""
    drafter, tree = model("dflash2"), ConditionalTree(budget=20, width=20)
    found = drafted("dflash2", block_size=2, tree=tree)
    _, base, _, made = next(condition_along("dflash2"))
    probs = np.asarray(jax.nn.softmax(base + drafter.bias(made)))[0]
    best = np.argsort(-probs)[:20]
    assert len(best) > drafter.shape.selector_top_k
    np.testing.assert_array_equal(found["tokens"], best)
    np.testing.assert_allclose(found["confidence"], probs[best], rtol=1e-4)


def test_sizes_of_trees_follow_from_the_budget():
    fit, tree = functools.partial(fitted, depth=15, most_candidates=32), ConditionalTree
    assert fit(tree(64)) == tree(64, width=12, candidates=32)
    assert fit(tree(8)) == tree(8, width=8, candidates=32)
    assert fit(tree(300)) == tree(300, width=20, candidates=32), "12 at each depth are too few"
    assert fit(tree(8, candidates=4)) == tree(8, width=4, candidates=4)
    with pytest.raises(errors.ConfigError, match=r"candidates: 33 exceeds the 32 tokens"):
        fit(tree(8, candidates=33))
    with pytest.raises(errors.ConfigError, match=r"width: 5 exceeds the 4 candidates"):
        fit(tree(8, width=5, candidates=4))
    with pytest.raises(errors.ConfigError, match=r"budget: 46 exceeds 45 drafts, width=3 at each"):
        fit(tree(46, width=3))


def make_batch(case: str) -> tuple[TrainBatch, Anchors]:
    """Returns the golden context and anchor, with the drafter's own drafts as labels."""
    features, anchor = inputs(case)
    tail = np.array([*np.asarray(anchor), *drafted(case)["tokens"]], np.int32)
    length = CONTEXT + len(tail)
    tokens = np.zeros((1, length), np.int32)
    tokens[0, CONTEXT:] = tail
    padded = np.zeros((1, length, features.shape[-1]), np.float32)
    padded[0, :CONTEXT] = features[0]
    batch = whole_rows(tokens, jnp.asarray(padded))
    return batch, Anchors(jnp.full((1, 1), CONTEXT, jnp.int32), jnp.ones((1, 1), bool))


@pytest.mark.parametrize("case", ["dflash2", "rnn"])
def test_training_sees_what_decoding_drafts(case):
    """Drafts as labels make the drafter always correct; every weight has a gradient."""
    drafter = model(case)
    batch, anchors = make_batch(case)
    lent = heads(case)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def call(weights):
        copy = with_weights(drafter, weights)
        options = LossConfig(gamma=0.0)
        loss, metrics = copy.loss(batch, lent, None, options, anchors=anchors)
        rows = copy.run_conditioned(batch, lent, None, options, anchors=anchors)
        return loss, (metrics, rows.hidden)

    (loss, (metrics, hidden)), grads = jax.jit(call)(weights_of(drafter))
    np.testing.assert_allclose(
        hidden[0, 0], drafted(case)["hidden"][drafter.first_row :], **TOLERANCE
    )
    base = np.asarray(heads(case).unembed(hidden))[0, 0]
    logits = base + np.stack(
        [np.asarray(drafter.bias(made))[0] for *_, made in condition_along(case)]
    )
    labels = drafted(case)["tokens"]

    def cross_entropy(logits):
        log_probs = np.asarray(jax.nn.log_softmax(logits))
        return -log_probs[np.arange(len(labels)), labels].mean()

    wanted = cross_entropy(logits)
    if case == "dflash2":
        wanted += cross_entropy(base)
        right = logits.argmax(-1) == labels  # the best candidate may not be the best of all
    else:
        odds = vectors(case)["confidence_logits"]
        right = np.ones(len(labels), bool)
        wanted += np.mean(np.log1p(np.exp(-odds)))
    np.testing.assert_allclose(loss, wanted, rtol=1e-4)
    np.testing.assert_allclose(metrics["token_accuracy"], right.mean(), rtol=1e-6)
    for path, grad in grads.items():
        assert np.isfinite(grad).all(), path
        assert np.abs(grad).max() > 0, path


def test_confidence_is_of_a_draft_whose_predecessors_are_right():
    """One wrong draft says nothing about those after it, which follow the true token again."""
    case, wrong = "vanilla", 3
    drafter, lent = model(case), heads(case)
    batch, anchors = make_batch(case)
    at = CONTEXT + 1 + wrong
    batch = dataclasses.replace(batch, tokens=batch.tokens.at[0, at].add(1))

    @jax.jit
    def run():
        options = LossConfig(gamma=0.0)
        rows = drafter.run_conditioned(batch, lent, None, options, anchors=anchors)
        scores = drafter.score_conditioned(rows, batch, lent, options)
        return drafter.loss(batch, lent, None, options, anchors=anchors)[1], rows, scores

    metrics, rows, scores = run()
    right = np.asarray(scores.correct)[0, 0]
    assert not right[wrong]
    assert right[-1], "nothing is right after the wrong one"
    odds = np.asarray(drafter.confidence(rows.hidden, rows.previous))[0, 0]
    wanted = np.mean(np.log1p(np.exp(odds)) - odds * right)
    np.testing.assert_allclose(metrics["confidence_loss"], wanted, rtol=1e-5)


def test_convolution_by_loops():
    rng = np.random.default_rng(0)
    rows, taps, groups, width = 4, 3, 2, 5
    x = rng.normal(size=(2, 3 * rows, groups * width)).astype(np.float32)
    kernels = rng.normal(size=(2, 3 * rows, taps, groups, width)).astype(np.float32)
    wanted = np.zeros_like(x)
    for b, r in np.ndindex(2, 3 * rows):
        for tap in range(min(taps, r % rows + 1)):
            wanted[b, r] += kernels[b, r, tap].reshape(-1) * x[b, r - tap]
    np.testing.assert_allclose(convolve(jnp.asarray(x), jnp.asarray(kernels), rows), wanted, 1e-5)


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("dflash2", {"selector_rank": None}, "missing selector_rank"),
        ("dflash2", {"aux_hidden_state_layer_ids": [0, 2]},
         r"layer_ids\[0\]: expected an integer in \[1, 4096\], got 0"),
        ("dflash2", {"draft_vocab_size": 33}, "draft_vocab_size: 33 exceeds the vocabulary of 32"),
        ("rnn", {"markov_rank": None}, "missing markov_rank"),
        ("rnn", {"markov_head_type": "lstm"}, "expected one of vanilla, gated, rnn, got 'lstm'"),
    ],
)  # fmt: skip
def test_what_a_config_may_not_say(case, changes, message):
    config = files.read_json(GOLDEN / DIRECTORIES[case] / "config.json") | changes
    kind = kind_of(case)
    with pytest.raises(errors.CheckpointError, match=message):
        kind(kind.architecture_from_hf(config), dtype=jnp.float32, sharding=make_sharding())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_group_size": 5}, "conv_group_size: 5 does not divide the hidden size 32"),
        ({"selector_top_k": 65}, "selector_top_k: 65 exceeds the vocabulary of 64"),
    ],
)
def test_what_options_may_not_say(options, message):
    target = schema.TargetArchitecture(64, 32, 64, 6, 4, 2, 16, 128)
    with pytest.raises(errors.ConfigError, match=message):
        DFlash2.architecture_for(target, DFlash2Architecture(**options))
