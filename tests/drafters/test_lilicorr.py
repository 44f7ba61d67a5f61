"""Tests of LiLiCorr: scores of transitions between candidates, and what is drafted by them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import failure
from support.dflash_cases import FULL, make_shape
from support.models import check_same_weights, greedy, make_sharding, make_target, zeros
from support.training import random_weights, weights_of, whole_rows

from dflash.checkpoints import checkpoint
from dflash.config.train_schema import LossConfig
from dflash.drafters.lilicorr import LiLiCorr
from dflash.drafters.lilicorr_config import LiLiCorrShape
from dflash.drafters.parts.blocks import Anchors
from dflash.parallel import parameters

BUILD = {"dtype": jnp.float32, "sharding": make_sharding()}
NETWORK = {
    "lilicorr_candidate_topk": 3, "lilicorr_hidden_size": 8, "lilicorr_num_layers": 2,
    "lilicorr_num_heads": 2, "lilicorr_mlp_ratio": 1.5, "lilicorr_factor_dim": 5,
    "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0,
}  # fmt: skip
SHAPE = LiLiCorrShape(**vars(make_shape(FULL, FULL)), **NETWORK)
# As wide as the drafter, with convolutions.
WIDE = dataclasses.replace(SHAPE, lilicorr_hidden_size=0, conv_kernel_size=2, conv_group_size=4)
SLOTS = SHAPE.block_size - 1


@functools.cache
def make_drafter(shape=SHAPE):
    drafter = LiLiCorr(shape, **BUILD)
    parameters.assign(drafter, random_weights(drafter, 0.3))
    return drafter


def network_weights(drafter):
    """The network's tensors in float64, by their names in files."""
    return {
        drafter.checkpoint_name(path).removeprefix("lilicorr."): np.asarray(
            array.T if path.endswith(".kernel") else array, np.float64
        )
        for path, array in weights_of(drafter).items()
        if path.startswith("lilicorr.")
    }


def unit(x):
    return x / max(np.linalg.norm(x), NETWORK["lilicorr_vector_eps"])


def direct_scores(w, embedded, log_probs, hidden, row):
    """Scores in loops: of transitions from the anchor [k], and from slot to slot [S - 1, k, k]."""
    slots, candidates = log_probs.shape
    heads = NETWORK["lilicorr_num_heads"]

    def linear(name, x):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def silu(x):
        return x / (1 + np.exp(-x))

    def norm(name, x):
        return w[f"{name}.weight"] * x / np.sqrt((x**2).mean() + SHAPE.decoder.rms_norm_eps)

    def features(slot, rank):
        value = log_probs[slot, rank]
        x = np.array([value, np.exp(value), value - log_probs[slot].max(),
                      rank / (candidates - 1), rank == 0])  # fmt: skip
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5)
        x = x * w["feature_mlp.0.weight"] + w["feature_mlp.0.bias"]
        return linear("feature_mlp.3", silu(linear("feature_mlp.1", x)))

    places = [(slot, rank) for slot in range(slots) for rank in range(candidates)]
    rows = []
    for slot, rank in places:
        x = embedded[slot, rank]
        x = linear("token_proj", x) if "token_proj.weight" in w else x
        x = x + linear("pass_hidden_proj", hidden[slot]) + features(slot, rank)
        rows.append(x + w["slot_embedding"][0, 0, slot, 0] + w["rank_embedding"][0, 0, 0, rank])
    width = len(rows[0])
    for i in range(NETWORK["lilicorr_num_layers"]):
        at = f"layers.{i}"
        joined = [
            w[f"{at}.attn.in_proj_weight"] @ norm(f"{at}.attn_norm", x)
            + w[f"{at}.attn.in_proj_bias"]
            for x in rows
        ]
        size, branches = width // heads, []
        for (slot, _), own in zip(places, joined, strict=True):
            outputs = []
            for head in range(heads):
                part = slice(head * size, (head + 1) * size)
                query = own[:width][part]
                scores = np.array([
                    query @ other[width : 2 * width][part] / np.sqrt(size)
                    + w["relative_slot_bias"][head, slot - there + SHAPE.block_size - 1]
                    + (slot == there) * w["same_slot_bias"][head]
                    for (there, _), other in zip(places, joined, strict=True)
                ])  # fmt: skip
                shares = np.exp(scores - scores.max())
                shares /= shares.sum()
                outputs.append(shares @ np.array([other[2 * width :][part] for other in joined]))
            branches.append(linear(f"{at}.attn.out_proj", np.concatenate(outputs)))
        rows = [x + branch for x, branch in zip(rows, branches, strict=True)]
        rows = [
            x + linear(f"{at}.mlp.2", silu(linear(f"{at}.mlp.0", norm(f"{at}.mlp_norm", x))))
            for x in rows
        ]
    anchor = norm("anchor_norm", linear("context_proj", row))
    leaving, arriving = {}, {}
    for place, x in zip(places, rows, strict=True):
        x = norm("output_norm", x)
        joint = silu(linear("factor_input_proj", np.concatenate([x, anchor, x * anchor])))
        leaving[place] = unit(linear("out_head", joint))
        arriving[place] = unit(linear("in_head", joint))
    start = unit(linear("anchor_out_head", anchor))
    ranks, scale = range(candidates), NETWORK["lilicorr_logit_scale"]
    pairs = [
        [[leaving[slot, i] @ arriving[slot + 1, j] for j in ranks] for i in ranks]
        for slot in range(slots - 1)
    ]
    return scale * np.array([start @ arriving[0, j] for j in ranks]), scale * np.array(pairs)


def features_of(rows=7, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, rows, 64)), jnp.float32)


def observe(drafter, state, position, features, count=None):
    tokens = np.zeros((2, features.shape[1] + 1), np.int32)
    count = np.full(2, features.shape[1]) if count is None else np.array(count)
    position = np.broadcast_to(np.asarray(position, np.int32), (2,))
    return jax.jit(drafter.observe)(state, position, tokens, count, features, None)


@functools.cache
def drafted(shape):
    """A state after seven tokens, its drafts, and the hidden states and logits of the block."""
    drafter, heads, anchor = make_drafter(shape), make_target(), jnp.array([5, 9])
    state = observe(drafter, zeros(drafter.init_state(2, 32)), 0, features_of())
    position = jnp.full(2, 7)

    @jax.jit
    def draft(state):
        hidden, _ = drafter.run_block(state, anchor, position, heads)
        *nodes, _ = drafter.run_positions(SLOTS, state, anchor, position, heads)
        proposal, _ = drafter.draft(state, anchor, position, greedy(2), heads)
        return hidden[:, 1:], heads.unembed(hidden[:, 1:]), nodes, proposal.tokens

    return state, *jax.tree.map(np.asarray, draft(state))


def context_rows(drafter, features):
    return np.asarray(jax.jit(lambda features: drafter.context_rows(features)[0])(features))


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["narrow", "wide"])
def test_drafts_follow_the_best_transitions(shape):
    drafter = make_drafter(shape)
    _, hidden, logits, (before, own), drafts = drafted(shape)
    table = np.asarray(make_target().embed_tokens.embedding[...], np.float64)
    w, rows = network_weights(drafter), context_rows(drafter, features_of())
    for b in range(2):
        base = np.asarray(logits[b], np.float64)
        tokens = np.argsort(-base, axis=1)[:, :3]
        log_probs = np.take_along_axis(base, tokens, 1)
        log_probs -= np.log(np.exp(base).sum(axis=1, keepdims=True))
        row = rows[b, -1].astype(np.float64)
        start, pairs = direct_scores(
            w, table[tokens], log_probs, np.asarray(hidden[b], np.float64), row
        )
        np.testing.assert_array_equal(own.tokens[b], tokens)
        found = NETWORK["lilicorr_logit_scale"] * np.einsum(
            "gir,gjr->gij", before.vectors[b], own.vectors[b]
        )
        np.testing.assert_allclose(found[0, 0], start, atol=1e-4)
        np.testing.assert_allclose(found[1:], pairs, atol=1e-4)
        expected, rank = [], None
        for slot in range(SLOTS):
            rank = int(np.argmax(start if slot == 0 else pairs[slot - 1][rank]))
            expected.append(tokens[slot, rank])
        assert drafts[b].tolist() == expected
    assert (drafts != logits.argmax(axis=-1)).any(), "not all are the likeliest tokens"


def test_the_state_keeps_the_last_committed_row():
    drafter, features = make_drafter(), features_of()
    state = observe(drafter, zeros(drafter.init_state(2, 32)), 0, features, [7, 4])
    rows = context_rows(drafter, features)
    np.testing.assert_allclose(state.row, [rows[0, 6], rows[1, 3]], rtol=1e-6)
    more = features_of(3, seed=1)
    again = observe(drafter, state, np.array([7, 4]), more, [0, 2])
    expected = [rows[0, 6], context_rows(drafter, more)[1, 1]]
    np.testing.assert_allclose(again.row, expected, rtol=1e-6)


def test_training_scores_what_decoding_drafts():
    """Labels that decoding drafts are correct, and one that is no candidate ends the loss."""
    drafter, heads = make_drafter(), make_target()
    *_, (before, own), drafts = drafted(SHAPE)
    context = jnp.broadcast_to(jnp.arange(7), (2, 7))
    tokens = jnp.concatenate([context, jnp.array([[5], [9]]), drafts], axis=1)
    absent = next(token for token in range(48) if token not in own.tokens[1, 2])
    tokens = tokens.at[1, 10].set(absent)
    length = tokens.shape[1]
    padded = jnp.pad(features_of(), ((0, 0), (0, length - 7), (0, 0)))
    batch = whole_rows(tokens, padded)
    anchors = Anchors(jnp.full((2, 1), 7), jnp.ones((2, 1), bool))
    options = LossConfig(gamma=0.0)

    @jax.jit
    def run():
        return drafter.loss(batch, heads, jax.random.key(0), options, anchors=anchors)

    loss, metrics = run()
    # All of the first block, and at least two of the second.
    assert metrics["token_accuracy"] >= (SLOTS + 2) / (2 * SLOTS)
    total = 0.0
    for b, slots in enumerate((SLOTS, 2)):
        previous = tokens[b, 7]
        for slot in range(slots):
            rank = int(np.argmax(before.tokens[b, slot] == previous))
            scores = NETWORK["lilicorr_logit_scale"] * (
                own.vectors[b, slot] @ before.vectors[b, slot, rank]
            )
            previous = tokens[b, 8 + slot]
            (place,) = np.flatnonzero(own.tokens[b, slot] == previous)
            total += float(jax.nn.logsumexp(scores) - scores[place])
    np.testing.assert_allclose(metrics["choice_loss"], total / (2 * SLOTS), rtol=1e-4)
    expected = metrics["base_loss"] + 0.25 * metrics["choice_loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [SHAPE, WIDE], ids=["narrow", "wide"])
def test_files_come_back_under_published_names(shape, tmp_path):
    drafter = make_drafter(shape)
    checkpoint.save(drafter, tmp_path / "d", LiLiCorr.config_to_hf(shape))
    again = LiLiCorr(LiLiCorr.architecture_from_hf(checkpoint.read_config(tmp_path / "d")), **BUILD)
    checkpoint.load(again, tmp_path / "d")
    assert again.shape == shape
    check_same_weights(again, drafter)
    names = set(network_weights(drafter))
    linear = ["pass_hidden_proj", "context_proj", "factor_input_proj", "out_head", "in_head"]
    linear += ["anchor_out_head", "feature_mlp.0", "feature_mlp.1", "feature_mlp.3"]
    linear += [] if shape is WIDE else ["token_proj"]
    norms, layers = ["output_norm", "anchor_norm"], ["layers.0", "layers.1"]
    for layer in layers:
        linear += [f"{layer}.attn.out_proj", f"{layer}.mlp.0", f"{layer}.mlp.2"]
        norms += [f"{layer}.attn_norm", f"{layer}.mlp_norm"]
    assert names == {
        *(f"{name}.{part}" for name in linear for part in ("weight", "bias")),
        *(f"{name}.weight" for name in norms),
        *(f"{layer}.attn.in_proj_{part}" for layer in layers for part in ("weight", "bias")),
        *("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias"),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lilicorr_num_heads": 3}, "lilicorr_num_heads: 3 does not divide the network's width 8"),
        ({"lilicorr_candidate_topk": 49},
         "lilicorr_candidate_topk: 49 exceeds the vocabulary of 48"),
        ({"conv_group_size": 4}, "conv_group_size: 4, but conv_kernel_size is 0"),
        ({"conv_kernel_size": 2}, "conv_group_size: 0, but conv_kernel_size is 2"),
        ({"conv_kernel_size": 2, "conv_group_size": 5},
         "conv_group_size: 5 does not divide the hidden size 32"),
        ({"lilicorr_factor_dim": None}, "missing lilicorr_factor_dim"),
    ],
)  # fmt: skip
def test_unusable_fields_are_named(change, message):
    config = LiLiCorr.config_to_hf(SHAPE)
    config["dflash_config"] |= change
    assert failure(LiLiCorr.architecture_from_hf, config) == f"config.json: {message}"
