"""Every key that a config may hold: frozen dataclasses, each default stated here and nowhere else.

This module imports neither jax nor anything that does, so a bad config fails in milliseconds.
Architecture fields have the names of Hugging Face's config.json.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

AUTO = "auto"
RANDOM = "random"  # a checkpoint: weights are drawn
INT32_MAX = 2**31 - 1  # the device's integers; the bound of every integer key without another
MAX_SEED = 2**32 - 1
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # Bound of the device's floats and so of every float key.
MAX_TOKENS = 2**24  # of a sequence
MAX_BATCH = 2**16  # slots, or prompts of a task
MAX_EXPERTS = 4096  # of a layer
MAX_BLOCK_SIZE = 1024  # rows that a target verifies at once, the anchor included
MAX_LAYERS = 1024  # each is built before anything else can be said about a model
DType = Literal["float32", "bfloat16"]
# What a key names: a file to read, a directory that is made if missing, or the directory of a
# checkpoint (or of a tokenizer) as `checkpoint.resolve` takes it.
# A disk is a directory that must be on a file system, not in a bucket.
Place = Literal["file", "directory", "disk", "checkpoint", "tokenizer"]
PLACE = "place"  # in a field's metadata


def option(default: Any = dataclasses.MISSING, *, minimum: Any = None, maximum: Any = None) -> Any:
    """A dataclass field with inclusive bounds (on each item of a list); no default: required.

    An integer without a maximum is at most `INT32_MAX`.
    """
    metadata = {"minimum": minimum, "maximum": maximum}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def option_like(declared: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Returns a dataclass field with the bounds of the field `name` of `declared`."""
    metadata = declared.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata=metadata)


def subset(values: Any, declared: type) -> dict[str, Any]:
    """Returns the attributes of `values` that are fields of the dataclass `declared`."""
    return {field.name: getattr(values, field.name) for field in dataclasses.fields(declared)}


def location(kind: Place, default: Any = None) -> Any:
    """A dataclass field (or a list) of places on disk: it is looked up before any work begins."""
    return dataclasses.field(default=default, metadata={PLACE: kind})


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for long contexts (`rope_scaling` in config.json).

    Both kinds divide slow frequencies by `factor` and keep fast ones; they differ in where one
    becomes the other. What one kind does not name is ignored under it.
    """

    factor: float = option(8.0, minimum=1.0)
    # Llama 3's: full turns within the original context, below and above.
    low_freq_factor: float = option(1.0, minimum=0.0)
    high_freq_factor: float = option(4.0, minimum=0.0)
    original_max_position_embeddings: int = option(8192, minimum=1)
    rope_type: Literal["llama3", "yarn"] = "llama3"
    # YaRN's: full turns within the original context, above and below.
    beta_fast: float = option(32.0, minimum=0.0)
    beta_slow: float = option(1.0, minimum=0.0)
    truncate: bool = True  # round the dimensions where the blend begins and ends outward
    # YaRN's amplitude of cos and sin. None: follows from the next two; from `factor` without them.
    attention_factor: float | None = option(None, minimum=0.0)
    mscale: float | None = option(None, minimum=0.0)
    mscale_all_dim: float | None = option(None, minimum=0.0)


@dataclasses.dataclass(frozen=True)
class TargetArchitecture:
    """Shape of a decoder-only target; read from config.json, or stated for random weights."""

    vocab_size: int = option(minimum=1)
    hidden_size: int = option(minimum=1)
    intermediate_size: int = option(minimum=1)
    num_hidden_layers: int = option(minimum=1, maximum=MAX_LAYERS)
    num_attention_heads: int = option(minimum=1)
    num_key_value_heads: int = option(minimum=1)
    head_dim: int = option(minimum=2)
    max_position_embeddings: int = option(minimum=1)
    rms_norm_eps: float = option(1e-6, minimum=0.0)
    rope_theta: float = option(1e6, minimum=1.0)
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    eos_token_id: tuple[int, ...] = option((), minimum=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3MoeFields:
    """What config.json states of the experts of Qwen3 MoE."""

    num_experts: int = option(minimum=1, maximum=MAX_EXPERTS)
    num_experts_per_tok: int = option(minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(minimum=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = option(1, minimum=1)  # every n-th layer has experts
    mlp_only_layers: tuple[int, ...] = option((), minimum=0)  # and these have none


@dataclasses.dataclass(frozen=True)
class Qwen3MoeArchitecture(Qwen3MoeFields, TargetArchitecture):
    """Shape of a Qwen3 MoE target."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepseekV3Fields:
    """What config.json states of the attention and the experts of DeepSeek-V3 and Kimi K2."""

    q_lora_rank: int | None = option(None, minimum=1)
    kv_lora_rank: int = option(minimum=1)
    qk_nope_head_dim: int = option(minimum=1)
    qk_rope_head_dim: int = option(minimum=2)
    v_head_dim: int = option(minimum=1)
    rope_interleave: bool = True
    n_routed_experts: int = option(minimum=1, maximum=MAX_EXPERTS)
    n_shared_experts: int = option(0, minimum=0)
    num_experts_per_tok: int = option(minimum=1, maximum=MAX_EXPERTS)
    moe_intermediate_size: int = option(minimum=1)
    first_k_dense_replace: int = option(0, minimum=0)  # the first layers have no experts
    n_group: int = option(1, minimum=1)
    topk_group: int = option(1, minimum=1)
    norm_topk_prob: bool = True
    routed_scaling_factor: float = option(1.0, minimum=0.0)


@dataclasses.dataclass(frozen=True)
class DeepseekV3Architecture(DeepseekV3Fields, TargetArchitecture):
    """Shape of a DeepSeek-V3 or Kimi K2 target; head_dim and num_key_value_heads are not used."""


# Projections in eight bits, made of plain weights as they are read, with a scale for each output.
# w8a8: rows are multiplied in eight bits too.
Quantization = Literal["int8", "float8_e4m3fn", "w8a8"]


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """The model whose distribution the output follows."""

    name: str | None = None  # None: inferred from the checkpoint's config.json
    checkpoint: str | None = location("checkpoint")  # directory, hf:org/name, or random
    rope_scaling: RopeScaling | None = None  # None: the checkpoint's
    quantization: Quantization | None = None  # None: as the checkpoint has them
    architecture: TargetArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(TargetConfig):
    """A target with experts."""

    architecture: Qwen3MoeArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class DeepseekV3Config(TargetConfig):
    """A target with latent attention and experts."""

    architecture: DeepseekV3Architecture | None = None


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """The drafting strategy; strategies with keys of their own extend this."""

    name: str = "none"

    @property
    def adaptive(self) -> bool:
        """Whether the loop chooses the block size of every cycle."""
        return getattr(self, "block_size", None) == AUTO


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters of a sequence, with their defaults and bounds.

    Configs (`DecodeConfig`) and requests (`inference.request.Sampling`) derive from it.
    """

    temperature: float = option(0.0, minimum=0.0)  # 0: greedy
    top_k: int = option(0, minimum=0)  # 0: off
    top_p: float = option(1.0, minimum=0.0, maximum=1.0)
    min_p: float = option(0.0, minimum=0.0, maximum=1.0)  # 0: off
    presence_penalty: float = option(0.0, minimum=-2.0, maximum=2.0)
    frequency_penalty: float = option(0.0, minimum=-2.0, maximum=2.0)
    repetition_penalty: float = option(1.0, minimum=0.01, maximum=100.0)  # 1: off
    seed: int = option(0, minimum=0, maximum=MAX_SEED)


@dataclasses.dataclass(frozen=True)
class DecodeConfig(SamplingConfig):
    """Sampling, the end of a sequence, and the shape of the decode loop."""

    max_new_tokens: int = option(256, minimum=1, maximum=MAX_TOKENS)
    min_new_tokens: int = option(0, minimum=0, maximum=MAX_TOKENS)  # before any stop token
    verify: Literal["coupled", "rejection"] = "coupled"
    stop_ids: tuple[int, ...] = option((), minimum=0)  # in addition to the checkpoint's
    ignore_eos: bool = False
    baseline: bool = False  # also decode every prompt without drafting, and compare
    batch_size: int = option(1, minimum=1, maximum=MAX_BATCH)
    sync_every: int = option(8, minimum=1, maximum=2**16)  # cycles per dispatch
    # None: the longest prompt + max_new_tokens.
    max_length: int | None = option(None, minimum=2, maximum=MAX_TOKENS)
    page_size: int = option(128, minimum=8, maximum=2**16)  # tokens per page of the target's cache
    # Pages of that cache, over all devices. None: enough for every sequence of a batch to reach
    # max_length. With fewer, sequences take pages as they grow, and the youngest one is interrupted
    # and computed again later where they run out.
    num_pages: int | None = option(None, minimum=1, maximum=MAX_TOKENS)
    # Dtype of that cache. auto: the run's; else 8 bits, with a scale for each token and kv head.
    kv_dtype: Literal["auto", "int8", "float8_e4m3fn"] = AUTO
    # Tokens per chunk of a prompt, at most.
    prefill_chunk: int = option(512, minimum=8, maximum=2**16)
    # Keep full pages of what was computed, for later prompts that begin with the same tokens.
    prefix_cache: bool = False
    # While few slots are busy, compute these alone. More programs to compile.
    partial_dispatches: bool = False


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    """Where prompts come from; stdin (one per line) if nothing is given."""

    ALTERNATIVES = ("text", "file", "dataset")

    text: tuple[str, ...] = ()
    file: str | None = location("file")
    chat: bool = False  # wrap text prompts as one user message, by the checkpoint's chat template
    thinking: bool = (
        False  # ask the template for reasoning first; most drafters are trained without
    )
    special_tokens: bool = False  # read those that text prompts spell, such as <|im_end|>, as such
    dataset: str | None = None  # name of a data set, such as math or gsm8k
    # Files of published sets; None: ~/.cache/dflash/datasets/raw
    raw_dir: str | None = location("disk")
    split: Literal["train", "validation", "test"] = "test"  # of the data set
    limit: int | None = option(None, minimum=1)  # prompts of the data set; None: all


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each mesh axis; their product is the number of devices used."""

    data: int = option(1, minimum=1)
    fsdp: int = option(1, minimum=1)
    tensor: int = option(1, minimum=1)
    expert: int = option(1, minimum=1)


# Mesh axes that each logical axis is split over. "batch" is the slots of the decode loop.
SHARDING_RULES: Mapping[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "pages": ("data", "fsdp"),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "expert": ("expert",),
    "features": (),
}


@dataclasses.dataclass(frozen=True)
class DecodeRun:
    """Everything that `dflash decode` reads from its config."""

    target: TargetConfig = dataclasses.field(default_factory=TargetConfig)
    drafter: DrafterConfig = dataclasses.field(default_factory=DrafterConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    prompts: PromptsConfig = dataclasses.field(default_factory=PromptsConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(SHARDING_RULES)
    dtype: DType = "bfloat16"
