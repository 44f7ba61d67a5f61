"""Tests of DFlash's training pass against golden vectors of the original code."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.dflash_cases import cut
from support.golden import GOLDEN, TableHeads, golden, load
from support.training import loss_and_gradients, whole_rows

from dflash.config.train_schema import LossConfig
from dflash.drafters.dflash import DFlash
from dflash.drafters.parts.blocks import Anchors
from dflash.kernels.anchored_attention import visible_context

CASE = "dflash_train_v32"
DECAY, DPACE, PLAIN = (LossConfig(gamma=7.0), LossConfig(name="dpace"), LossConfig(gamma=0.0))
LOSSES = {"decay": DECAY, "dpace": DPACE, "plain": PLAIN}
GRADIENTS = {
    "fc.weight": "fc.kernel",
    "layers.0.self_attn.k_proj.weight": "layers.0.self_attn.k_proj.kernel",
}


@functools.cache
def golden_case():
    """Returns the drafter, heads, batch and anchors of the golden case."""
    inputs = load_file(GOLDEN / CASE / "inputs.safetensors")
    heads = load_file(GOLDEN / CASE / "target_heads.safetensors")
    batch = whole_rows(inputs["input_ids"], jnp.asarray(inputs["target_features"]))
    batch = dataclasses.replace(batch, loss_mask=jnp.asarray(inputs["loss_mask"]))
    anchors = Anchors(
        jnp.asarray(inputs["anchor_positions"], jnp.int32), jnp.asarray(inputs["anchor_valid"])
    )
    heads = TableHeads(heads["embed_tokens.weight"], heads["lm_head.weight"])
    return load(DFlash, GOLDEN / CASE / "draft"), heads, batch, anchors


def test_golden_blocks():
    drafter, _, batch, anchors = golden_case()
    vectors, blocks = golden(CASE), cut(drafter, batch, anchors)
    np.testing.assert_array_equal(blocks.tokens.reshape(1, -1), vectors["noise_ids"])
    np.testing.assert_array_equal(blocks.labels, vectors["target_ids"][..., 1:])
    np.testing.assert_array_equal(blocks.counted, vectors["weight_mask"][..., 1:])
    positions = jnp.concatenate([batch.positions, blocks.positions.reshape(1, -1)], axis=1)
    np.testing.assert_array_equal(positions, vectors["position_ids"])


def test_golden_mask():
    drafter, _, batch, anchors = golden_case()
    expected = golden(CASE)["attention_mask"][0]
    _, blocks, block = cut(drafter, batch, anchors).tokens.shape
    context = visible_context(anchors.index, batch.segment_ids, 1, None)[0, :, 0]
    own = np.kron(np.diag(np.asarray(anchors.valid[0])), np.ones((block, block), bool))
    ours = np.concatenate([np.repeat(context, block, axis=0), own], axis=1)
    np.testing.assert_array_equal(ours, expected)
    assert expected.shape == (blocks * block, batch.tokens.shape[1] + blocks * block)


def test_golden_hidden_states():
    drafter, heads, batch, anchors = golden_case()
    vectors, blocks = golden(CASE), cut(drafter, batch, anchors)
    hidden = jax.jit(lambda: drafter.run_blocks(batch, blocks, heads))()
    logits = heads.unembed(hidden)
    assert np.isfinite(hidden).all()
    valid = np.asarray(anchors.valid)
    for ours, name in ((hidden, "draft_hidden"), (logits, "draft_logits")):
        expected = vectors[name].reshape(ours.shape)
        np.testing.assert_allclose(ours[valid], expected[valid], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("remat", [False, True])
def test_golden_losses_and_gradients(name, remat):
    drafter, heads, batch, anchors = golden_case()
    vectors = golden(CASE)
    how = {"anchors": anchors, "remat": remat}
    loss, metrics, grads = loss_and_gradients(drafter, batch, heads, None, LOSSES[name], **how)
    np.testing.assert_allclose(loss, vectors[f"loss_{name}"], rtol=1e-5)
    np.testing.assert_allclose(metrics["token_accuracy"], vectors["accuracy"], rtol=1e-6)
    assert float(metrics["blocks"]) == anchors.valid.sum()
    for theirs, ours in GRADIENTS.items():
        if f"grad_{name}/{theirs}" in vectors:
            expected = vectors[f"grad_{name}/{theirs}"].T
            scale = np.abs(expected).max()
            np.testing.assert_allclose(grads[ours], expected, rtol=0, atol=1e-4 * scale)
