"""Layouts of published drafters' config.json, converted to z-lab's.

z-lab's files have the decoder's fields at the top level and the drafter's in the group
`dflash_config`. SpecForge's files have DSpark's fields in a group, too. Files of speculators have
the drafter's fields at the top level and the decoder's in a group. The file of Meta's drafter for
Muse Glimmer has all fields at the top level, and leaves those of the target's head to the target.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints import hf_config
from dflash.config.schema import FULL, SLIDING, TargetArchitecture, option
from dflash.drafters.base_config import MAX_LAYERS, BlockSizes

GROUP = "dflash_config"  # Group of the drafter's fields in z-lab's layout.
DECODER = "transformer_layer_config"  # Group of the decoder's fields in files of speculators.
# Fields of files of speculators that do not describe the drafter.
_GENERAL = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "model_type"),
    *("tie_word_embeddings", "quantization_config", "speculators_config", "speculators_version"),
    *("speculators_model_type", "_name_or_path", "has_no_defaults_at_init", DECODER),
    # Those of every config of transformers.
    *("chunk_size_feed_forward", "id2label", "label2id", "return_dict", "use_cache"),
    *("max_length", "min_length", "num_beams", "num_return_sequences", "temperature", "top_k"),
    *("top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
    *("num_beam_groups", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "pruned_heads"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}
# Fields of the drafter that are checked below, or belong to its training alone.
_CHECKED = {
    *("projector_type", "is_neox_style", "rope_is_neox_style", "attention_mode", "shift_label"),
    *("lilicorr_enabled", "training_block_size", "num_anchors", "loss_decay_gamma"),
    "confidence_head_alpha",
}
_ASSISTANT = "muse_glimmer_assistant"  # Model type of Meta's drafter.
DEFAULT_SIZES = {"block_size": 8, "draft_vocab_size": 32_000}  # Of speculators.


@dataclasses.dataclass(frozen=True)
class SpeculatorsFields:
    """Fields of a speculators config.json; a layer id names the layer after the tap."""

    aux_hidden_state_layer_ids: tuple[int, ...] = option((), minimum=1, maximum=MAX_LAYERS)
    sliding_window_non_causal: bool | None = None


def is_of_speculators(config: Mapping[str, Any]) -> bool:
    """Returns whether a config.json has the layout of speculators."""
    return DECODER in config


def decoder_of_speculators(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the decoder's fields of a file of speculators.

    Where each type of layer has a rotary embedding, that of sliding layers counts if there is one,
    as in speculators; the rotated fraction follows vLLM.
    """
    fields = dict(hf_config.read_group(config, DECODER))
    rope = hf_config.read_group(fields, "rope_parameters")
    nested = [kind for kind in (SLIDING, FULL) if kind in rope]
    if nested:
        rope = fields["rope_parameters"] = hf_config.read_group(rope, nested[0])
    return fields | {name: rope[name] for name in ("partial_rotary_factor",) if name in rope}


def check_known(fields: Mapping[str, Any], known: Collection[str], place: str = "") -> None:
    """Raises CheckpointError if a file, or a group in it, has a field beyond the known ones.

    Args:
      known: Fields of the drafter that are read. Those of any drafter's training, and of every file
        of speculators, need not be among them.
      place: What precedes the field in the message, such as the name of the group.
    """
    for name, value in fields.items():
        if name not in known and name not in _GENERAL | _CHECKED and value not in (None, False):
            raise errors.CheckpointError(
                f"{hf_config.FILE}: {place}{name}: unknown field, which may change the drafts; "
                "remove it if it does not"
            )


@dataclasses.dataclass(frozen=True)
class _Assistant:
    """Fields of Meta's drafter, with the defaults of its config class in transformers.

    The last three are not in its file, but those of Muse Glimmer 30B.
    """

    hidden_size: int = 6656
    intermediate_size: int = 19_968
    num_hidden_layers: int = option(5, minimum=1, maximum=MAX_LAYERS)
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rms_norm_eps: float = 1e-5
    rope_theta: float = 5e5
    max_position_embeddings: int = 131_072
    sliding_window: int = option(2048, minimum=1, maximum=2**29)
    block_size: int = 16
    mask_token_id: int = 201_818
    target_layer_ids: tuple[int, ...] = (1, 13, 25, 37, 49)
    vocab_size: int = 202_048
    output_multiplier: float = 26**-0.5
    final_logit_softcapping: float = 20.0


def with_heads(config: Mapping[str, Any], target: TargetArchitecture) -> Mapping[str, Any]:
    """Adds the fields of the target's embedding or head that a config.json leaves to the target.

    Meta's drafters leave the head. DFlash files with `block_size` at the top, which precede z-lab's
    package, leave the factor on embeddings; the package takes raw rows unless the file states one.
    """
    scale, factor, bound = target.lent
    if config.get("model_type") == _ASSISTANT:
        head = {"output_multiplier": factor, "final_logit_softcapping": bound or 0.0}
        return {"vocab_size": target.vocab_size, **head, **config}
    group = hf_config.read_group(config, GROUP)
    later = "projector_type", "speculators_model_type"
    if "block_size" not in config or any(name in {**config, **group} for name in later):
        return config
    return {**config, GROUP: {"input_embedding_scale": scale, **group}}


def to_zlab(
    config: Mapping[str, Any],
    *,
    projector: str,
    known: Collection[str],
    own_groups: Iterable[str] = (),
    shifts_labels: bool = False,
    slides_causally: bool = True,
) -> dict[str, Any]:
    """Converts a config.json to z-lab's layout; one in this layout stays as it is.

    Args:
      config: Contents of config.json.
      projector: Name of the strategy in the field `projector_type`.
      known: Fields of the drafter that are read; others may change the drafts.
      own_groups: Groups whose fields belong in `dflash_config`, too.
      shifts_labels: Value of the field `shift_label`.
      slides_causally: Default causality of sliding layers in files of speculators.
    Raises:
      CheckpointError: A field is invalid, or selects what is not supported.
    """
    if config.get("model_type") == _ASSISTANT:
        config = _from_assistant(config)
    if is_of_speculators(config):
        check_known(config, known)
        config = _from_speculators(config, projector, slides_causally)
    group = dict(hf_config.read_group(config, GROUP))
    for name in own_groups:
        group |= hf_config.read_group(config, name)
    check_known(group, known, f"{GROUP}: ")
    for fields in (config, group):
        hf_config.check_only(fields, "projector_type", projector)
        for name in ("is_neox_style", "rope_is_neox_style"):
            hf_config.check_only(fields, name, True)
        hf_config.check_only(fields, "shift_label", shifts_labels)
    hf_config.check_only(group, "attention_mode", "gqa")
    return {**config, GROUP: group}


def _from_assistant(config: Mapping[str, Any]) -> dict[str, Any]:
    """Adds defaults; blocks are bidirectional, and `sliding_window` is the longest distance."""
    fields = vars(hf_config.read_fields(config, _Assistant))
    sliding = [SLIDING] * fields["num_hidden_layers"]
    return {
        **config,
        **fields,
        "target_layer_ids": list(fields["target_layer_ids"]),
        "layer_types": config.get("layer_types") or sliding,
        "sliding_window": fields["sliding_window"] + 1,
        "is_causal": False,
    }


def _from_speculators(
    config: Mapping[str, Any], projector: str, slides_causally: bool
) -> dict[str, Any]:
    """Moves the decoder's fields to the top level; the target's depth stays unknown."""
    fields = hf_config.read_fields(config, SpeculatorsFields)
    hf_config.check_only(config, "speculators_model_type", projector)
    if not fields.aux_hidden_state_layer_ids:
        raise errors.CheckpointError(
            f"{hf_config.FILE}: aux_hidden_state_layer_ids: expected at least one layer, got none"
        )
    non_causal = fields.sliding_window_non_causal
    return {
        **{name: value for name, value in config.items() if name != DECODER},
        **decoder_of_speculators(config),
        **hf_config.read_some(config, BlockSizes, DEFAULT_SIZES, DEFAULT_SIZES),
        "sliding_window_non_causal": not slides_causally if non_causal is None else non_causal,
        GROUP: {"target_layer_ids": [layer - 1 for layer in fields.aux_hidden_state_layer_ids]},
    }
