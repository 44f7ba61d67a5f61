"""Block drafters of speculators against its vectors; tests/golden/*_speculators_*/README.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden import check_decoding, golden, golden_models, prefilled
from support.models import greedy
from support.training import observed

CASES = ("dspark_speculators_v96", "qwen3_8_dspark_v96")
CYCLES = range(3)
LOGITS = 1e-4  # absolute
# Relative to the largest entry, and absolute; the target of the second case is sensitive.
OF_TARGET = {"qwen3_8_dspark_v96": (5e-5, 3e-4)}


@functools.cache
def program(case):
    """Drafts after `count` features: hidden states, base and corrected logits, tokens."""
    target, drafter = golden_models(case)

    @jax.jit
    def run(features, count, anchor):
        state = observed(drafter, features, target, count=count, capacity=160)
        hidden, _ = drafter.run_block(state, anchor, count, target)
        hidden = hidden[:, drafter.first_row :]
        base = drafter._unembed(hidden, target)
        proposal, _ = drafter.draft(state, anchor, count, greedy(1), target)
        previous = jnp.concatenate([anchor[:, None], proposal.tokens[:, :-1]], axis=1)
        vectors, _ = drafter.condition(previous, hidden, drafter.fresh_memory(1))
        found = {
            "block_hidden": hidden,
            "block_logits": base,
            "corrected_logits": drafter.corrected(base, vectors),
            "confidence_logits": drafter.confidence(hidden, previous),
            "draft_tokens": proposal.tokens,
        }
        return {name: array[0] for name, array in found.items()}

    return run


@pytest.mark.parametrize("case", CASES)
def test_the_target_s_features(case):
    vectors, (logits, features) = golden(case), prefilled(case, "output_ids")
    _, drafter = golden_models(case)
    assert [i + 1 for i in drafter.feature_layers] == vectors["aux_hidden_state_layer_ids"].tolist()
    count, expected = len(vectors["input_ids"]), vectors["prefill_features"]
    relative, absolute = OF_TARGET.get(case, (2e-5, LOGITS))
    found, bound = features[0, :count], relative * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(logits[0, :count], vectors["prefill_logits"], rtol=0, atol=absolute)


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_drafts(case):
    vectors, (_, features) = golden(case), prefilled(case, "output_ids")
    for cycle in CYCLES:
        position = int(vectors[f"cycle{cycle}_position"])
        anchor = jnp.asarray(vectors["output_ids"][position : position + 1], jnp.int32)
        found = program(case)(features, jnp.array([position]), anchor)
        for name, array in found.items():
            expected = vectors[f"cycle{cycle}_{name}"]
            assert array.shape == expected.shape
            np.testing.assert_allclose(array, expected, rtol=0, atol=LOGITS, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_windows_move_with_the_row(case):
    """As in z-lab's package and SpecForge; in training those of speculators do not."""
    vectors = golden(case)
    features, anchor = vectors["long_context_features"][None], vectors["long_anchor_token"][None]
    count = jnp.array([features.shape[1]])
    found = program(case)(jnp.asarray(features), count, jnp.asarray(anchor, jnp.int32))
    expected = vectors["long_moving_block_logits"]
    np.testing.assert_allclose(found["block_logits"], expected, rtol=0, atol=LOGITS)


@pytest.mark.parametrize("case", CASES)
def test_decoding(case):
    check_decoding(case, *golden_models(case), page_size=16)
