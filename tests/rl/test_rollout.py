"""Tests of the rollout engine, against Tunix's models, their forward pass and their LoRA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash import errors

pytest.importorskip("tunix", reason="needs google-tunix: pip install 'dflash-jax[rl]'")

from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common
from tunix.rl.rollout.base_rollout import RolloutConfig

from dflash.inference.request import RequestOutput
from dflash.offline.decoding import decode
from dflash.rl import DFlashRollout
from dflash.sampling import Sampling

ARCHITECTURE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 1e6,  # Tunix rotates with this base, whatever its config says.
}
TARGET = {"name": "qwen3", "checkpoint": "random", "architecture": ARCHITECTURE}
PROMPTS = ["What is 1 + 2?"] * 3 + ["A much longer question: how many pens are there?"]
EOS = [65, 80, 1]  # Padding too, which Tunix does not see in the middle of a completion.


class ByteTokenizer:
    """Bytes as tokens, which the target reads too without a checkpoint."""

    def __init__(self, shift: int = 0):
        self._shift = shift

    def encode(self, text: str) -> list[int]:
        return [(byte + self._shift) % 256 for byte in text.encode()]

    def decode(self, ids) -> str:
        return bytes((token - self._shift) % 256 for token in ids).decode(errors="replace")

    def bos_id(self) -> int:
        return 0

    def eos_id(self) -> int:
        return EOS[0]

    def pad_id(self) -> int:
        return 1


def policy(seed: int = 0, **changes) -> qwen3.Qwen3:
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=256,
        embed_dim=32,
        hidden_dim=48,
        num_heads=4,
        head_dim=16,
        num_kv_heads=2,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        **changes,
    )
    model = qwen3.Qwen3(config, rngs=nnx.Rngs(seed))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "kernel" in map(str, path):  # Tunix begins with zeros.
            key = jax.random.key(sum(map(ord, "".join(map(str, path)))) + seed)
            leaf.set_value(0.2 * jax.random.normal(key, leaf.get_value().shape))
    return model


def rollout(actor=None, drafter: str = "ngram", tokenizer=None, **options) -> DFlashRollout:
    found = {"target": TARGET, "drafter": {"name": drafter}, "dtype": "float32"} | options
    config = RolloutConfig(
        max_prompt_length=64,
        max_tokens_to_generate=24,
        rollout_vllm_additional_config={"dflash": {"decode": {"batch_size": 4, "page_size": 8}}},
    )
    words = TokenizerAdapter(tokenizer or ByteTokenizer())
    return DFlashRollout(
        rollout_actor=actor or policy(), tokenizer=words, rollout_config=config, dflash=found
    )


@functools.cache
def engines() -> dict[str, DFlashRollout]:
    return {name: rollout(drafter=name) for name in ("none", "ngram")}


def sampled(**changes) -> RolloutConfig:
    options = {"max_tokens_to_generate": 24, "temperature": 0.9, "seed": 3, "eos_tokens": EOS}
    return RolloutConfig(max_prompt_length=64, return_logprobs=True, **(options | changes))


def padded(output) -> jax.Array:
    return jnp.array([np.pad(ids, (0, 24 - len(ids)), constant_values=1) for ids in output.tokens])


def tunix_logps(model, output, temperature=1.0) -> np.ndarray:
    """Log-probabilities by Tunix's own forward pass."""
    graph, state = nnx.split(model)
    prompts = jnp.array(output.left_padded_prompt_tokens)
    how = {"pad_id": 1, "eos_id": EOS[0], "temperature": temperature}
    return np.asarray(common.compute_per_token_logps(graph, state, prompts, padded(output), **how))


def check_logps(found, wanted, output) -> None:
    for row, other, ids in zip(found, wanted, output.tokens, strict=True):
        np.testing.assert_allclose(row[: len(ids)], other[: len(ids)], atol=1e-4)


def test_rollouts_are_the_same_with_a_drafter_and_without_one():
    """Before and after new weights; their log-probabilities are those of Tunix."""
    config = sampled()
    for seed in (0, 5):
        model = policy(seed)
        outputs = {}
        for name, engine in engines().items():
            engine.update_params(nnx.state(model, nnx.Param))
            outputs[name] = engine.generate(PROMPTS, config)
        plain, drafted = outputs["none"], outputs["ngram"]
        for one, other in zip(plain.tokens, drafted.tokens, strict=True):
            np.testing.assert_array_equal(one, other)
        assert plain.text == drafted.text
        assert len({ids.tobytes() for ids in plain.tokens}) == 4  # Each draws with its own noise.
        assert all(len(ids) == 24 or ids[-1] in EOS for ids in plain.tokens)
        check_logps(drafted.logprobs, tunix_logps(model, drafted, 0.9), drafted)
        prompts = jnp.array(drafted.left_padded_prompt_tokens)
        found = engines()["ngram"].get_per_token_logps(prompts, padded(drafted))
        check_logps(np.asarray(found), tunix_logps(model, drafted), drafted)


def test_a_resumed_run_draws_with_other_noise():
    def completions(engine, seed):
        output = engine.generate(PROMPTS[:3], sampled(seed=seed))
        return {tuple(map(int, ids)) for ids in output.tokens}

    first, resumed = rollout(), rollout()
    assert completions(first, None).isdisjoint(completions(resumed, None))
    repeated, other = completions(first, 3), completions(resumed, 3)
    assert first.num_sequences == 6
    goes_on = rollout(num_sequences=first.num_sequences)
    assert repeated == other
    assert repeated.isdisjoint(completions(goes_on, 3))


def test_prompts_are_padded_on_the_left():
    output = engines()["none"].generate(["ab", "a" * 70], sampled(max_tokens_to_generate=1))
    rows = output.left_padded_prompt_tokens
    assert rows.shape == (2, 128)
    assert rows[0, -3:].tolist() == [1, 97, 98]
    assert (rows[0, :-2] == 1).all()
    assert engines()["none"].generate([], sampled()).tokens == []


def test_equal_prompts_share_a_prefill():
    """All but the last page of the prompt, and the page that is being filled."""
    llm = engines()["ngram"].llm
    _, engine, requests = llm._prepare([list(b"x" * 40)] * 4, Sampling(max_tokens=8))
    done = [event for event in decode(engine, requests) if isinstance(event, RequestOutput)]
    assert sorted(one.cached_tokens for one in done) == [0, 32, 32, 32]


def test_lora_is_merged():
    import qwix

    model = policy(2)
    provider = qwix.LoraProvider(module_path=".*q_proj|.*up_proj", rank=4, alpha=8.0)
    tokens = jnp.ones((1, 4), jnp.int32)
    inputs = {"positions": tokens, "cache": None, "attention_mask": jnp.ones((1, 4, 4), bool)}
    lora = qwix.apply_lora_to_model(model, provider, tokens, **inputs, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(nnx.state(lora, nnx.LoRAParam)):
        leaf.set_value(jnp.asarray(0.1 * rng.normal(size=leaf.get_value().shape), jnp.float32))
    engine = rollout(lora, lora_alpha=8.0)
    output = engine.generate(PROMPTS, sampled(temperature=1.0))
    check_logps(output.logprobs, tunix_logps(lora, output), output)
    state = nnx.state(lora, nnx.LoRAParam)
    for _, leaf in nnx.to_flat_state(state):
        leaf.set_value(2 * leaf.get_value())
    engine.update_params(state, (nnx.LoRAParam,))
    output = engine.generate(PROMPTS, sampled(temperature=1.0))
    check_logps(output.logprobs, tunix_logps(lora, output), output)


def test_statistics_belong_to_the_weights():
    engine = rollout()
    engine.generate(PROMPTS, sampled())
    assert engine.stats.tau >= 1.0
    assert engine.metrics()["rollout/tau"][0] == engine.stats.tau
    engine.update_params(nnx.state(policy(), nnx.Param))
    assert len(engine.history) == 1
    assert engine.stats.tokens == 0


def test_a_step_reuses_the_log_probability_pass_and_states_its_share():
    architecture = {
        "num_hidden_layers": 1,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "target_layer_ids": [0, 1],
        "block_size": 4,
    }
    drafter = {"name": "dflash", "checkpoint": "random", "architecture": architecture}
    options = {
        "train": {"every": 1, "below": 2, "steps": 2, "batch_size": 2},
        "loss": {"num_anchors": 8},
    }
    config = sampled(eos_tokens=[65])
    words = TokenizerAdapter(ByteTokenizer())
    given = {"target": TARGET, "drafter": drafter, "dtype": "float32"} | options
    engine = DFlashRollout(policy(), words, rollout_config=config, dflash=given)
    for scores in (False, True):
        output = engine.generate(PROMPTS, config)
        if scores:
            prompts = jnp.array(output.left_padded_prompt_tokens)
            engine.get_per_token_logps(prompts, padded(output))
        engine.update_params(nnx.state(policy(), nnx.Param))
    first, second = engine.history
    assert (first.training["reused"], second.training["reused"]) == (0.0, 1.0)
    assert 0 < second.training_share < 1
    assert engine.metrics()["rollout/training_share"][0] == second.training_share


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": ByteTokenizer(1)}, "the trainer's tokenizer is not that of target.checkp"),
        ({"mesh": {"tensor": 64}}, "mesh"),
        ({"target": TARGET | {"nmae": "qwen3"}}, "nmae"),
    ],
)
def test_bad_options_take_one_line(options, message):
    with pytest.raises(errors.UserError, match=message) as caught:
        rollout(**options)
    assert len(str(caught.value).splitlines()) == 1


def test_options_must_name_a_target():
    with pytest.raises(errors.ConfigError, match="expected options such as dflash="):
        DFlashRollout(policy(), TokenizerAdapter(ByteTokenizer()), rollout_config=RolloutConfig())


def test_weights_with_nan_are_refused_and_the_old_ones_stay():
    engine, config = engines()["none"], sampled(temperature=0.0)
    engine.update_params(nnx.state(policy(), nnx.Param))
    before = engine.generate(PROMPTS, config).text
    model = policy(3)
    model.final_norm.w.set_value(model.final_norm.w.get_value().at[0].set(jnp.nan))
    with pytest.raises(errors.CheckpointError, match=r"NaN or infinite numbers: 'final_norm.w'"):
        engine.update_params(nnx.state(model, nnx.Param))
    assert engine.generate(PROMPTS, config).text == before
