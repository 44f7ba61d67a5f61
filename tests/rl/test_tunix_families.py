"""Tests of weights from the models of Tunix, by their own forward pass: families and LoRA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.models import make_sharding

pytest.importorskip("tunix", reason="needs google-tunix: pip install 'dflash-jax[rl]'")

import qwix
from flax import nnx
from safetensors.numpy import save_file
from tunix.models.gemma3 import model as gemma3
from tunix.models.gemma4 import model as gemma4
from tunix.models.gemma4 import params_safetensors as gemma4_files
from tunix.models.qwen2 import model as qwen2
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common

from dflash.config.schema import TargetArchitecture
from dflash.inference import weight_update
from dflash.models.config import Gemma3Architecture, Gemma4Architecture, Qwen3MoeArchitecture
from dflash.models.dense import Qwen2
from dflash.models.gemma3 import Gemma3
from dflash.models.gemma4 import Gemma4Text
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters
from dflash.rl.upkeep import TokenLogps

PAD, ALPHA, RANK = 0, 6.0, 2
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "rope_theta": 1e6,
}  # fmt: skip
SHAPE = {
    "num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 16,
    "num_kv_heads": 2,
}  # fmt: skip
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


def gemma4_pair(*, shares_values: bool, experts: bool):
    """A layer with a window, and one without, whose heads are wider."""
    kinds = gemma4.AttentionType.LOCAL_SLIDING, gemma4.AttentionType.GLOBAL
    sizes = {"num_embed": 64, "sliding_window_size": 5, "attention_pattern": kinds}
    full = {"global_key_size": 24, "k_eq_v_global": shares_values}
    own = {"global_head_dim": 24, "attention_k_eq_v": shares_values, "sliding_window": 5}
    if shares_values:
        full |= {"num_global_kv_heads": 1}
        own |= {"num_global_key_value_heads": 1}
    if experts:
        full |= {"enable_moe": True, "num_experts": 4, "num_experts_per_tok": 2, "expert_dim": 24}
        own |= {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        own |= {"moe_intermediate_size": 24}
    config = gemma4.ModelConfig(**SHAPE | sizes | full)
    own |= {"layer_types": ("sliding_attention", "full_attention")}
    own |= {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
    return gemma4.Gemma4(config, rngs=nnx.Rngs(0)), Gemma4Text, Gemma4Architecture(**SIZES | own)


PAIRS = {
    "qwen2": qwen2_pair,
    "qwen3-moe": moe_pair,
    "gemma3": gemma_pair,
    "gemma3-qkv": lambda: gemma_pair(4),
    "gemma4": lambda: gemma4_pair(shares_values=False, experts=False),
    "gemma4-shared": lambda: gemma4_pair(shares_values=True, experts=False),
    "gemma4-experts": lambda: gemma4_pair(shares_values=True, experts=True),
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
    for layer in model.layers if name == "gemma4-experts" else ():
        # Tunix routes the rows after this norm, transformers those before it; see docs/rl.md.
        scale = layer.moe_pre_ffw_norm.scale
        scale.set_value(jnp.full_like(scale.get_value(), 1.5))
    if lora:
        model = with_lora(model)
    target = kind(arch, dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(target, jax.random.key(1))
    weight_update.update(target, model, lora_alpha=ALPHA if lora else None)
    rng = np.random.default_rng(1)
    prompts, completions = (
        jnp.asarray(rng.integers(1, 64, (2, n)).astype(jnp.int32)) for n in (5, 9)
    )
    found = TokenLogps(target)(prompts, completions, PAD).logps
    how = {"pad_id": PAD, "eos_id": 2}
    wanted = common.compute_per_token_logps(*nnx.split(model), prompts, completions, **how)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def published(model: Gemma4Text) -> dict[str, np.ndarray]:
    """The tensors of a published Gemma 4: an expert's projections to gate and up are fused."""
    tensors, fused = {}, {}
    for path, leaf in parameters.named_parameters(model):
        array = np.asarray(leaf.get_value())
        if ".experts." in path:
            layer, _, name = path.removesuffix(".kernel").rpartition(".")
            fused.setdefault(f"model.language_model.{layer}.", {})[name] = array.swapaxes(1, 2)
            continue
        name = model.checkpoint_name(path).replace("model.", "model.language_model.")
        tensors[name] = array.T if path.endswith("kernel") else array
    for stem, experts in fused.items():
        both = experts["gate_proj"], experts["up_proj"]
        tensors[f"{stem}gate_up_proj"] = np.concatenate(both, axis=1)
        tensors[f"{stem}down_proj"] = experts["down_proj"]
    return {name: np.ascontiguousarray(array) for name, array in tensors.items()}


@pytest.mark.parametrize("name", ["gemma4", "gemma4-experts"])
def test_weights_that_tunix_reads_from_a_checkpoint_are_its_own(name, tmp_path):
    """Tunix's own table of names maps the checkpoint to its model, ours maps them back."""
    like, kind, arch = PAIRS[name]()
    source, target = (kind(arch, dtype=jnp.float32, sharding=make_sharding()) for _ in range(2))
    parameters.initialize(source, jax.random.key(1))
    parameters.initialize(target, jax.random.key(2))
    save_file(published(source), tmp_path / "model.safetensors")
    model = gemma4_files.create_model_from_safe_tensors(
        str(tmp_path), like.config, dtype=jnp.float32, mode="original"
    )
    weight_update.update(target, model)
    both = map(dict, map(parameters.named_parameters, (source, target)))
    for (path, one), other in zip(*(each.items() for each in both), strict=True):
        np.testing.assert_array_equal(one.get_value(), other[1].get_value(), err_msg=path)
