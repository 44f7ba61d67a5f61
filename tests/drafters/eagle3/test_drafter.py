"""Tests of EAGLE-3 beside the golden vectors: what it refuses, its vocabulary, its loss."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from support import failure
from support.models import (
    check_same_weights,
    make_architecture,
    make_sharding,
    make_target,
    zeros,
)
from support.training import random_batch

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config.train_schema import LossConfig
from dflash.drafters import eagle3_config
from dflash.drafters.eagle3.drafter import Eagle3
from dflash.drafters.eagle3_config import BeamTree, Eagle3Architecture, Eagle3Config, Eagle3Shape
from dflash.loading import models
from dflash.parallel import parameters

TARGET = make_architecture()
OPTIONS = Eagle3Architecture(draft_vocab_size=20, target_layer_ids=(0, 2))
HF = {
    "architectures": ["LlamaForCausalLMEagle3"], "vocab_size": TARGET.vocab_size,
    "draft_vocab_size": 20, "hidden_size": TARGET.hidden_size, "intermediate_size": 40,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}  # fmt: skip


def create(hf=None, target=TARGET, **options):
    architecture = {} if hf else {"architecture": OPTIONS}
    config = Eagle3Config(**({"training_steps": 3} | architecture | options))
    build = {"dtype": jnp.dtype("float32"), "sharding": make_sharding()}
    return Eagle3.create(config, hf, target, **build)


@functools.cache
def make_drafter():
    model = create()
    model.prepare_training(lambda: np.bincount(range(1, TARGET.vocab_size, 2), minlength=48), None)
    parameters.initialize(model, jax.random.key(1))
    return model


# --- its shape -----------------------------------------------------------------------------------


def test_a_published_config_leaves_much_unsaid():
    shape = create(HF).shape
    assert (shape.decoder.rope_theta, shape.decoder.head_dim) == (10000.0, 8)
    assert shape.target_layer_ids == eagle3_config.default_taps(3)
    assert shape.num_target_layers == 3
    assert Eagle3Shape.from_hf(HF | {"rope_theta": 5e5}).decoder.rope_theta == 5e5
    newer = {"rope_parameters": {"rope_type": "default", "rope_theta": 3e5}}
    assert Eagle3Shape.from_hf(HF | newer).decoder.rope_theta == 3e5
    assert Eagle3Shape.from_hf(HF | {"draft_vocab_size": None}).draft_vocab_size == 48


def test_taps_are_the_inputs_of_layers_low_middle_and_high():
    assert eagle3_config.default_taps(36) == (2 - 1, 18 - 1, 33 - 1)
    assert eagle3_config.default_taps(1) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, r"another target: hidden size 64 \(target: 32\)"),
        ({"vocab_size": 50}, r"another target: vocabulary 50 \(target: 48\)"),
        ({"num_target_layers": 4}, r"number of target layers 4 \(target: 3\)"),
        ({"target_layer_ids": [0, 3]}, r"taps layers \[0, 3\], but the target has 3 layers"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm: true is not supported beside"),
        ({"ptd_token_id": 48}, "mask_token_id: 48 exceeds the vocabulary of 48"),
        ({"mlp_bias": True}, "mlp_bias: true is not supported"),
        ({"swap_h_and_emb": True}, "swap_h_and_emb: true is not supported"),
        ({"truncated_vocab_size": 20}, "truncated_vocab_size: 20 is not supported"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states: 4 is not supported, only 3"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state: false is not"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm: true is not"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step: 4 is not"),
        ({"eagle_config": {"has_gate": 1}}, "eagle_config: has_gate: unknown field"),
        ({"draft_vocab_size": 49}, "draft_vocab_size: 49 exceeds the vocabulary of 48"),
        ({"hidden_size": None}, "config.json: missing hidden_size"),
    ],
)
def test_checkpoints_that_do_not_fit(changes, message):
    assert re.search(message, failure(create, HF | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": Eagle3Architecture(draft_vocab_size=49)}, "49 exceeds the vocabulary"),
        ({"tree": BeamTree(budget=100, top_k=3, depth=2)}, r"tree\.budget: 100 .* 12 drafts"),
        ({"tree": BeamTree(top_k=21)}, "21 exceeds the draft vocabulary of 20 tokens"),
    ],
)
def test_options_that_cannot_be_served(options, message):
    with pytest.raises(errors.ConfigError, match=message):
        create(**options)


# --- its vocabulary ------------------------------------------------------------------------------


def test_the_frequent_tokens_are_drafted_and_the_first_of_equals():
    counts = np.zeros(48, np.int64)
    counts[[40, 3, 17]] = 5, 9, 1
    model = create(architecture=Eagle3Architecture(draft_vocab_size=5))
    model.prepare_training(lambda: counts, None)
    np.testing.assert_array_equal(model.vocabulary().target_ids, [0, 1, 3, 17, 40])
    np.testing.assert_array_equal(np.flatnonzero(model.t2d[...]), [0, 1, 3, 17, 40])
    drafts = np.full(48, 5)
    drafts[[0, 1, 3, 17, 40]] = range(5)
    np.testing.assert_array_equal(model.vocabulary().draft_ids, drafts)


def test_a_whole_vocabulary_counts_nothing():
    model = create(architecture=None)
    model.prepare_training(lambda: pytest.fail("counted"), None)
    np.testing.assert_array_equal(model.vocabulary().target_ids, np.arange(48))
    assert model.t2d is None


@pytest.mark.parametrize("layout", ["hf", "orbax"])
def test_tables_travel_with_the_weights(tmp_path, layout):
    model = make_drafter()
    config = Eagle3.config_to_hf(model.shape)
    count = checkpoint.save(model, tmp_path / "out", config, layout=layout)
    assert count == len(list(parameters.named_arrays(model)))
    assert checkpoint.stored_dtype(tmp_path / "out") == jnp.float32
    again = create(checkpoint.read_config(tmp_path / "out"))
    checkpoint.load(again, tmp_path / "out")
    np.testing.assert_array_equal(again.vocabulary().target_ids, np.arange(1, 40, 2))
    check_same_weights(again, model)


@pytest.mark.parametrize(
    ("draft", "offset", "message"),
    [
        (3, 45, r"d2t\[3\]: draft token 3 maps to token 48; expected distinct tokens in \[0, 48\)"),
        (0, -1, r"d2t\[0\]: draft token 0 maps to token -1"),
        (4, 3, r"d2t\[4\]: draft token 4 maps to token 7"),  # that of draft token 3
        (19, 2**31 - 1, r"d2t\[19\]: draft token 19 maps to token 2147483666"),
    ],
)
def test_a_table_that_names_other_tokens_is_refused(tmp_path, draft, offset, message):
    model = create()
    model.prepare_training(lambda: np.bincount(range(1, TARGET.vocab_size, 2), minlength=48), None)
    model.check_weights(tmp_path)
    model.d2t.set_value(model.d2t.get_value().at[draft].set(offset))
    assert re.match(f"{tmp_path}: {message}", failure(model.check_weights, tmp_path))


def test_tables_are_checked_when_weights_are_loaded(tmp_path):
    model, directory = make_drafter(), tmp_path / "out"
    checkpoint.save(model, directory, Eagle3.config_to_hf(model.shape))
    source = models.Source(directory, checkpoint.read_config(directory), 0)
    again = create(source.hf)
    models.load_weights(again, source)
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors["d2t"][5] = 1000
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")
    with pytest.raises(errors.CheckpointError, match=r"d2t\[5\]"):
        models.load_weights(create(source.hf), source)


def test_a_weight_stored_as_integers_is_refused(tmp_path):
    model, directory = make_drafter(), tmp_path / "out"
    checkpoint.save(model, directory, Eagle3.config_to_hf(model.shape))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    for name, dtype, message in [
        ("norm.weight", np.int64, "is I64, expected one of F32, F16, BF16; its config"),
        ("d2t", np.float32, "is F32, expected one of I64, I32, BOOL"),
    ]:
        safetensors.numpy.save_file(
            tensors | {name: tensors[name].astype(dtype)}, directory / "model.safetensors"
        )
        with pytest.raises(errors.CheckpointError, match=f"'{name}' {message}"):
            checkpoint.load(create(checkpoint.read_config(directory)), directory)


# --- its loss ------------------------------------------------------------------------------------


LENGTH = 24
make_batch = functools.partial(random_batch, length=LENGTH, share=0.7)


@functools.cache
def compiled_loss(options):
    model, heads = make_drafter(), make_target()
    return jax.jit(lambda batch: model.loss(batch, heads, None, options))


def run_loss(batch, options):
    return compiled_loss(options)(batch)


def part(batch, begin, size):
    """Returns a batch with only one document, at the start of a row."""

    def cut(array):
        rows = array[:, begin : begin + size]
        return jnp.pad(rows, [(0, 0), (0, LENGTH - size)] + [(0, 0)] * (array.ndim - 2))

    batch = jax.tree.map(cut, batch)
    return dataclasses.replace(batch, segment_ids=(batch.segment_ids != 0).astype(jnp.int32))


LOSSES = {
    "soft": LossConfig(name="kl"),
    "hard": LossConfig(),
    "both": LossConfig(name="kl", kl_weight=0.3, gamma=0.0, temperature=0.7),
}


@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_packed_documents_are_learnt_as_each_alone(options):
    batch = make_batch([[9, 11]])
    alone = [run_loss(part(batch, begin, size), options) for begin, size in [(0, 9), (9, 11)]]
    value, metrics = run_loss(batch, options)
    weights = np.array([m["weight"] for _, m in alone])
    assert metrics["weight"] == weights.sum() > 0
    mean = np.average([value for value, _ in alone], weights=weights)
    np.testing.assert_allclose(value, mean, rtol=1e-5)


def test_the_loss_spelled_out():
    """Row by row and step by step, from the outputs of the unrolled layer."""
    batch, model, heads = make_batch([[9, 11]]), make_drafter(), make_target()
    hidden = jax.jit(lambda: model.unroll(batch, heads))()
    ids = np.asarray(model.vocabulary().target_ids)
    target = np.asarray(heads.unembed(batch.hidden), np.float64)[0]
    tokens, mask, segments = (
        np.asarray(x[0]) for x in (batch.tokens, batch.loss_mask, batch.segment_ids)
    )
    spelled = {"soft": 1.0, "warm": 2.0}  # Temperature of each.
    totals, starts, right = {"soft": 0.0, "warm": 0.0, "hard": 0.0}, 0, []
    for i in range(LENGTH):
        for step in range(3):
            at = i + 2 + step  # of the token that is predicted
            if not (at < LENGTH and segments[at] == segments[i] != 0 and mask[at]):
                continue
            starts += step == 0
            logits = np.asarray(model.draft_logits(hidden[step][:, i]), np.float64)[0]
            logs = logits - np.log(np.exp(logits).sum())
            for name, temperature in spelled.items():
                teacher = np.exp(target[at - 1][ids] / temperature)
                cooled = logits / temperature
                cross = np.sum(teacher / teacher.sum() * (cooled - np.log(np.exp(cooled).sum())))
                if target[at - 1].argmax() in ids:
                    totals[name] -= 0.8**step * cross
            if tokens[at] in ids:
                totals["hard"] -= 0.8**step * logs[ids.tolist().index(tokens[at])]
            right.append(ids[logits.argmax()] == tokens[at])
    for name, total in totals.items():
        losses = LOSSES | {"warm": LossConfig(name="kl", temperature=2.0)}
        value, metrics = run_loss(batch, losses[name])
        np.testing.assert_allclose(value, total / starts, rtol=1e-5)
    np.testing.assert_allclose(metrics["token_accuracy"], np.mean(right), rtol=1e-6)


def test_losses_that_it_does_not_know():
    batch = make_batch([[20]])
    with pytest.raises(errors.ConfigError, match=r"loss\.name: 'dpace' is only for block drafters"):
        run_loss(batch, LossConfig(name="dpace"))
    with pytest.raises(ValueError, match="lacks the target's hidden states"):
        run_loss(dataclasses.replace(batch, hidden=None), LossConfig(name="kl"))


def test_the_first_output_observed_is_the_first_that_training_sees():
    """The two passes over true features agree, row by row."""
    batch, model, heads = make_batch([[LENGTH]]), make_drafter(), make_target()

    @jax.jit
    def both():
        state = zeros(model.init_state(1, 32))
        tokens = jnp.pad(batch.tokens, ((0, 0), (0, 1)))
        start, outputs = jnp.zeros(1, jnp.int32), []
        for begin, size in [(0, 10), (10, 5)]:  # of which some rows do not count
            count = jnp.array([size])
            rows = slice(begin, begin + size + 2)
            state = model.observe(
                state, start + begin, tokens[:, rows.start : rows.stop + 1], count,
                batch.features[:, rows], heads,
            )  # fmt: skip
            outputs.append(state.hidden[0])
        return jnp.stack(outputs), model.unroll(batch, heads)[0]

    outputs, unrolled = both()
    np.testing.assert_allclose(outputs, unrolled[0, np.array([9, 14])], rtol=1e-4, atol=1e-5)
