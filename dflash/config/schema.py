"""Schema of a decoding config and of the groups that all commands share, with every default.

This module imports neither jax nor anything that does, so that a bad config fails in milliseconds.
Architecture fields have the names of Hugging Face's config.json.
"""

import dataclasses
import functools
import itertools
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

AUTO = "auto"
RANDOM = "random"  # Value of `checkpoint` for random weights.
FRESH = "fresh"  # Value of `initialize_from` for random weights.
FULL, SLIDING = "full_attention", "sliding_attention"  # Values of `layer_types`.
INT32_MAX = 2**31 - 1  # Largest integer on the device, and the default maximum of integer keys.
MAX_SEED = 2**32 - 1  # Of training.
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1  # Seeds of sampling, as in OpenAI's API.
FLOAT32_MAX = (2 - 2**-23) * 2.0**127  # Largest float on the device, and maximum of float keys.
MAX_TOKENS = 2**24  # Tokens per sequence.
MAX_BATCH = 2**16  # Slots of the decode loop, or prompts of a task.
MAX_EXPERTS = 4096  # Experts per layer.
MAX_BLOCK_SIZE = 1024  # Rows that a target verifies at once, anchor included.
MAX_LAYERS = 1024  # Layers of a model; all are built before a model can be checked.
DType = Literal["float32", "bfloat16"]
# Kind of path that a key takes: a file to read; a directory, created if missing; a disk, which is a
# directory on a file system, not in a bucket; or a checkpoint's or tokenizer's directory, as
# `checkpoint.resolve` accepts it; or that of a LoRA adapter, likewise.
Place = Literal["file", "directory", "disk", "checkpoint", "tokenizer", "adapter"]
PLACE, HF_ALIASES = "place", "hf_aliases"  # Keys of a field's metadata.


def option(
    default: Any = dataclasses.MISSING,
    *,
    minimum: Any = None,
    maximum: Any = None,
    hf_aliases: tuple[str, ...] = (),
) -> Any:
    """Returns a dataclass field with inclusive bounds, which apply to each item of a list.

    A field without a default is required. An integer without a maximum is at most `INT32_MAX`.

    Args:
      hf_aliases: Other names of the field in JSON files of Hugging Face; see
        `checkpoints.hf_config.read_fields`.
    """
    return _field(default, {"minimum": minimum, "maximum": maximum, HF_ALIASES: hf_aliases})


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
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


class RecordsKeys:
    """Base of config groups that record which of their keys a file or the command line gives."""

    given: frozenset[str] | None = None

    @property
    def given_values(self) -> dict[str, Any]:
        """Values that were given; for a group that a program made, those other than defaults."""
        values = {field: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            field.name: value
            for field, value in values.items()
            if (value != field.default if self.given is None else field.name in self.given)
        }


def location(kind: Place, default: Any = None) -> Any:
    """Returns a dataclass field of one or several paths, which are checked before any work."""
    return _field(default, {PLACE: kind})


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for long contexts (`rope_scaling` in config.json).

    `linear` divides all frequencies by `factor`. The other types divide low ones, keep high ones,
    and blend in between; they differ in where the blend begins and ends. Fields that do not apply
    to `rope_type` are ignored.
    """

    factor: float = option(8.0, minimum=1.0)
    # Bounds of Llama 3's blend, in full turns within the original context.
    low_freq_factor: float = option(1.0, minimum=0.0)
    high_freq_factor: float = option(4.0, minimum=0.0)
    original_max_position_embeddings: int = option(8192, minimum=1)
    rope_type: Literal["linear", "llama3", "yarn"] = "llama3"
    # Bounds of YaRN's blend, in full turns within the original context.
    beta_fast: float = option(32.0, minimum=0.0)
    beta_slow: float = option(1.0, minimum=0.0)
    truncate: bool = True  # Round the first and last dimension of YaRN's blend outward.
    # YaRN's amplitude of cos and sin. None: derived from mscale and mscale_all_dim, or from
    # `factor` if they are None.
    attention_factor: float | None = option(None, minimum=0.0)
    mscale: float | None = option(None, minimum=0.0)
    mscale_all_dim: float | None = option(None, minimum=0.0)


class LentHeads(NamedTuple):
    """Use of a target's embedding table and output head.

    Attributes:
      scale: Factor on rows of the table.
      multiplier: Factor on products with the head.
      bound: Bound of the logits, which a scaled tanh enforces; None for none.
    """

    scale: float = 1.0
    multiplier: float = 1.0
    bound: float | None = None


@dataclasses.dataclass(frozen=True)
class TargetArchitecture:
    """Shape of a decoder-only target, read from config.json or given for random weights.

    A family with fields of its own subclasses it in a module that does not import jax, and states
    there what `checkpoints.hf_config.read_architecture` needs to read them.
    """

    # Pairs of a config.json field that no dataclass field represents and its only supported value.
    HF_FIXED = ()

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

    @classmethod
    def hf_overrides(cls, added: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the config.json fields of the decoder to replace before they are read.

        Args:
          added: Values of the fields that the subclass adds.
        """
        return {}

    @property
    def lent(self) -> LentHeads:
        """Returns what fresh drafters do with rows of the table and products with the head."""
        return LentHeads()

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yields (fields, message) for every inconsistency of the fields that a subclass adds."""
        return iter(())


# 8-bit projections with one scale per output, quantized while plain weights are read. w8a8
# quantizes activations to int8, too. q8_0 keeps the projections that a GGUF file stores in Q8_0.
Quantization = Literal["int8", "float8_e4m3fn", "w8a8", "q8_0"]


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """Target, the model whose distribution the output follows."""

    name: str | None = None  # None: inferred from the checkpoint's config.json.
    checkpoint: str | None = location("checkpoint")  # Directory, hf:org/name, or random.
    adapter: str | None = location("adapter")  # LoRA adapter to merge into the weights.
    rope_scaling: RopeScaling | None = None  # None: the checkpoint's.
    quantization: Quantization | None = None  # None: as stored in the checkpoint.
    architecture: TargetArchitecture | None = None


@functools.cache
def target_config(architecture: type[TargetArchitecture]) -> type[TargetConfig]:
    """Returns the keys of a target whose family has this architecture."""
    added = [("architecture", architecture | None, None)]
    return dataclasses.make_dataclass("TargetConfig", added, bases=(TargetConfig,), frozen=True)


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """Drafting strategy; strategies with keys of their own subclass it.

    Attributes:
      overlaps: Whether the drafter runs on devices of its own, while the target verifies.
      initialize_from: Initial weights in training from scratch.
    """

    name: str = "none"

    overlaps = False
    initialize_from = FRESH

    @property
    def adaptive(self) -> bool:
        """Returns whether the decode loop chooses a block size for every cycle."""
        return getattr(self, "block_size", None) == AUTO

    @property
    def divides_rows(self) -> bool:
        """Returns whether cycles may divide rows among sequences, if block sizes are chosen."""
        return getattr(self, "divide_rows", True)

    def as_chain(self) -> "DrafterConfig":
        """Returns the config of chains with a fixed block size, on the target's devices."""
        keys = {"tree": None, "overlap": "none"} | ({"block_size": None} if self.adaptive else {})
        changes = {key: value for key, value in keys.items() if hasattr(self, key)}
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling parameters of a sequence, with their defaults and bounds.

    Configs (`DecodeConfig`) and requests (`inference.request.RequestSampling`) derive from it.
    """

    temperature: float = option(0.0, minimum=0.0)  # 0: greedy.
    top_k: int = option(0, minimum=0)  # 0: off.
    top_p: float = option(1.0, minimum=0.0, maximum=1.0)
    min_p: float = option(0.0, minimum=0.0, maximum=1.0)  # 0: off.
    presence_penalty: float = option(0.0, minimum=-2.0, maximum=2.0)
    frequency_penalty: float = option(0.0, minimum=-2.0, maximum=2.0)
    repetition_penalty: float = option(1.0, minimum=0.01, maximum=100.0)  # 1: off.
    seed: int = option(0, minimum=INT64_MIN, maximum=INT64_MAX)


@dataclasses.dataclass(frozen=True)
class DecodeConfig(SamplingConfig):
    """Sampling, stopping criteria, and shape of the decode loop."""

    max_new_tokens: int = option(256, minimum=1, maximum=MAX_TOKENS)
    min_new_tokens: int = option(0, minimum=0, maximum=MAX_TOKENS)  # Minimum before a stop token.
    verify: Literal["coupled", "rejection"] = "coupled"
    # Copy what followed an earlier occurrence of the last tokens, in place of the drafter's block,
    # while copies are accepted more often.
    lookup: bool = False
    stop_ids: tuple[int, ...] = option((), minimum=0)  # In addition to the checkpoint's.
    ignore_eos: bool = False
    baseline: bool = False  # Also decode every prompt without drafting, and compare.
    # Compute every token alike, whatever was drafted: cycles verify the same number of rows, and
    # sums have one order. Chains only.
    exact: bool = False
    batch_size: int = option(1, minimum=1, maximum=MAX_BATCH)
    sync_every: int = option(8, minimum=1, maximum=2**16)  # Cycles per dispatch.
    # None: the longest prompt + max_new_tokens.
    max_length: int | None = option(None, minimum=2, maximum=MAX_TOKENS)
    page_size: int = option(128, minimum=8, maximum=2**16)  # Tokens per page of the target's cache.
    # Pages of the target's cache, over all devices. None: enough for every sequence of a batch to
    # reach max_length. With fewer, sequences take pages as they grow; when no page is left, the
    # youngest sequence is preempted and computed again later.
    num_pages: int | None = option(None, minimum=1, maximum=MAX_TOKENS)
    # Dtype of the target's cache. auto: the run's dtype, on a CPU float32. The 8-bit dtypes store
    # one scale per token and kv head.
    kv_dtype: Literal["auto", "int8", "float8_e4m3fn"] = AUTO
    # Maximum number of tokens per prefill chunk.
    prefill_chunk: int = option(512, minimum=8, maximum=2**16)
    # Keep full pages of computed sequences, for later prompts that begin with the same tokens.
    prefix_cache: bool = False
    # Compute only a few slots while the others are idle. Compiles more programs.
    partial_dispatches: bool = False


def task_prompts(task: str, limit: int | None) -> "PromptsConfig":
    """Returns the prompts of a task: the name of a data set, or a file of prompts, *.jsonl."""
    if task.endswith(".jsonl"):
        return PromptsConfig(file=task, chat=None, limit=limit)
    return PromptsConfig(dataset=task, limit=limit)


def named_tasks(tasks: Iterable[str]) -> dict[str, str]:
    """Returns tasks by name: of a data set, or of a file without folder and suffix, numbered."""
    named: dict[str, str] = {}
    for task in tasks:
        is_file = task_prompts(task, None).file is not None
        stem = re.sub(r"[^\w.-]", "_", pathlib.PurePath(task).stem) if is_file else task
        numbered = (f"{stem}-{number}" for number in itertools.count(2))
        names = itertools.chain([stem], numbered)
        named[next(name for name in names if name not in named)] = task
    return named


@dataclasses.dataclass(frozen=True)
class PromptsConfig:
    """Source of prompts: texts, a file or a data set; by default stdin, one prompt per line."""

    ALTERNATIVES = ("text", "file", "dataset")

    text: tuple[str, ...] = ()
    file: str | None = location("file")
    # Format each text prompt as one user message of the chat template. None: if there is one.
    chat: bool | None = False
    # Ask the chat template for reasoning first, or for none; None: as it does by itself. Many
    # drafters are trained without reasoning.
    thinking: bool | None = None
    special_tokens: bool = False  # Parse special tokens, such as <|im_end|>, in text prompts.
    dataset: str | None = None  # Name of a data set, such as math or gsm8k.
    # Files of published data sets; None: ~/.cache/dflash/datasets/raw.
    raw_dir: str | None = location("disk")
    limit: int | None = option(None, minimum=1)  # Prompts of the data set or file; None: all.


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each mesh axis; the product is the number of devices used."""

    data: int = option(1, minimum=1)
    fsdp: int = option(1, minimum=1)
    tensor: int = option(1, minimum=1)
    expert: int = option(1, minimum=1)


# Mesh axes over which each logical axis is sharded. "batch" is the slot axis of the decode loop.
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
    """Config of `dflash decode`."""

    target: TargetConfig = dataclasses.field(default_factory=TargetConfig)
    drafter: DrafterConfig = dataclasses.field(default_factory=DrafterConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    prompts: PromptsConfig = dataclasses.field(default_factory=PromptsConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sharding_rules: Mapping[str, tuple[str, ...]] = option(SHARDING_RULES)
    dtype: DType = "bfloat16"
