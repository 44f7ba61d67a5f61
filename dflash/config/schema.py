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
MAX_TOKENS = 2**24  # of a sequence
MAX_BATCH = 2**16  # slots, or prompts of a task
MAX_EXPERTS = 4096  # of a layer
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


MAX_BLOCK_SIZE = 1024  # rows that a target verifies at once, the anchor included
MAX_RANK = 2**16  # of the small matrices in drafters


@dataclasses.dataclass(frozen=True)
class DraftLayers:
    """Shape of a drafter's transformer layers, which are Qwen3's whatever the target's are.

    Width, vocabulary and context length are the target's; nothing follows its attention or mlp.
    """

    # None: three times the hidden size.
    intermediate_size: int | None = option(None, minimum=1, maximum=2**24)
    # None: the fewest that are together as wide as the hidden size, rounded up to a power of two.
    num_attention_heads: int | None = option(None, minimum=1, maximum=2**16)
    # None: 8, or as many as attention heads where these are fewer.
    num_key_value_heads: int | None = option(None, minimum=1, maximum=2**16)
    head_dim: int = option(128, minimum=2, maximum=2**16)
    rms_norm_eps: float = option(1e-6, minimum=0.0)
    rope_theta: float = option(1e6, minimum=1.0)
    rope_scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True)
class BlockArchitecture(DraftLayers):
    """Shape of a drafter of DFlash's kind that has no checkpoint."""

    num_hidden_layers: int = option(5, minimum=1, maximum=2**12)
    block_size: int = option(16, minimum=2, maximum=MAX_BLOCK_SIZE)
    # None: the last id of the vocabulary.
    mask_token_id: int | None = option(None, minimum=0, maximum=2**24)
    # None: evenly spread.
    target_layer_ids: tuple[int, ...] | None = option(None, minimum=0, maximum=2**12)
    # How many, where target_layer_ids is left out.
    num_target_features: int = option(5, minimum=1, maximum=2**12)
    causal: bool = False  # rows of a block see it up to themselves, as in JetSpec's heads


@dataclasses.dataclass(frozen=True)
class DFlashArchitecture(BlockArchitecture):
    """Shape of a DFlash drafter that has no checkpoint."""

    # None: the target's. Fewer: training picks the tokens that its data holds most often.
    draft_vocab_size: int | None = option(None, minimum=1, maximum=2**24)


@dataclasses.dataclass(frozen=True)
class DFlash2Architecture(BlockArchitecture):
    """Shape of a DFlash2 drafter that has no checkpoint."""

    conv_kernel_size: int = option(2, minimum=1, maximum=MAX_BLOCK_SIZE)  # rows
    conv_group_size: int = option(16, minimum=1, maximum=2**20)  # channels
    selector_rank: int = option(256, minimum=1, maximum=MAX_RANK)
    selector_top_k: int = option(16, minimum=1, maximum=1024)


@dataclasses.dataclass(frozen=True)
class DSparkArchitecture(BlockArchitecture):
    """Shape of a DSpark drafter that has no checkpoint; block_size counts drafted tokens."""

    markov_rank: int = option(256, minimum=1, maximum=MAX_RANK)
    markov_head_type: Literal["vanilla", "gated", "rnn"] = "vanilla"


@dataclasses.dataclass(frozen=True)
class MedusaArchitecture:
    """Shape of Medusa heads that have no checkpoint."""

    # The anchor and a token of each head.
    block_size: int = option(5, minimum=2, maximum=MAX_BLOCK_SIZE)
    rms_norm_eps: float = option(1e-6, minimum=0.0)


@dataclasses.dataclass(frozen=True)
class DraftModelArchitecture(DraftLayers):
    """Shape of a draft model that has no checkpoint."""

    num_hidden_layers: int = option(4, minimum=1, maximum=2**12)
    hidden_size: int | None = option(None, minimum=1, maximum=2**20)  # None: the target's
    tie_word_embeddings: bool | None = None  # None: as in the target


@dataclasses.dataclass(frozen=True)
class Eagle3Architecture(DraftLayers):
    """Shape of an EAGLE-3 drafter that has no checkpoint."""

    # None: the target's. Fewer: training picks the tokens that its data holds most often.
    draft_vocab_size: int | None = option(None, minimum=1, maximum=2**24)
    # None: low, middle, high.
    target_layer_ids: tuple[int, ...] | None = option(None, minimum=0, maximum=2**12)


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
class LayeredDrafterConfig(DrafterConfig):
    """A drafter that is made of transformer layers."""

    rope_scaling: RopeScaling | None = None  # None: the checkpoint's, or that of the architecture
    quantization: Quantization | None = None  # None: as the checkpoint has them


@dataclasses.dataclass(frozen=True)
class MarginalTree:
    """A tree of the likeliest prefixes, from the marginals of the draft positions of a block."""

    budget: int = option(minimum=1, maximum=1024)  # drafts in the tree


@dataclasses.dataclass(frozen=True)
class DFlashConfig(LayeredDrafterConfig):
    """A DFlash drafter."""

    name: str = "dflash"
    checkpoint: str | None = location("checkpoint")
    # None: as trained.
    block_size: int | Literal["auto"] | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)
    short_pass: bool = False  # compute no more rows than a smaller block_size asks for
    tree: MarginalTree | None = None  # None: a chain
    architecture: DFlashArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class NgramConfig(DrafterConfig):
    """Prompt lookup."""

    name: str = "ngram"
    block_size: int | Literal["auto"] = option(8, minimum=2, maximum=MAX_BLOCK_SIZE)
    longest_match: int = option(3, minimum=1, maximum=64)  # tokens looked for at first; then fewer


@dataclasses.dataclass(frozen=True)
class AutoregressiveConfig(DrafterConfig):
    """A smaller language model that writes its draft token by token."""

    name: str = "autoregressive"
    checkpoint: str | None = location("checkpoint")
    block_size: int | Literal["auto"] = option(5, minimum=2, maximum=MAX_BLOCK_SIZE)
    quantization: Quantization | None = None  # None: as the checkpoint has them
    family: str = "qwen3"  # of random weights; a checkpoint names its own
    architecture: DraftModelArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class DFlash2Config(LayeredDrafterConfig):
    """A DFlash2 drafter."""

    name: str = "dflash2"
    checkpoint: str | None = location("checkpoint")
    # None: as trained.
    block_size: int | Literal["auto"] | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)
    short_pass: bool = False  # compute no more rows than a smaller block_size asks for
    architecture: DFlash2Architecture | None = None


@dataclasses.dataclass(frozen=True)
class DSparkConfig(LayeredDrafterConfig):
    """A DSpark drafter."""

    name: str = "dspark"
    checkpoint: str | None = location("checkpoint")
    # None: as trained.
    block_size: int | Literal["auto"] | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)
    short_pass: bool = False  # compute no more rows than a smaller block_size asks for
    architecture: DSparkArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class MedusaConfig(DrafterConfig):
    """Medusa heads."""

    name: str = "medusa"
    checkpoint: str | None = location("checkpoint")
    # None: as trained.
    block_size: int | Literal["auto"] | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)
    tree: MarginalTree | None = None  # None: a chain
    architecture: MedusaArchitecture | None = None


@dataclasses.dataclass(frozen=True)
class LookaheadConfig(DrafterConfig):
    """Lookahead decoding; a block has 1 + (ngram_size - 1) · (window + candidates) rows."""

    name: str = "lookahead"
    window: int = option(8, minimum=1, maximum=128)  # positions that are solved for at once
    ngram_size: int = option(4, minimum=2, maximum=16)
    candidates: int = option(8, minimum=1, maximum=128)  # n-grams verified in each cycle
    pool_size: int = option(256, minimum=1, maximum=16384)  # n-grams kept of each sequence


@dataclasses.dataclass(frozen=True)
class BeamTree:
    """A tree that is grown level by level. By default as EAGLE-3 publishes it.

    What is published as depth 7 comes beside a first level, what is published as 60 tokens counts
    the anchor.
    """

    budget: int = option(59, minimum=1, maximum=1024)  # drafts in the tree
    # Nodes of a level that are extended, and children of each.
    top_k: int = option(10, minimum=1, maximum=64)
    depth: int = option(8, minimum=1, maximum=64)  # drafts on the longest path


@dataclasses.dataclass(frozen=True)
class Eagle3Config(LayeredDrafterConfig):
    """An EAGLE-3 drafter."""

    name: str = "eagle3"
    checkpoint: str | None = location("checkpoint")
    num_draft_tokens: int = option(7, minimum=1, maximum=1023)  # length of a chain
    tree: BeamTree | None = None  # None: a chain
    # Steps of its own output that training feeds it.
    training_steps: int = option(7, minimum=1, maximum=64)
    architecture: Eagle3Architecture | None = None


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
    seed: int = option(0, minimum=0, maximum=2**32 - 1)


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
