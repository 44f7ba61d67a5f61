"""Published drafters of Qwen3.8-27B: their config.json, and the sizes of their files."""

import jax.numpy as jnp
import pytest
from support.models import make_architecture, make_sharding

from dflash.config import loader
from dflash.drafters.dflash2 import DFlash2
from dflash.drafters.dflash_config import LayerView
from dflash.drafters.dspark import DSpark
from dflash.parallel import parameters

DECODER = {
    "vocab_size": 248_320, "hidden_size": 5120, "intermediate_size": 17_408, "num_hidden_layers": 5,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 262_144, "model_type": "qwen3", "rms_norm_eps": 1e-6,
}  # fmt: skip
ROPE = {"rope_theta": 10_000_000, "rope_type": "default"}
SLIDING = {
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
}
HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TAPS = [5, 19, 33, 47, 61]
# Revision 50307d4c of z-lab/Qwen3.8-27B-DFlash2.
ZLAB = (
    DECODER
    | SLIDING
    | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "rope_parameters": ROPE,
        "num_target_layers": 64,
        "dflash_config": {
            "block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 248_070,
            "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": TAPS,
        },
    }
)  # fmt: skip
# Revision b9a5dbdf of RadixArk/Qwen3.8-27B-DSpark, in SpecForge's layout.
YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 8192}
RADIXARK = DECODER | {
    "architectures": ["DSparkDraftModel"],
    "rope_theta": 10_000_000,
    "rope_scaling": YARN,
    "block_size": 7,
    "dflash_config": HEADS | {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "training_block_size": 16,
        "mask_token_id": 248_077,
        "target_layer_ids": TAPS,
    },
}  # fmt: skip
# Revision 7f33c272 of RedHatAI/Qwen3.8-27B-speculator.dspark.
REDHATAI = HEADS | {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [4, 12, 20, 28, 36, 44, 52, 60],
    "block_size": 8,
    "draft_vocab_size": 248_320,
    "mask_token_id": 248_077,
    "sample_from_anchor": True,
    "sliding_window_non_causal": False,
    "transformer_layer_config": DECODER | SLIDING | {
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_parameters": ROPE | {"mrope_section": [44, 42, 42]},
    },
}  # fmt: skip
# Config of the pair -> class, config.json, number of drafts and of tensors, parameters of the file.
PUBLISHED = {
    "dflash2": (DFlash2, ZLAB, 7, 81, 1_924_404_480),
    "dspark_radixark": (DSpark, RADIXARK, 7, 62, 1_857_358_337),
    "dspark_redhatai": (DSpark, REDHATAI, 8, None, 1_988_431_617),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes(name):
    kind, config, drafts, tensors, size = PUBLISHED[name]
    shape = kind.architecture_from_hf(config)
    drafter = kind(shape, dtype=jnp.bfloat16, sharding=make_sharding())
    arrays = [leaf.get_value() for _, leaf in parameters.named_arrays(drafter)]
    assert drafter.num_draft_tokens == drafts
    if tensors is not None:
        assert len(arrays) == tensors
    assert sum(array.size for array in arrays) == size


@pytest.mark.parametrize("name", PUBLISHED)
def test_configs_of_the_package_agree_with_the_files(name):
    kind, config, *_ = PUBLISHED[name]
    run = loader.load(f"configs/qwen3_8_27b_{name}.yml").drafter
    sizes = {"vocab_size": 248_320, "hidden_size": 5120, "num_hidden_layers": 64}
    target = make_architecture(**sizes, max_position_embeddings=262_144)
    build = {"dtype": jnp.bfloat16, "sharding": make_sharding()}
    drafter = kind.create(run, config, target, **build)  # Compares what both state.
    window = None if name == "dspark_radixark" else 2048
    causal = name == "dspark_redhatai"
    assert drafter.shape.views == (LayerView(window, causal),) * 5
    yarn = drafter.shape.decoder.rope_scaling
    assert (yarn and yarn.factor) == (32.0 if name == "dspark_radixark" else None)
