"""Weights of small targets under the names of other frameworks.

Written out from the sources that dflash/checkpoints/namings/ names.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.models.dense import Llama3
from dflash.parallel import parameters

HEADS, SIZE = 4, 16  # Of `support.models.make_architecture`.
LORA_RANK, LORA_ALPHA = 2, 6.0


def arrays(model) -> dict[str, np.ndarray]:
    return {path: np.array(leaf.get_value()) for path, leaf in parameters.named_arrays(model)}


def hf_tree(model) -> dict[str, np.ndarray]:
    tree = {}
    for path, array in arrays(model).items():
        stem = path.rpartition(".")[0]
        name = "lm_head.weight" if stem == "lm_head" else f"model.{stem}.weight"
        if not (tensors := re.fullmatch(r"(.*\.experts)\.(\w+_proj)\.kernel", path)):
            tree[name] = array.T if path.endswith("kernel") else array
            continue
        for i, expert in enumerate(array):
            tree[f"model.{tensors[1]}.{i}.{tensors[2]}.weight"] = expert.T
    return tree


def tunix_tree(model, *, lora: bool = False) -> dict:
    """Nested, with layers in a list, as nnx.state of a model has them."""
    own = arrays(model)

    def layer(i):
        def heads(name):
            return own[f"layers.{i}.self_attn.{name}.kernel"].reshape(32, -1, SIZE)

        attn = {name: {"w": heads(name)} for name in ("q_proj", "k_proj", "v_proj")}
        out = own[f"layers.{i}.self_attn.o_proj.kernel"]
        attn["o_proj"] = {"w": out.reshape(HEADS, SIZE, 32)}
        for name in ("q_norm", "k_norm"):
            if f"layers.{i}.self_attn.{name}.scale" in own:
                attn[name] = {"w": own[f"layers.{i}.self_attn.{name}.scale"]}
        mlp = {
            name: {"kernel": own[f"layers.{i}.mlp.{name}.kernel"]}
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        norms = {
            name: {"w": own[f"layers.{i}.{name}.scale"]}
            for name in ("input_layernorm", "post_attention_layernorm")
        }
        return {"attn": attn, "mlp": mlp, **norms}

    tree = {
        "embedder": {"input_embedding": nnx.Param(jnp.asarray(own["embed_tokens.embedding"]))},
        "final_norm": {"w": own["norm.scale"]},
        "lm_head": {"w": own["lm_head.kernel"]},
        "layers": [layer(i) for i in range(3)],
    }
    if lora:  # Move a product of two small matrices out of the weights.
        rng, layers = np.random.default_rng(0), tree["layers"]
        for held, name, split in (
            (layers[1]["attn"]["q_proj"], "w", 1),
            (layers[1]["attn"]["o_proj"], "w", 2),
            (layers[2]["mlp"]["up_proj"], "kernel", 1),
        ):
            shape = held[name].shape
            a = rng.normal(size=(*shape[:split], LORA_RANK)).astype(np.float32)
            b = rng.normal(size=(LORA_RANK, *shape[split:])).astype(np.float32)
            held[name] = held[name] - LORA_ALPHA / LORA_RANK * np.tensordot(a, b, 1)
            held[f"{name}_lora_a"], held[f"{name}_lora_b"] = a, b
    return tree


def maxtext_tree(model, *, stacked: bool) -> dict:
    own, llama = arrays(model), isinstance(model, Llama3)

    def interleaved(array):
        return np.stack([array[..., : SIZE // 2], array[..., SIZE // 2 :]], -1).reshape(array.shape)

    def layer(i):
        def heads(name):
            return own[f"layers.{i}.self_attn.{name}_proj.kernel"].reshape(32, -1, SIZE)

        query, key = heads("q"), heads("k")
        if llama:
            query, key = interleaved(query) / 4.0, interleaved(key)
        out = own[f"layers.{i}.self_attn.o_proj.kernel"].reshape(HEADS, SIZE, 32)
        attention = {
            "query": {"kernel": query},
            "key": {"kernel": key},
            "value": {"kernel": heads("v")},
            "out": {"kernel": out},
        }
        if not llama:
            attention["query_norm"] = {"scale": own[f"layers.{i}.self_attn.q_norm.scale"]}
            attention["key_norm"] = {"scale": own[f"layers.{i}.self_attn.k_norm.scale"]}
        before, after = "input_layernorm", "post_attention_layernorm"
        return {
            "self_attention": attention,
            "pre_self_attention_layer_norm": {"scale": own[f"layers.{i}.{before}.scale"]},
            "post_self_attention_layer_norm": {"scale": own[f"layers.{i}.{after}.scale"]},
            **mlp(i),
        }

    def mlp(i):
        names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
        if f"layers.{i}.mlp.gate.kernel" not in own:
            kernels = {to: own[f"layers.{i}.mlp.{name}.kernel"] for to, name in names.items()}
            return {"mlp": {to: {"kernel": kernel} for to, kernel in kernels.items()}}
        experts = {to: own[f"layers.{i}.mlp.experts.{name}.kernel"] for to, name in names.items()}
        return {"moe_block": {"gate": {"kernel": own[f"layers.{i}.mlp.gate.kernel"]}, **experts}}

    layers = [layer(i) for i in range(3)]
    if stacked:
        held = {"layers": jax.tree.map(lambda *each: np.stack(each, 1), *layers)}
    else:
        held = {f"layers_{i}": each for i, each in enumerate(layers)}
    decoder = {
        **held,
        "decoder_norm": {"scale": own["norm.scale"]},
        "logits_dense": {"kernel": own["lm_head.kernel"]},
    }
    embedder = {"token_embedder": {"embedding": own["embed_tokens.embedding"]}}
    return {"params": {"params": {**embedder, "decoder": decoder}}}
