"""Tests of DFlash with causal blocks, JetSpec's head, against vectors of the original code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.dflash_cases import make_config
from support.golden import GOLDEN, TableHeads, golden, load
from support.models import greedy
from support.training import observed

from dflash.drafters.dflash import DFlash
from dflash.drafters.dflash_config import DFlashArchitecture, DFlashShape, LayerView

CASE = "jetspec_v24"
TOLERANCE = 1e-4  # absolute


def drafted(count):
    """Returns the hidden states and tokens of the golden block when `count` tokens are drafted."""
    drafter = load(DFlash, GOLDEN / CASE / "draft")
    inputs = load_file(GOLDEN / CASE / "inputs.safetensors")
    tables = load_file(GOLDEN / CASE / "target_heads.safetensors")
    heads = TableHeads(tables["embed_tokens.weight"], tables["lm_head.weight"])
    features = jnp.asarray(inputs["context_features"])[None]
    rows = jnp.full(1, features.shape[1])

    @jax.jit
    def run(anchor):
        state = observed(drafter, features, heads)
        hidden, _ = drafter.run_block(state, anchor, rows, heads, num_positions=count)
        proposal, _ = drafter.draft_fewer(count, state, anchor, rows, greedy(1), heads)
        return hidden[0], proposal.tokens[0]

    return run(jnp.asarray(inputs["anchor_token"], jnp.int32))


@pytest.mark.parametrize("count", [7, 3])
def test_a_block_is_that_of_the_original_code(count):
    """Fewer rows are the first of all."""
    vectors, (hidden, tokens) = golden(CASE), drafted(count)
    assert len(hidden) == count + 1
    expected = vectors["block_hidden"][: count + 1]
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(tokens, vectors["draft_tokens"][:count])


def test_every_name_of_a_causal_head_is_read():
    for name in ("causal", "causal_head"):
        config = make_config()
        config["dflash_config"][name] = True
        shape = DFlashShape.from_hf(config)
        assert shape.causal
        assert DFlashShape.from_hf(shape.to_hf()) == shape
        assert shape.to_hf()["dflash_config"]["causal_head"]
    assert not DFlashShape.from_hf(make_config()).causal


def test_a_fresh_drafter_may_be_causal():
    target = load(DFlash, GOLDEN / CASE / "draft").shape.decoder
    shape = DFlashShape.for_target(target, DFlashArchitecture(num_hidden_layers=2, causal=True))
    assert shape.views == (LayerView(causal=True),) * 2
