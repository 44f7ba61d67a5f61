"""Config keys and shapes that drafting strategies share.

Each strategy declares three kinds of dataclasses in `<strategy>_config.py`, beside its code: the
keys of the config group `drafter`; the keys of `drafter.architecture`, which size a fresh drafter;
and the shape, which is read from a checkpoint's config.json or derived from that architecture. None
of these modules imports jax.
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config import checks
from dflash.config.schema import (
    FRESH,
    MAX_BLOCK_SIZE,
    MAX_TOKENS,
    DrafterConfig,
    Quantization,
    RecordsKeys,
    RopeScaling,
    TargetArchitecture,
    location,
    option,
)

MAX_RANK = 2**16  # Of low-rank matrices.
MAX_LAYERS = 2**12
MAX_WIDTH = 2**20
MAX_VOCABULARY = 2**24
_MLP_RATIO = 3  # As in Qwen3 0.6B, 1.7B and 8B.
_MAX_KV_HEADS = 8  # As in every dense Qwen3.

# --- Keys of the group `drafter` ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayeredDrafterConfig(DrafterConfig):
    """Keys of a drafter that is made of transformer layers."""

    rope_scaling: RopeScaling | None = None  # None: from the checkpoint or architecture.
    quantization: Quantization | None = None  # None: as stored in the checkpoint.


@dataclasses.dataclass(frozen=True)
class CheckpointKey:
    """Key of every drafter with weights."""

    checkpoint: str | None = location("checkpoint")  # Directory, hf:org/name, or random.


@dataclasses.dataclass(frozen=True)
class BlockSizeKey:
    """Keys of drafters that were trained with a block size."""

    # With block_size=auto, let cycles divide their rows among the sequences of the batch by the
    # confidence of a tree or of a confidence head. false: as many rows for all.
    divide_rows: bool = True

    # None: the trained block size. auto: chosen again in every cycle.
    block_size: int | Literal["auto"] | None = option(None, minimum=2, maximum=MAX_BLOCK_SIZE)


@dataclasses.dataclass(frozen=True)
class OverlapKeys:
    """Keys of drafters that may draft while the target verifies."""

    # ssd: draft for the likely outcomes of a verification while the target verifies, on devices of
    # the drafter's own.
    overlap: Literal["none", "ssd"] = "none"
    # Devices that hold only the drafter, with ssd.
    devices: int = option(1, minimum=1)
    # Bonus tokens that ssd foresees for each number of accepted drafts.
    fan_out: int = option(3, minimum=1, maximum=64)

    @property
    def overlaps(self) -> bool:
        """Returns whether the drafter runs on devices of its own, while the target verifies."""
        return self.overlap == "ssd"


@dataclasses.dataclass(frozen=True)
class BlockDrafterConfig(BlockSizeKey, CheckpointKey, LayeredDrafterConfig):
    """Keys of DFlash and its descendants."""

    short_pass: bool = False  # Compute only as many rows as block_size needs.
    # Positions that a draft row sees, its own included. None: as many as in training. auto: chosen
    # for each sequence, in every cycle, by what it accepts.
    window: int | Literal["auto"] | None = option(None, minimum=1, maximum=2**30)
    # Sequences of this many tokens or more decode plainly, with block_size=auto. None: none do.
    longest_context: int | None = option(None, minimum=1, maximum=MAX_TOKENS)
    # Initial weights in training from scratch. fresh: random ones. target_first, target_last: those
    # of the target's layers, whose sizes the draft layers must then have. A directory or
    # hf:org/name of a drafter of DFlash's kind: its weights of the same names, for ubtree the
    # backbone of a DFlash drafter.
    initialize_from: str = FRESH


@dataclasses.dataclass(frozen=True)
class MarginalTree:
    """Tree of the most likely prefixes, by the marginal distributions of the draft positions."""

    budget: int = option(minimum=1, maximum=1024)  # Drafts in the tree.


@dataclasses.dataclass(frozen=True)
class ConditionalTree:
    """Tree of the most likely prefixes, by the distribution of each draft after its prefix."""

    budget: int = option(minimum=1, maximum=1024)  # Drafts in the tree.
    # Paths of each depth that are extended, and that the drafts are chosen from. None: 12, or as
    # many as the budget needs and the candidates allow.
    width: int | None = option(None, minimum=1, maximum=1024)
    # Likeliest tokens of each position, among which the scores of a path are probabilities. None:
    # 64, or as many as the drafter has.
    candidates: int | None = option(None, minimum=1, maximum=1024)


# --- Keys of `drafter.architecture` ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DraftLayers(RecordsKeys):
    """Sizes of a drafter's transformer layers, which follow Qwen3 for every target family.

    Width, vocabulary and context length are the target's. The target's attention and MLP have no
    influence.
    """

    # None: three times the hidden size.
    intermediate_size: int | None = option(None, minimum=1, maximum=2**24)
    # None: the smallest power of two with heads · head_dim >= hidden size.
    num_attention_heads: int | None = option(None, minimum=1, maximum=2**16)
    # None: 8, or the number of attention heads if that is smaller.
    num_key_value_heads: int | None = option(None, minimum=1, maximum=2**16)
    head_dim: int = option(128, minimum=2, maximum=2**16)
    rms_norm_eps: float = option(1e-6, minimum=0.0)
    rope_theta: float = option(1e6, minimum=1.0)
    rope_scaling: RopeScaling | None = None

    def decoder_for(
        self,
        target: TargetArchitecture,
        *,
        num_hidden_layers: int,
        hidden_size: int | None = None,
        tie_word_embeddings: bool | None = None,
    ) -> TargetArchitecture:
        """Returns the decoder of a fresh drafter, with defaults for the sizes that are None.

        Args:
          target: Architecture of the target. Only fields that every family has are read:
            vocabulary, width, context length, end-of-sequence ids, tied and lent embeddings.
          num_hidden_layers: Number of draft layers.
          hidden_size: Width of the drafter; None for the target's.
          tie_word_embeddings: Whether the embedding is also the output head; None as in the target.
        Raises:
          ConfigError: The heads do not divide into groups, or into rotary halves.
        """
        width = hidden_size or target.hidden_size
        heads = self.num_attention_heads or _default_heads(width, self.head_dim)
        tied = target.tie_word_embeddings if tie_word_embeddings is None else tie_word_embeddings
        decoder = TargetArchitecture(
            vocab_size=target.vocab_size,
            hidden_size=width,
            intermediate_size=self.intermediate_size or _MLP_RATIO * width,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=self.num_key_value_heads or min(heads, _MAX_KV_HEADS),
            head_dim=self.head_dim,
            max_position_embeddings=target.max_position_embeddings,
            rms_norm_eps=self.rms_norm_eps,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            tie_word_embeddings=tied,
            eos_token_id=target.eos_token_id,
        )
        check_options(checks.shape_problems(decoder))
        return decoder


def _default_heads(width: int, head_dim: int) -> int:
    return 1 << (-(-width // head_dim) - 1).bit_length()


# --- Sizes that a fresh drafter is given, and that a checkpoint's config.json states --------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TapSizes:
    """Sizes of a drafter that reads the outputs of target layers.

    Attributes:
      target_layer_ids: Target layers whose outputs are the features; None for a fresh drafter
        spreads them over the target's depth.
      draft_vocab_size: Size of the draft vocabulary, which has an output head of its own; None for
        the target's vocabulary. If smaller, training picks the tokens that are most frequent in
        its data.
    """

    target_layer_ids: tuple[int, ...] | None = option(None, minimum=0, maximum=MAX_LAYERS)
    draft_vocab_size: int | None = option(None, minimum=1, maximum=MAX_VOCABULARY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes(TapSizes):
    """Sizes of DFlash and its descendants.

    Attributes:
      block_size: Trained number of rows: the anchor and the drafted tokens.
      mask_token_id: Token at the positions to be drafted; None for the last id of the vocabulary.
    """

    block_size: int = option(16, minimum=2, maximum=MAX_BLOCK_SIZE)
    mask_token_id: int | None = option(None, minimum=0, maximum=MAX_VOCABULARY)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RotatedPart:
    """Part of each head that the rotary embedding of a `decoder` rotates.

    Attributes:
      partial_rotary_factor: Fraction of each head that is rotated, from its first dimension on.
    """

    partial_rotary_factor: float = option(1.0, minimum=0.0, maximum=1.0)

    @property
    def rotary(self) -> TargetArchitecture:
        """Decoder in which `head_dim` is the width of the rotated part of a head."""
        width = int(self.decoder.head_dim * self.partial_rotary_factor)
        return dataclasses.replace(self.decoder, head_dim=width)

    def rotary_problems(self) -> "Iterable[Problem]":
        """Yields a problem if the rotated part has no halves."""
        rotated = self.rotary.head_dim
        if rotated % 2 or not rotated:
            message = (
                f"{self.partial_rotary_factor} rotates {rotated} of {self.decoder.head_dim} head "
                "dimensions; expected a positive even number"
            )
            yield ("partial_rotary_factor",), message


# --- Shapes ---------------------------------------------------------------------------------------


class DrafterShape(abc.ABC):
    """Base of shapes, frozen dataclasses with the contents of a drafter's config.json."""

    @classmethod
    @abc.abstractmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Reads a checkpoint's config.json.

        Raises:
          CheckpointError: A field is missing, unusable or unsupported, or contradicts another.
        """

    @abc.abstractmethod
    def to_hf(self) -> dict[str, Any]:
        """Returns the config.json fields of this shape, for `from_hf`."""

    @classmethod
    @abc.abstractmethod
    def for_target(cls, target: TargetArchitecture, options: Any) -> Self:
        """Returns the shape of a fresh drafter.

        Args:
          options: The config group `drafter.architecture`; None for its defaults.
        Raises:
          ConfigError: The options contradict one another, or the target.
        """

    @abc.abstractmethod
    def fit(self, target: TargetArchitecture) -> Self:
        """Returns this shape, completed with what follows from the target.

        Raises:
          CheckpointError: The drafter was trained for a target of another shape.
        """


# Names of the fields involved, the field to change first, and a message; as in config/checks.py.
Problem = tuple[tuple[str, ...], str]


def check_file(problems: Iterable[Problem]) -> None:
    """Raises CheckpointError if a shape that was read from a config.json has problems."""
    lines = [f"{hf_config.FILE}: {fields[0]}: {message}" for fields, message in problems]
    if lines:
        raise errors.CheckpointError("\n".join(lines))


def check_options(problems: Iterable[Problem]) -> None:
    """Raises ConfigError if a shape that follows from `drafter.architecture` has problems."""
    lines = [f"drafter.architecture.{fields[0]}: {message}" for fields, message in problems]
    if lines:
        raise errors.ConfigError(*lines)


def check_stated(config: DrafterConfig, expected: Any, actual: Any) -> None:
    """Checks that `drafter.architecture` agrees with the shape of `drafter.checkpoint`.

    Keys that were not given, or are None, agree with any shape.

    Args:
      config: Config group `drafter`, with an architecture.
      expected: Shape that follows from the architecture.
      actual: Shape of the checkpoint.
    Raises:
      ConfigError: Some values differ; the message has a line for each.
    """
    problems = [
        f"drafter.architecture.{key}: {value}, but {config.checkpoint} has {_value(actual, key)}; "
        "leave drafter.architecture out"
        for key, value in config.architecture.given_values.items()
        if value is not None and _value(expected, key) != _value(actual, key)
    ]
    if problems:
        raise errors.ConfigError(*problems)


def _value(shape: Any, key: str) -> Any:
    """Returns the value of a key of `drafter.architecture` in a shape or its decoder, or None."""
    fields = shape if hasattr(shape, key) else getattr(shape, "decoder", shape)
    return getattr(fields, key, None)


def vocabulary_problems(draft_vocab_size: int | None, vocab_size: int) -> Iterable[Problem]:
    """Yields a problem if more tokens can be drafted than the target has."""
    if draft_vocab_size is not None and draft_vocab_size > vocab_size:
        yield ("draft_vocab_size",), f"{draft_vocab_size} exceeds the vocabulary of {vocab_size}"


def check_same_target(target: TargetArchitecture, trained_for: Any, num_layers: int | None) -> None:
    """Checks that a drafter was trained for a target of the same size.

    Args:
      trained_for: Object with `hidden_size` and `vocab_size` of the drafter's target.
      num_layers: Depth of the drafter's target; None if not stated.
    Raises:
      CheckpointError: Some sizes differ; the message names them all.
    """
    sizes = {
        "hidden size": (trained_for.hidden_size, target.hidden_size),
        "number of target layers": (num_layers, target.num_hidden_layers),
        "vocabulary": (trained_for.vocab_size, target.vocab_size),
    }
    differences = [
        f"{name} {expected} (target: {actual})"
        for name, (expected, actual) in sizes.items()
        if expected not in (None, actual)
    ]
    if differences:
        raise errors.CheckpointError(
            f"drafter.checkpoint: trained for another target: {', '.join(differences)}"
        )
