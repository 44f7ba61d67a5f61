"""UBTree against its published equations (arXiv 2609.39972), written here in NumPy."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from support.golden import build_drafter
from support.models import (
    check_same_weights,
    greedy,
    make_architecture,
    make_sharding,
    make_target,
    random_module,
)
from support.training import observed, random_batch, weights_of, with_weights

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config.train_schema import LossConfig
from dflash.drafters.base_config import ConditionalTree
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash2 import DFlash2
from dflash.drafters.parts.blocks import Anchors
from dflash.drafters.ubtree import UBTree
from dflash.drafters.ubtree_config import UBTreeArchitecture, UBTreeConfig
from dflash.layers import losses
from dflash.parallel import parameters

ARCHITECTURE = make_architecture()
VOCAB, WIDTH, DRAFTS, TOP_K = ARCHITECTURE.vocab_size, ARCHITECTURE.hidden_size, 5, 6
SIZES = UBTreeArchitecture(
    block_size=DRAFTS + 1, num_hidden_layers=1, intermediate_size=16, num_attention_heads=2,
    num_key_value_heads=1, head_dim=8, target_layer_ids=(0, 1), selector_rank=4,
    selector_top_k=TOP_K, selector_hidden_size=12,
)  # fmt: skip
CONTEXT, CLOSE = 7, {"rtol": 1e-5, "atol": 1e-5}


def build(changes=None, kind=UBTree, **options) -> DFlash2:
    """A drafter whose selector is random and not small."""
    sizes = dataclasses.replace(SIZES, **(changes or {}))
    shape = kind.shape_class.for_target(ARCHITECTURE, sizes).fit(ARCHITECTURE)
    model = random_module(kind, shape, seed=1, **options)
    rng, values = np.random.default_rng(0), {}
    for path, parameter in parameters.named_parameters(model):
        array = np.asarray(parameter.get_value())
        if path.startswith("candidate_selector."):
            values[path] = rng.normal(0, 0.7, array.shape).astype(np.float32)
    parameters.assign_host(model, values)
    return model


def tabulated(model: UBTree) -> UBTree:
    model = nnx.clone(model)
    model.tabulate(make_target())
    return model


@functools.cache
def features() -> np.ndarray:
    shape = (1, CONTEXT, 2 * WIDTH)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def draft(model: UBTree) -> dict[str, np.ndarray]:
    """Drafts after a context; returns the proposal, hidden states and base logits."""
    target, anchor, start = make_target(), jnp.array([3]), jnp.array([CONTEXT])

    @jax.jit
    def run():
        state = observed(model, features(), target)
        hidden, _ = model.run_block(state, anchor, start, target)
        proposal, _ = model.draft(state, anchor, start, greedy(1), target)
        found = {"hidden": hidden[:, 1:], "base": target.unembed(hidden[:, 1:])}
        found |= {"tokens": proposal.tokens}
        if proposal.parents is not None:
            found |= {"parents": proposal.parents, "confidence": proposal.confidence}
        return found

    return jax.tree.map(lambda x: np.asarray(x[0]), run())


@functools.cache
def chain() -> tuple[UBTree, dict[str, np.ndarray]]:
    """Returns a drafter with networks, and what it drafts."""
    model = build()
    return model, draft(tabulated(model))


class Equations:
    """The published selector in NumPy, from the weights of a UBTree with networks, or a DFlash2."""

    def __init__(self, model: DFlash2, hidden: np.ndarray, base: np.ndarray):
        """Takes hidden states [G, D] and base logits [G, V] of the draft positions."""
        selector = model.candidate_selector
        self.base, self.alpha, self.lam = base, np.ones(len(base)), np.ones(len(base))
        self.projected = hidden @ np.asarray(selector.hidden_projection.kernel[...])
        if type(model) is DFlash2:
            codebooks = selector.predecessor_codebook, selector.successor_codebook
            self.phi, self.psi = (np.asarray(codebook.embedding[...]) for codebook in codebooks)
            return
        networks = selector.predecessor_network, selector.successor_network
        self.phi, self.psi = map(published_codes, networks)
        self.alpha = np.exp(np.asarray(selector.log_base_scale[...]))
        self.lam = np.exp(np.asarray(selector.log_score_scale[...]))

    def scores(self, i: int, previous: int) -> np.ndarray:
        """Returns s_i(previous, ·), [V]."""
        delta = self.psi @ (self.projected[i] * self.phi[previous])
        return self.alpha[i] * self.base[i] + self.lam[i] * delta

    def among(self, i: int, count: int) -> np.ndarray:
        """Returns the `count` tokens with the largest base logits."""
        return np.argsort(-self.base[i], kind="stable")[:count]


def published_codes(network) -> np.ndarray:
    """Returns W2 · SiLU(W1 · e_v) of all tokens v, [V, r]."""
    first, second = (np.asarray(layer.kernel[...]) for layer in (network.up, network.down))
    inner = np.asarray(make_target().embed_tokens.embedding[...], np.float64) @ first
    return (inner / (1 + np.exp(-inner))) @ second


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


def test_a_chain_takes_the_best_candidate_after_each_draft():
    model, found = chain()
    published = Equations(model, found["hidden"], found["base"])
    previous, wanted = 3, []
    for i in range(DRAFTS):
        candidates = published.among(i, TOP_K)
        previous = candidates[published.scores(i, previous)[candidates].argmax()]
        wanted.append(previous)
    assert found["tokens"].tolist() == wanted
    assert wanted != found["base"].argmax(-1).tolist(), "nothing was reranked"


def test_scores_of_candidates():
    (model, found), previous = chain(), 5
    published, tables = Equations(model, found["hidden"], found["base"]), tabulated(model)
    prepared, likely = tables.prepare(found["hidden"][None]), tables.choices(found["base"][None])
    vectors, _ = tables.condition(jnp.full((1, DRAFTS), previous), prepared, ())
    scores, _ = tables.correct(likely, vectors, greedy(1))
    for i in range(DRAFTS):
        candidates = published.among(i, TOP_K)
        np.testing.assert_array_equal(likely.tokens[0, i], candidates)
        wanted = published.scores(i, previous)
        np.testing.assert_allclose(scores[0, i], wanted[candidates], **CLOSE)
        everywhere = tables.corrected(found["base"][None], vectors)
        np.testing.assert_allclose(everywhere[0, i], wanted, **CLOSE)


def test_a_tree_knows_the_chance_of_each_path():
    """The candidates of a tree are all 48 tokens, at most 64."""
    model = build(tree=ConditionalTree(budget=9, width=3))
    found = draft(tabulated(model))
    published = Equations(model, found["hidden"], found["base"])
    paths, sums = [(3,)], [0.0]
    for token, parent in zip(found["tokens"], found["parents"], strict=True):
        path = paths[parent]
        scores = published.scores(len(path) - 1, path[-1])
        paths.append((*path, token))
        sums.append(sums[parent] + log_softmax(scores)[token])
    np.testing.assert_allclose(found["confidence"], np.exp(sums[1:]), **CLOSE)
    assert len({len(path) for path in paths}) > 2


def test_a_draft_vocabulary_has_codes_of_its_own_tokens():
    model = build({"draft_vocab_size": 20})
    offsets = np.sort(np.random.default_rng(3).permutation(VOCAB)[:20]) - np.arange(20)
    known = np.isin(np.arange(VOCAB), offsets + np.arange(20))
    parameters.assign_host(model, {"d2t": offsets, "t2d": known})
    tables = tabulated(model).candidate_selector
    published = Equations(model, np.zeros((1, WIDTH)), np.zeros((1, VOCAB)))
    np.testing.assert_allclose(tables.predecessor_codebook.embedding[...], published.phi, **CLOSE)
    drafted = published.psi[offsets + np.arange(20)]
    np.testing.assert_allclose(tables.successor_codebook.embedding[...], drafted, **CLOSE)


def test_a_plan_counts_the_tables_and_no_networks():
    shape = build().shape
    model = UBTree(shape, dtype=jnp.bfloat16, sharding=make_sharding())
    model.tabulate(make_target())
    arrays = dict(parameters.named_parameters(model))
    for name in ("predecessor", "successor"):
        table = arrays[f"candidate_selector.{name}_codebook.embedding"].get_value()
        assert (table.shape, table.dtype) == ((VOCAB, SIZES.selector_rank), jnp.bfloat16)
        assert isinstance(table, jax.ShapeDtypeStruct)
    assert not any("network" in path for path in arrays)


# --- checkpoints ----------------------------------------------------------------------------------


def save(model: UBTree, directory) -> None:
    checkpoint.save(model, directory, UBTree.config_to_hf(model.shape))


def load(directory) -> UBTree:
    model = build_drafter(UBTreeConfig(checkpoint=str(directory)), ARCHITECTURE)
    model.tabulate(make_target())
    return model


def test_files_of_both_forms_load_as_the_same_drafter(tmp_path):
    model = build()
    save(model, tmp_path / "networks")
    save(tabulated(model), tmp_path / "tables")
    for form in ("networks", "tables"):
        loaded = load(tmp_path / form)
        check_same_weights(loaded, tabulated(model))
        assert loaded.shape == tabulated(model).shape


def test_a_file_has_the_selector_of_dflash2_and_two_vectors(tmp_path):
    save(tabulated(build()), tmp_path / "d")
    prefix, stored = "candidate_selector.", load_file(tmp_path / "d" / "model.safetensors")
    shapes = {name[len(prefix) :]: x.shape for name, x in stored.items() if prefix in name}
    assert shapes == {
        "predecessor_codebook": (VOCAB, 4),
        "successor_codebook": (VOCAB, 4),
        "hidden_projection.weight": (4, WIDTH),
        "log_base_scale": (DRAFTS,),
        "log_score_scale": (DRAFTS,),
    }
    group = checkpoint.read_config(tmp_path / "d")["dflash_config"]
    assert (group["projector_type"], group["selector_rank"]) == ("ubtree", 4)


# --- training -------------------------------------------------------------------------------------


BATCH = random_batch([[12], [12]], 12)
# The last anchor leaves its block two labels.
ANCHORS = Anchors(jnp.array([[1, 4], [3, 9]]), jnp.ones((2, 2), bool))


def score(model: DFlash2, options: LossConfig):
    """Returns loss, metrics, gradients, hidden states and base logits [B, A, G, …]."""
    target = make_target()

    @functools.partial(jax.value_and_grad, has_aux=True)
    def call(weights):
        copy = with_weights(model, weights)
        loss, metrics = copy.loss(BATCH, target, None, options, anchors=ANCHORS)
        copy.tabulate(target)
        rows = copy.run_conditioned(BATCH, target, None, options, anchors=ANCHORS)
        return loss, (metrics, rows.hidden, target.unembed(rows.hidden))

    (loss, (metrics, *rows)), grads = jax.jit(call)(weights_of(model))
    return loss, metrics, grads, *map(np.asarray, rows)


def terms(model: DFlash2, hidden: np.ndarray, base: np.ndarray):
    """Yields equations, row and draft position, the target's row, and the true tokens."""
    for row, block in np.ndindex(2, 2):
        published = Equations(model, hidden[row, block], base[row, block])
        first = int(ANCHORS.index[row, block])
        tokens = np.asarray(BATCH.tokens[row, first : first + DRAFTS + 1])
        for i, (previous, label) in enumerate(itertools.pairwise(tokens)):
            yield published, i, (row, first + i), previous, label


def test_the_loss_of_dflash2():
    """Cross-entropies of corrected and base logits over the whole vocabulary."""
    model = build()
    loss, _, grads, *rows = score(model, LossConfig(gamma=0.0))
    values = [
        -log_softmax(published.scores(i, previous))[label] - log_softmax(published.base[i])[label]
        for published, i, _, previous, label in terms(model, *rows)
    ]
    assert len(values) == 3 * DRAFTS + 2
    np.testing.assert_allclose(loss, np.mean(values), **CLOSE)
    for path, grad in grads.items():
        assert float(jnp.abs(grad).max()) > 0, path


@pytest.mark.parametrize("kind", [UBTree, DFlash2])
def test_the_published_loss(kind):
    """KL among the candidates, after the true token before, and cross-entropy of base logits."""
    count, weight = 20, 0.3
    convolved = {"conv_kernel_size": 2, "conv_group_size": 8} if kind is DFlash2 else {}
    model = build(convolved, kind)
    options = LossConfig("candidate_kl", gamma=0.0, num_candidates=count, base_weight=weight)
    loss, metrics, grads, *rows = score(model, options)
    targets = np.asarray(make_target().unembed(BATCH.hidden))
    values, right = [], []
    for published, i, row, previous, label in terms(model, *rows):
        among = published.among(i, count)
        scores = published.scores(i, previous)[among]
        wanted, found = log_softmax(targets[row][among]), log_softmax(scores)
        divergence = np.sum(np.exp(wanted) * (wanted - found))
        values.append(divergence - weight * log_softmax(published.base[i])[label])
        right.append(among[scores.argmax()] == label)
    assert len(values) == 3 * DRAFTS + 2
    np.testing.assert_allclose(loss, np.mean(values), **CLOSE)
    np.testing.assert_allclose(metrics["token_accuracy"], np.mean(right), **CLOSE)
    for path, grad in grads.items():
        assert bool(jnp.isfinite(grad).all()), path
        assert float(jnp.abs(grad).max()) > 0, path


def test_a_divergence_needs_no_label():
    """A label outside the draft vocabulary has no cross-entropy."""
    rng = np.random.default_rng(4)
    base, corrected, target = rng.normal(size=(3, 1, 8)).astype(np.float32)
    options = LossConfig("candidate_kl", num_candidates=8, base_weight=1.0)
    known, unknown = (
        losses.score_likely(base, corrected, target, jnp.array([label]), options)
        for label in (3, 8)
    )
    cost = -log_softmax(base[0])[3]
    np.testing.assert_allclose(known.objective - unknown.objective, [cost], **CLOSE)
    assert not unknown.correct[0]
    assert np.isinf(unknown.nll[0])


def test_other_drafters_refuse_the_published_loss():
    model, options = build(kind=DFlash), LossConfig("candidate_kl")
    with pytest.raises(errors.ConfigError, match=r"loss\.name: 'candidate_kl' is only for dflash2"):
        jax.eval_shape(lambda: model.loss(BATCH, make_target(), None, options, anchors=ANCHORS))
