"""EAGLE-3 against vectors of the original PyTorch code; tests/golden/eagle3_*/README.md."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from support.golden import (
    GOLDEN,
    build_drafter,
    check_decoding,
    decode_prompts,
    golden,
    load_target,
)
from support.models import greedy, make_cache, make_sharding
from support.training import observed, whole_rows

from dflash.config.train_schema import LossConfig
from dflash.drafters.eagle3 import unrolled
from dflash.drafters.eagle3.drafter import Eagle3
from dflash.drafters.eagle3_config import BeamTree, Eagle3Config
from dflash.inference.cycle import tree
from dflash.parallel import parameters

CASES = ("eagle3_llama_v40", "eagle3_qwen3_v24")
OF_SPECULATORS = ("eagle3_speculators_llama_v96", "eagle3_speculators_qwen3_v80")
TRAINING = "eagle3_train_v32"
LOGITS, HIDDEN = 1e-4, 2e-5  # absolute; relative to the largest entry
LENGTH = 64  # of the padded sequences here


@functools.cache
def target(case):
    return load_target(GOLDEN / case / "target")


def drafter(case, **options) -> Eagle3:
    config = Eagle3Config(checkpoint=str(GOLDEN / case / "draft"), **options)
    return build_drafter(config, target(case).arch)


def beam_tree(case) -> BeamTree:
    """Converts the original's sizes, which exclude the first level and include the anchor."""
    top_k, depth, total = map(int, golden(case)["tree_params"])
    return BeamTree(budget=total - 1, top_k=top_k, depth=depth + 1)


def assert_close(actual, expected, tolerance=HIDDEN):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


class Steps:
    """Jitted steps of a golden case's drafter, after some committed tokens."""

    def __init__(self, case, model):
        self.case, self.model = case, model
        self.draft = jax.jit(self._draft)
        self.trace = jax.jit(self._trace)

    def _observe(self, ids, count):
        """Observes ids int32 [1, LENGTH + 1] before position `count`, that of the anchor."""
        model, heads = self.model, target(self.case)
        output = heads(
            ids[:, :-1], jnp.arange(LENGTH)[None], make_cache(heads, 1, LENGTH),
            feature_layers=model.feature_layers,
        )  # fmt: skip
        features, start = output.features, jnp.zeros(1, jnp.int32)
        state = observed(model, features, heads, count=count[None], tokens=ids, capacity=LENGTH)
        embedded = heads.embed(ids[:, 1:])
        hidden, _ = model.run(model.project(features), embedded, state.cache, start)
        return state, features, hidden

    def _draft(self, ids, count):
        state, _, _ = self._observe(ids, count)
        heads = target(self.case)
        return self.model.draft(state, ids[:, count], count[None], greedy(1), heads)[0]

    def _trace(self, ids, count, drafts):
        """Returns features and first pass of the prompt, and states and logits along drafts."""
        state, features, first_pass = self._observe(ids, count)
        hidden, cache = state.hidden[:, None], state.cache
        states, logits = [], []
        for step in range(drafts.shape[0]):
            states.append(hidden[0, 0])
            logits.append(self.model.draft_logits(hidden)[0, 0])
            embedded = target(self.case).embed(drafts[None, step : step + 1])
            hidden, cache = self.model.run(hidden, embedded, cache, count[None] + step)
        return features[0], first_pass[0], jnp.stack(states), jnp.stack(logits)


def padded(ids):
    assert len(ids) <= LENGTH + 1
    return jnp.asarray(np.pad(ids, (0, LENGTH + 1 - len(ids)))[None], jnp.int32)


@pytest.mark.parametrize("case", CASES)
def test_a_chain_step_by_step(case):
    vectors, model = golden(case), drafter(case, num_draft_tokens=6)
    steps, ids = Steps(case, model), padded(vectors["chain6_cycle_ids"])
    count = len(vectors["input_ids"])
    drafts = jnp.asarray(vectors["chain_tokens"], jnp.int32)
    features, first_pass, states, logits = steps.trace(ids, jnp.int32(count), drafts)
    # hidden_states[i] of transformers enters layer i, and leaves layer i - 1.
    assert [i + 1 for i in model.feature_layers] == vectors["feature_layer_ids"].tolist()
    assert_close(features[:count], vectors["prefill_features"])
    assert_close(first_pass[:count], vectors["chain_prefill_hidden"])
    assert_close(states, vectors["chain_hidden"])
    np.testing.assert_allclose(logits, vectors["chain_logits"], rtol=0, atol=LOGITS)

    assert steps.draft(ids, jnp.int32(count)).tokens[0].tolist() == drafts.tolist()
    later = jnp.int32(count + vectors["chain6_accept_lengths"][0] + 1)
    anchor, *drafts = vectors["chain_cycle1_tokens"].tolist()
    assert ids[0, later] == anchor
    assert steps.draft(ids, later).tokens[0].tolist() == drafts


@pytest.mark.parametrize("case", OF_SPECULATORS)
def test_cycles_of_speculators(case):
    vectors, model = golden(case), drafter(case)
    steps, ids = Steps(case, model), padded(vectors["output_ids"])
    assert [i + 1 for i in model.feature_layers] == vectors["aux_hidden_state_layer_ids"].tolist()
    for cycle in range(4):
        position, drafts, logits, hidden = (
            vectors[f"cycle{cycle}_{name}"]
            for name in ("position", "draft_tokens", "draft_logits", "draft_hidden")
        )
        count = jnp.asarray(position, jnp.int32)
        features, first_pass, found, scores = steps.trace(ids, count, jnp.asarray(drafts))
        if cycle == 0:
            assert_close(features[:count], vectors["prefill_features"])
            assert_close(first_pass[:count], vectors["cycle0_first_pass_hidden"])
        assert_close(found, hidden)
        np.testing.assert_allclose(scores, logits, rtol=0, atol=LOGITS)
        assert steps.draft(ids, count).tokens[0].tolist() == drafts.tolist()


def paths(anchor, drafts, ancestry, depth) -> list[tuple[int, ...]]:
    """The tokens on the way to each row, whose order differs: the original's is that of growth."""
    tokens, depth = np.array([anchor, *drafts]), np.asarray(depth)
    found = []
    for row, mask in enumerate(np.asarray(ancestry, bool)):
        way = np.flatnonzero(mask)
        way = way[np.argsort(depth[way])]
        assert way[-1] == row
        assert depth[way].tolist() == list(range(len(way)))
        found.append(tuple(tokens[way].tolist()))
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_structure_of_trees(case):
    vectors = golden(case)
    steps = Steps(case, drafter(case, tree=beam_tree(case)))
    ids = padded(vectors["tree_cycle_ids"][: LENGTH + 1])
    count = len(vectors["input_ids"])
    for cycle in range(3):
        anchor, *drafts = vectors[f"cycle{cycle}_draft_tokens"][0].tolist()
        assert ids[0, count] == anchor
        proposal = steps.draft(ids, jnp.int32(count))
        rows = jax.jit(tree.from_parents)(proposal.parents)
        drafted, ancestry, depth = (
            np.asarray(x)[0] for x in (proposal.tokens, rows.ancestry, rows.depth)
        )
        mine = paths(anchor, drafted, ancestry, depth)
        mask, depth = (vectors[f"cycle{cycle}_tree_{name}"] for name in ("mask", "position_ids"))
        assert sorted(mine) == sorted(paths(anchor, drafts, mask[0, 0], depth))
        count += int(vectors["tree_accept_lengths"][cycle]) + 1


def decoded(case, model):
    """The prompt of a case, and what the engine makes of it."""
    config = {"page_size": 16, "prefill_chunk": 16}
    (done,) = decode_prompts(case, target(case), model, num_tokens=60, **config)
    return tuple(golden(case)["input_ids"].tolist()), done


@pytest.mark.parametrize("case", OF_SPECULATORS)
def test_decoding_with_files_of_speculators(case):
    check_decoding(case, target(case), drafter(case), page_size=16, prefill_chunk=16)


@pytest.mark.parametrize(
    "settings",
    [{"mask_token_id": 3, "embed_requires_grad": True}, {"norm_output": True, "fc_norm": True}],
)
@pytest.mark.parametrize("layers", [1, 2])
def test_random_drafters_of_other_settings_change_no_token(settings, layers):
    case = "eagle3_speculators_qwen3_v80"
    shape = drafter(case).shape
    decoder = dataclasses.replace(shape.decoder, num_hidden_layers=layers)
    settings |= {"decoder": decoder, "norm_before_fc": False, "layer_windows": (9, None)[:layers]}
    build = {"dtype": jnp.dtype("float32"), "sharding": make_sharding()}
    model = Eagle3(dataclasses.replace(shape, **settings), **build)
    parameters.init_fast_random(model, 0)
    prompt, done = decoded(case, model)
    plain = golden(case)["autoregressive_output_ids"][len(prompt) :].tolist()
    assert list(done.output_ids[: len(plain)]) == plain


@pytest.mark.parametrize("how", ["chain5", "chain6", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_decoding(case, how):
    vectors = golden(case)
    options = {"tree": beam_tree(case)} if how == "tree" else {"num_draft_tokens": int(how[-1])}
    prompt, done = decoded(case, drafter(case, **options))
    # A cycle of the original gives its anchor and what was accepted; ours that, and the next one.
    expected = vectors[f"{how}_cycle_ids"][len(prompt) :].tolist()
    accepted = vectors[f"{how}_accept_lengths"].tolist()
    assert list(done.output_ids[: len(expected)]) == expected
    assert [n - 1 for n in done.acceptance_lengths[: len(accepted)]] == accepted
    plain = vectors["greedy_output_ids"][len(prompt) :].tolist()
    assert list(done.output_ids[: len(plain)]) == plain


@functools.cache
def training_case():
    """Returns the module, batch and heads of the training vectors, in this code's conventions.

    The batch is a row longer: the last real row predicts a token that the vectors do not have, and
    a token counts where the original masks the row two before it.
    """
    inputs = safetensors.numpy.load_file(GOLDEN / TRAINING / "inputs.safetensors")

    def pad(name, dtype):
        array = inputs[name].astype(dtype)
        return jnp.asarray(np.pad(array, [(0, 0), (0, 1)] + [(0, 0)] * (array.ndim - 2)))

    names = ("input_ids", "target_features", "target_logits", "loss_mask")
    *arrays, mask = (pad(name, np.float32) for name in names)
    batch = dataclasses.replace(whole_rows(*arrays), loss_mask=unrolled.shift(mask, -2))
    heads = types.SimpleNamespace(table_rows=target(TRAINING).embed, unembed=lambda logits: logits)
    return drafter(TRAINING), batch, heads


def test_training_steps():
    """Hidden states and logits, and the loss, of each."""
    vectors, (model, batch, heads) = golden(TRAINING), training_case()
    rows = vectors["step_hidden"].shape[2]
    options = LossConfig(name="kl")

    @jax.jit
    def run():
        hidden = model.unroll(batch, heads)
        scores = unrolled.score_steps(
            hidden, batch, model.vocabulary(), model.draft_logits, heads.unembed, options
        )
        counted = unrolled.counted_steps(batch, model.training_steps) & scores.known
        losses = jnp.sum(jnp.where(counted, scores.objective, 0), axis=(0, 1)) / rows
        return jnp.stack(hidden), model.draft_logits(jnp.stack(hidden)), losses

    hidden, logits, losses = run()
    assert_close(hidden[:, :, :rows], vectors["step_hidden"])
    np.testing.assert_allclose(logits[:, :, :rows], vectors["step_logits"], rtol=0, atol=LOGITS)
    np.testing.assert_allclose(losses, vectors["step_losses"], rtol=1e-5)


@pytest.mark.parametrize("remat", [False, True])
def test_training_loss_and_gradients(remat):
    vectors, (model, batch, heads) = golden(TRAINING), training_case()
    rows = vectors["step_hidden"].shape[2]
    graph, params, tables = nnx.split(model, nnx.Param, parameters.Buffer)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        merged = nnx.merge(graph, params, tables)
        value, metrics = merged.loss(batch, heads, None, LossConfig(name="kl"), remat=remat)
        # The original divides by all rows, this code by those that count in the first step.
        return value * metrics["weight"] / rows

    value, grads = loss(params)
    np.testing.assert_allclose(value, vectors["total_loss"], rtol=1e-5)
    found = {
        model.checkpoint_name(".".join(map(str, path))): leaf.get_value().T
        for path, leaf in nnx.to_flat_state(grads)
    }
    for name in [name for name in vectors if name.startswith("grad/")]:
        assert_close(found[name.removeprefix("grad/")], vectors[name], 1e-4)
