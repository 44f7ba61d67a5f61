"""Block drafters of speculators against its vectors; tests/golden/*_speculators_*/README.md."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.golden import golden, golden_models
from support.models import greedy, make_cache, zeros

from dflash.config.schema import DecodeConfig
from dflash.inference.engine import Engine
from dflash.inference.request import Request, RequestOutput
from dflash.offline.decoding import decode

CASES = ("dspark_speculators_v96", "qwen3_8_dspark_v96")
CYCLES = range(3)
LOGITS = 1e-4  # absolute
# Relative to the largest entry, and absolute; the target of the second case is sensitive.
OF_TARGET = {"qwen3_8_dspark_v96": (5e-5, 3e-4)}


@functools.cache
def prefilled(case):
    """Features and logits of all tokens of a case."""
    target, drafter = golden_models(case)
    ids = jnp.asarray(golden(case)["output_ids"], jnp.int32)[None]

    @jax.jit
    def run():
        positions, cache = jnp.arange(ids.shape[1])[None], make_cache(target, 1, ids.shape[1])
        output = target(ids, positions, cache, feature_layers=drafter.feature_layers)
        return output.features, target.unembed(output.hidden)[0]

    return run()


@functools.cache
def program(case):
    """Drafts after `count` features: hidden states, base and corrected logits, tokens."""
    target, drafter = golden_models(case)

    @jax.jit
    def run(features, count, anchor):
        state, start = zeros(drafter.init_state(1, 160)), jnp.zeros(1, jnp.int32)
        tokens = jnp.zeros((1, features.shape[1] + 1), jnp.int32)
        state = drafter.observe(state, start, tokens, count, features, target)
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
    vectors, (features, logits) = golden(case), prefilled(case)
    _, drafter = golden_models(case)
    assert [i + 1 for i in drafter.feature_layers] == vectors["aux_hidden_state_layer_ids"].tolist()
    count, expected = len(vectors["input_ids"]), vectors["prefill_features"]
    relative, absolute = OF_TARGET.get(case, (2e-5, LOGITS))
    found, bound = features[0, :count], relative * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=bound)
    np.testing.assert_allclose(logits[:count], vectors["prefill_logits"], rtol=0, atol=absolute)


@pytest.mark.parametrize("case", CASES)
def test_blocks_and_drafts(case):
    vectors, (features, _) = golden(case), prefilled(case)
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
    vectors, (target, drafter) = golden(case), golden_models(case)
    prompt = tuple(vectors["input_ids"].tolist())
    engine = Engine(target, drafter, DecodeConfig(page_size=16), max_length=len(prompt) + 64)
    events = list(decode(engine, [Request(0, prompt, 64)]))
    (done,) = [event for event in events if isinstance(event, RequestOutput)]
    expected = vectors["output_ids"][len(prompt) :].tolist()
    assert list(done.output_ids[: len(expected)]) == expected
    lengths = vectors["acceptance_lengths"].tolist()
    assert list(done.acceptance_lengths[: len(lengths)]) == lengths
