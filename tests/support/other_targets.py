"""Random targets of other makes: experts, latent attention, windows, recurrent state."""

import dataclasses
import functools

import jax
import numpy as np

from dflash.config import registry, schema
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding
from dflash.parallel.sharding import make_sharding as make
from support.models import (
    ARCHITECTURE,
    family_architecture,
    make_sharding,
    move,
    with_favorites,
)

ARCHITECTURES = {
    family: family_architecture(family, ARCHITECTURE)
    for family in ("qwen3_moe", "deepseek_v3", "qwen3_next", "minimax_m2")
}
# Windows shorter than the prompts, and a layer that sees everything.
WINDOWS = {"sliding_window": 7, "layer_types": ("sliding_attention", "full_attention")}
ARCHITECTURES["gemma3"] = family_architecture("gemma3", ARCHITECTURE, **WINDOWS)
ARCHITECTURES["gemma4"] = family_architecture(
    "gemma4", ARCHITECTURE, **WINDOWS, global_head_dim=16, attention_k_eq_v=True,
    num_global_key_value_heads=2,
)  # fmt: skip
# The factor of a model of this width, so that sampled tokens differ.
ARCHITECTURES["muse_glimmer"] = family_architecture(
    "muse_glimmer", ARCHITECTURE, **WINDOWS, layer_rope_theta=(1e4, 0.0), output_multiplier=1.0
)
ARCHITECTURES["gpt_oss"] = family_architecture("gpt_oss", ARCHITECTURE, sliding_window=7)
# Members that meet every schedule and mesh, but not every strategy.
OTHERS = {
    "gemma4 with experts": dataclasses.replace(
        ARCHITECTURES["gemma4"], enable_moe_block=True, num_experts=8, top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "qwen3_5": family_architecture("qwen3_5", ARCHITECTURE),
}  # fmt: skip
SHAPES = ARCHITECTURES | OTHERS


@functools.cache
def target(family: str, expert: int = 1, tensor: int = 1, batch: tuple = ()) -> Decoder:
    """A random target of the family, shared by tests; see `build`.

    Args:
      batch: mesh axes of its rows, if other than by default.
    """
    sharding = make_sharding(expert=expert, tensor=tensor)
    if batch:
        rules = dict(schema.SHARDING_RULES) | dict.fromkeys(("batch", "pages"), batch)
        sharding = make({"expert": expert, "tensor": tensor}, rules)
    if sharding.mesh.size > 1:
        return move(target(family), _abstract(family, sharding))
    return build(family, sharding)


def build(family: str, sharding: Sharding) -> Decoder:
    """A random target of the family, whose favorite tokens make drafts hit now and then."""
    model = _abstract(family, sharding)
    parameters.initialize(model, jax.random.key(0))
    for path, parameter in parameters.named_parameters(model):
        if path.endswith(".bias"):  # They begin as zeros.
            rng = np.random.default_rng(len(path))
            values = rng.normal(size=parameter.shape).astype(np.float32)
            parameter.set_value(jax.device_put(values, parameter.get_value().sharding))
    return with_favorites(model)


def _abstract(family: str, sharding: Sharding) -> Decoder:
    kind = registry.load(registry.TARGETS[family.partition(" ")[0]].implementation)
    return kind(SHAPES[family], dtype=np.dtype("float32"), sharding=sharding)
