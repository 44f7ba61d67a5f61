"""Tests of weights from the models of Tunix, by their own forward pass: families and LoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding

pytest.importorskip("tunix", reason="needs google-tunix: pip install 'dflash-jax[rl]'")

import qwix
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common

from dflash.config.schema import TargetArchitecture
from dflash.inference import weight_update
from dflash.models.gemma3 import Gemma3
from dflash.models.gemma3_config import Gemma3Architecture
from dflash.models.qwen2 import Qwen2
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.models.qwen3_moe_config import Qwen3MoeArchitecture
from dflash.parallel import parameters
from dflash.rl.logps import TokenLogps

PAD, ALPHA, RANK = 0, 6.0, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
}
SHAPE = {
    "num_layers": 2,
    "embed_dim": 32,
    "hidden_dim": 48,
    "num_heads": 4,
    "head_dim": 16,
    "num_kv_heads": 2,
}
QWEN = SHAPE | {"vocab_size": 64, "rope_theta": 1_000_000, "norm_eps": 1e-6}


def qwen2_pair():
    arch = TargetArchitecture(**SIZES)
    return qwen2.Qwen2(qwen2.ModelConfig(**QWEN), rngs=nnx.Rngs(0)), Qwen2, arch


def moe_pair():
    config = qwen3.ModelConfig(**QWEN, num_experts=4, num_experts_per_tok=2)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    arch = Qwen3MoeArchitecture(**SIZES, **experts, norm_topk_prob=True)
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0)), Qwen3Moe, arch


def gemma_pair(num_kv_heads: int = 2):
    """Six layers, the last of which has no window; equal numbers of heads are one einsum."""
    layers = {"num_layers": 6, "num_kv_heads": num_kv_heads}
    bases = {"local_base_frequency": 10_000, "global_base_frequency": 1_000_000}
    windows = {"num_embed": 64, "sliding_window_size": 5, "param_dtype": jnp.float32}
    config = gemma3.ModelConfig(**SHAPE | layers | bases | windows)
    own = {"num_hidden_layers": 6, "num_key_value_heads": num_kv_heads, "sliding_window": 5}
    kinds = ("sliding_attention",) * 5 + ("full_attention",)
    shared = {"layer_types": kinds, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
    arch = Gemma3Architecture(**SIZES | own | shared)
    return gemma3.Gemma3(config, rngs=nnx.Rngs(0)), Gemma3, arch


PAIRS = {
    "qwen2": qwen2_pair,
    "qwen3-moe": moe_pair,
    "gemma3": gemma_pair,
    "gemma3-qkv": lambda: gemma_pair(4),
}


def randomize(model, kind) -> None:
    rng = np.random.default_rng(0)
    for _, leaf in nnx.to_flat_state(nnx.state(model, kind)):
        shape = leaf.get_value().shape
        leaf.set_value(jnp.asarray(0.2 * rng.normal(size=shape), jnp.float32))


def with_lora(model):
    provider = qwix.LoraProvider(module_path=".*attn.*|.*up_proj", rank=RANK, alpha=ALPHA)
    tokens = jnp.ones((1, 4), jnp.int32)
    inputs = {"positions": tokens, "cache": None, "attention_mask": jnp.ones((1, 4, 4), bool)}
    lora = qwix.apply_lora_to_model(model, provider, tokens, **inputs, rngs=nnx.Rngs(0))
    randomize(lora, nnx.LoRAParam)
    return lora


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("name", PAIRS)
def test_log_probabilities_are_those_of_tunix(name, lora):
    model, kind, arch = PAIRS[name]()
    randomize(model, nnx.Param)
    if lora:
        model = with_lora(model)
    target = kind(arch, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(target, jax.random.key(1))
    weight_update.update(target, model, lora_alpha=ALPHA if lora else None)
    rng = np.random.default_rng(1)
    prompts, completions = (jnp.asarray(rng.integers(1, 64, (2, n)), jnp.int32) for n in (5, 9))
    found = TokenLogps(target)(prompts, completions, PAD).logps
    how = {"pad_id": PAD, "eos_id": 2}
    wanted = common.compute_per_token_logps(*nnx.split(model), prompts, completions, **how)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
