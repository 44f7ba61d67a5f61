"""Tests of DFlash with a draft vocabulary: fewer tokens to draft, and fewer columns to read."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.dflash_cases import FULL, cut, make_shape
from support.models import (
    ARCHITECTURE,
    make_sharding,
    make_target,
    random_module,
    zeros,
)
from support.training import random_batch

from dflash import errors
from dflash.config.train_schema import LossConfig
from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape
from dflash.drafters.dspark_config import DSparkArchitecture, DSparkShape
from dflash.drafters.parts.blocks import sample_anchors, score_blocks
from dflash.parallel import parameters
from dflash.training import state as states

DRAFTED = np.arange(1, 40, 2)  # of 48 tokens


def count_odd_ones():
    return np.bincount(DRAFTED, minlength=48)


@functools.cache
def make_drafter():
    """Returns a drafter that tests share, so never change it."""
    shape = make_shape(FULL, draft_vocab_size=DRAFTED.size)
    model = random_module(DFlash, shape, seed=1)
    model.prepare_training(count_odd_ones, make_target())
    return model


# --- what is drafted -----------------------------------------------------------------------------


def test_the_head_is_the_target_s_columns_of_the_frequent_tokens():
    model, heads = make_drafter(), make_target()
    kernel = np.asarray(heads.lm_head.kernel[...])
    np.testing.assert_array_equal(model.lm_head.kernel[...], kernel[:, DRAFTED])
    np.testing.assert_array_equal(np.flatnonzero(model.t2d[...]), DRAFTED)


def test_columns_of_a_tied_head_are_rows_of_the_embedding():
    heads = make_target(tie_word_embeddings=True)
    columns = heads.head_columns(DRAFTED)
    np.testing.assert_array_equal(columns, np.asarray(heads.embed_tokens.embedding[...])[DRAFTED].T)


def test_drafts_are_drawn_among_them_by_the_target_s_logits():
    model, heads = make_drafter(), make_target()
    given = []

    class Sampler:
        def among(self, vocabulary):
            given.append(vocabulary.target_ids)
            return self

        def propose(self, logits, positions):
            given.append(logits)
            return positions, None

    @jax.jit
    def run(state):
        ones = jnp.ones(1, jnp.int32)
        model.draft(state, ones, ones, Sampler(), heads)
        hidden, _ = model.run_block(state, ones, ones, heads)
        return *given, heads.unembed(hidden[:, 1:])

    tokens, logits, all_logits = map(np.asarray, run(zeros(model.init_state(1, 16))))
    np.testing.assert_array_equal(tokens, DRAFTED)
    np.testing.assert_allclose(logits, all_logits[..., DRAFTED], rtol=1e-5, atol=1e-6)


def test_a_tree_is_no_larger_than_its_tokens_allow():
    shape = make_shape(FULL, block_size=2, draft_vocab_size=5)
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    assert DFlash(shape, tree_budget=5, **build).num_draft_tokens == 5
    with pytest.raises(errors.ConfigError, match="6"):
        DFlash(shape, tree_budget=6, **build)


# --- training ------------------------------------------------------------------------------------


class MaskedHeads:
    """The target's heads, with nothing but the drafted tokens."""

    def __init__(self, heads):
        self.embed = heads.embed
        kept = np.isin(np.arange(48), DRAFTED)
        self.unembed = lambda hidden: jnp.where(kept, heads.unembed(hidden), -1e9)


@pytest.mark.parametrize("name", ["cross_entropy", "kl", "dpace"])
def test_the_loss_is_that_of_a_target_without_the_other_tokens(name):
    model, batch, heads = make_drafter(), random_batch([[18], [18]], 18), make_target()
    options = dataclasses.replace(LossConfig(name=name), num_anchors=4)

    @jax.jit
    def compute():
        anchors = sample_anchors(batch, options.num_anchors, jax.random.key(0))
        blocks = cut(model, batch, anchors)
        hidden = model.run_blocks(batch, blocks, heads)
        scores = model._score(hidden[:, :, 1:], blocks, batch, heads, options)
        wanted = score_blocks(hidden[:, :, 1:], blocks, batch, MaskedHeads(heads).unembed, options)
        loss, _ = model.loss(batch, heads, jax.random.key(0), options)
        return blocks, scores, wanted, loss

    blocks, scores, wanted, loss = jax.tree.map(np.asarray, compute())
    known = np.isin(blocks.labels, DRAFTED)
    assert known.any()
    assert not known.all()
    np.testing.assert_allclose(scores.nll[known], wanted.nll[known], rtol=1e-5)
    np.testing.assert_allclose(scores.objective[known], wanted.objective[known], rtol=1e-4)
    np.testing.assert_array_equal(scores.correct[known], wanted.correct[known])
    assert not scores.correct[~known].any()
    assert not np.asarray(scores.objective)[~known].any()
    assert np.isfinite(loss)


def test_the_head_is_never_trained():
    model = make_drafter()
    trained, kept = (
        {".".join(map(str, path)) for path in dict(nnx.to_flat_state(state))}
        for state in (states.split(model)[1], states.untrained(model))
    )
    assert kept == {"lm_head.kernel", "d2t", "t2d"}
    assert not trained & kept
    assert trained | kept == {path for path, _ in parameters.named_arrays(model)}


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_table_that_names_other_tokens_is_refused(tmp_path):
    broken = DFlash(make_drafter().shape, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(broken, jax.random.key(1))
    broken.d2t.set_value(broken.d2t.get_value().at[3].set(45))
    with pytest.raises(errors.CheckpointError, match=r"d2t\[3\]: draft token 3 maps to token 48"):
        broken.check_weights(tmp_path)


# --- its size ------------------------------------------------------------------------------------


def test_more_tokens_than_the_target_has_are_refused():
    options = DFlashArchitecture(num_hidden_layers=1, draft_vocab_size=25, target_layer_ids=(0,))
    with pytest.raises(errors.ConfigError, match=r"draft_vocab_size: 25 exceeds .* of 24"):
        DFlashShape.for_target(ARCHITECTURE, options)
    config = DFlash.config_to_hf(make_shape(FULL)) | {"draft_vocab_size": 49}
    with pytest.raises(errors.CheckpointError, match="draft_vocab_size: 49 exceeds"):
        DFlashShape.from_hf(config)


def test_drafters_with_heads_of_their_own_may_have_one():
    shape = DSparkShape.for_target(
        ARCHITECTURE, DSparkArchitecture(num_hidden_layers=1, target_layer_ids=(0,))
    )
    config = shape.to_hf()
    assert DSparkShape.from_hf(config | {"draft_vocab_size": 24}).draft_vocab_size is None
    assert DSparkShape.from_hf(config | {"draft_vocab_size": 9}).draft_vocab_size == 9
