"""Config keys and shape of EAGLE-3 drafters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from dflash import errors
from dflash.checkpoints import defaults_config, hf_config
from dflash.config.schema import TargetArchitecture, option, option_like
from dflash.drafters import base_config, dflash_config, layouts_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    CheckpointKey,
    DrafterShape,
    DraftLayers,
    LayeredDrafterConfig,
    OverlapKeys,
    RotatedPart,
    TapSizes,
)

_NUM_TAPS, _NUM_DRAFTS = 3, 7


@dataclasses.dataclass(frozen=True)
class BeamTree:
    """Tree that is grown level by level, with the published size of EAGLE-3 as the default.

    The published depth of 7 excludes the first level, and the published 60 tokens include the
    anchor.
    """

    budget: int = option(59, minimum=1, maximum=1024)  # Drafts in the tree.
    # Number of nodes per level that are extended, and of children per node.
    top_k: int = option(10, minimum=1, maximum=64)
    depth: int = option(8, minimum=1, maximum=64)  # Drafts on the longest path.


@dataclasses.dataclass(frozen=True)
class Eagle3Architecture(TapSizes, DraftLayers):
    """Architecture of a fresh EAGLE-3 drafter."""


@dataclasses.dataclass(frozen=True)
class Eagle3Config(OverlapKeys, CheckpointKey, LayeredDrafterConfig):
    """Keys of an EAGLE-3 drafter."""

    name: str = "eagle3"
    # Length of a chain. None: as the checkpoint suggests, or 7.
    num_draft_tokens: int | None = option(None, minimum=1, maximum=1023)
    tree: BeamTree | None = None  # None: a chain.
    # Number of steps for which training feeds the drafter its own output.
    training_steps: int = option(7, minimum=1, maximum=64)
    architecture: Eagle3Architecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Shape(TapSizes, RotatedPart, DrafterShape):
    """Contents of an EAGLE-3 or P-EAGLE checkpoint's config.json.

    A tapped layer of -1 is the embedding.

    Attributes:
      decoder: Architecture of the layers: width, heads, rotary base and so on. Its vocabulary is
        the target's.
      layout: Layout of config.json and names of tensors: those of EAGLE, SpecForge and ModelOpt,
        or those of speculators.
      num_target_layers: Depth of the target that the drafter was trained for; None if not stated.
      target_hidden_size: Width of the target, if it is not the drafter's; None for the same width.
      norm_before_residual: Whether the residual stream begins with the normalized features.
      norm_before_fc: Whether one norm over all features precedes their projection.
      fc_norm: Whether a norm for each tapped layer precedes the projection.
      norm_output: Whether outputs are fed back after the final norm, as in EAGLE-3.1.
      qk_norm: Whether heads of queries and keys have norms.
      attention_bias: Whether the projections of attention have biases.
      embed_requires_grad: Whether the drafter has an embedding of its own.
      mask_token_id: Token of the rows that P-EAGLE drafts in one pass; None to draft one by one.
      layer_windows: Positions that a row of each layer sees, its own included; None for all.
      speculative_tokens: Number of drafts that the file suggests; None for no suggestion.
    """

    decoder: TargetArchitecture
    layout: Literal["eagle", "speculators"] = "eagle"
    num_target_layers: int | None = option(None, minimum=1, maximum=MAX_LAYERS)
    target_hidden_size: int | None = option(None, minimum=1, maximum=MAX_WIDTH)
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    embed_requires_grad: bool = False
    mask_token_id: int | None = option(
        None, minimum=0, maximum=MAX_VOCABULARY, hf_aliases=("ptd_token_id", "pard_token")
    )
    layer_windows: tuple[int | None, ...] = (None,)
    speculative_tokens: int | None = option_like(Eagle3Config, "num_draft_tokens", None)

    @property
    def num_taps(self) -> int:
        """Number of target layers whose outputs are the features."""
        return _NUM_TAPS if self.target_layer_ids is None else len(self.target_layer_ids)

    @property
    def num_drafts(self) -> int:
        """Default number of drafts in a chain."""
        return self.speculative_tokens or _NUM_DRAFTS

    @property
    def has_embedding(self) -> bool:
        """Returns whether the drafter does not use the target's embedding."""
        return self.embed_requires_grad or self.target_hidden_size is not None

    @property
    def has_draft_vocabulary(self) -> bool:
        """Returns whether fewer tokens can be drafted than the target has."""
        return self.draft_vocab_size < self.decoder.vocab_size

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        of_speculators = layouts_config.is_of_speculators(config)
        fields, taps = (_from_speculators if of_speculators else _from_eagle)(config)
        for name, supported in _SUPPORTED.items():
            hf_config.check_only(fields, name, supported)
        defaults = defaults_config.of(fields, "llama", sizes=False)
        decoder = hf_config.read_architecture(fields, defaults=defaults)
        sizes = hf_config.read_some(fields, cls, _DEFAULTS, _DEFAULTS)
        width = sizes["target_hidden_size"]
        sizes |= {
            "target_layer_ids": sizes["target_layer_ids"] or taps or None,
            "draft_vocab_size": sizes["draft_vocab_size"] or decoder.vocab_size,
            "target_hidden_size": None if width == decoder.hidden_size else width,
            "layer_windows": tuple(
                view.window for view in dflash_config.views_of(fields, {}, decoder)
            ),
            "layout": "speculators" if of_speculators else "eagle",
        }
        shape = cls(decoder=decoder, **sizes)
        base_config.check_file(shape._problems())
        return shape

    def to_hf(self) -> dict[str, Any]:
        decoder = hf_config.write_architecture(self.decoder)
        if any(self.layer_windows):
            sliding = [window is not None for window in self.layer_windows]
            decoder |= {
                "layer_types": dflash_config.layer_types(sliding),
                "sliding_window": max(filter(None, self.layer_windows)),
                "use_sliding_window": True,  # As transformers reads it.
            }
        fields = {name: getattr(self, name) for name in _DEFAULTS}
        fields["target_layer_ids"] = self.target_layer_ids and list(self.target_layer_ids)
        if self.layout == "speculators":
            return _to_speculators(fields, decoder)
        del fields["speculative_tokens"]
        usual = ("draft_vocab_size", "target_layer_ids", "num_target_layers")
        own = {k: v for k, v in fields.items() if k in usual or v != _DEFAULTS[k]}
        return decoder | {"model_type": "llama"} | own

    @classmethod
    def for_target(cls, target: TargetArchitecture, options: Eagle3Architecture | None) -> Self:
        options = options or Eagle3Architecture()
        shape = cls(
            decoder=options.decoder_for(target, num_hidden_layers=1, tie_word_embeddings=False),
            draft_vocab_size=options.draft_vocab_size or target.vocab_size,
            target_layer_ids=options.target_layer_ids,
            num_target_layers=target.num_hidden_layers,
        )
        base_config.check_options(shape._problems())
        return shape

    def fit(self, target: TargetArchitecture) -> Self:
        """Adds the target's depth and the layers to tap if they are not stated.

        See `DrafterShape.fit`.
        """
        depth = target.num_hidden_layers
        width = self.target_hidden_size or self.decoder.hidden_size
        trained_for = dataclasses.replace(self.decoder, hidden_size=width)
        base_config.check_same_target(target, trained_for, self.num_target_layers)
        taps = self.target_layer_ids or default_taps(depth)
        if max(taps) >= depth:
            raise errors.CheckpointError(
                f"drafter: taps layers {list(taps)}, but the target has {depth} layers"
            )
        return dataclasses.replace(self, target_layer_ids=taps, num_target_layers=depth)

    def _problems(self) -> Iterable[base_config.Problem]:
        vocab_size = self.decoder.vocab_size
        yield from base_config.vocabulary_problems(self.draft_vocab_size, vocab_size)
        yield from self.rotary_problems()
        if self.norm_before_fc and self.fc_norm:
            yield ("fc_norm",), "true is not supported beside norm_before_fc"
        if self.mask_token_id is not None and self.mask_token_id >= vocab_size:
            yield ("mask_token_id",), f"{self.mask_token_id} exceeds the vocabulary of {vocab_size}"


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose outputs enter layers 2, L // 2 and L - 3 of L layers."""
    taps = 1, num_target_layers // 2 - 1, num_target_layers - 4
    last = num_target_layers - 1
    low, middle, high = (min(max(layer, 0), last) for layer in taps)  # Toy targets are too shallow.
    return low, middle, high


# --- config.json ----------------------------------------------------------------------------------

_IDS = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# Fields that a shape has under the same name, with their defaults.
_DEFAULTS = {
    name: Eagle3Shape.__dataclass_fields__[name].default
    for name in Eagle3Shape.__dataclass_fields__
    if name not in ("decoder", "layout", "layer_windows")
}
# Fields of the decoder, in files of speculators.
_OF_DECODER = ("partial_rotary_factor", "attention_bias")
# Fields that some published drafters have, with the only value that is supported.
_SUPPORTED = {
    "mlp_bias": False,
    "swap_h_and_emb": False,  # Osprey's residual stream begins with the embedding.
    "truncated_vocab_size": None,
    "use_aux_hidden_state": True,
}
# Fields of `eagle_config` that ModelOpt writes, with the only value that is supported.
_GROUP = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
_NO_EFFECT = ("parallel_draft_heads_num_layers", "parallel_drafting")


@dataclasses.dataclass(frozen=True)
class _Taps:
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] = option((), minimum=0, maximum=MAX_LAYERS)


def _read_ids(fields: Mapping[str, Any]) -> tuple[int, ...]:
    return hf_config.read_fields(fields, _Taps).eagle_aux_hidden_state_layer_ids


def _inputs(ids: Iterable[int]) -> tuple[int, ...]:
    """Returns the layers whose outputs are the inputs of layers."""
    return tuple(layer - 1 for layer in ids)


def _from_eagle(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the fields of a file of EAGLE, SpecForge or ModelOpt, and the tapped layers.

    Files that count the outputs of layers, as SpecForge and ModelOpt do, begin with layer 1; others
    count the inputs. SGLang tells them apart likewise (pull request 25454).
    """
    eagle = hf_config.read_group(config, "eagle_config")
    layouts_config.check_known(eagle, {*_GROUP, *_NORMS, *_NO_EFFECT, _IDS}, "eagle_config: ")
    for name, supported in _GROUP.items():
        hf_config.check_only(eagle, name, supported)
    block = hf_config.read_group(config, layouts_config.GROUP)
    masks = {name: block[name] for name in ("mask_token_id",) if name in block}
    stated = {key: config[key] for key in config if (key, config[key]) != ("rope_theta", None)}
    within = {name: eagle.get(name) for name in (*_NORMS, _IDS) if config.get(name) is None}
    fields = {**masks, **stated, **within}
    mask = hf_config.read_some(fields, Eagle3Shape, ["mask_token_id"], _DEFAULTS)["mask_token_id"]
    ids = _read_ids(fields)
    hf_config.check_only(fields, "num_aux_hidden_states", len(ids) or _NUM_TAPS)
    taps = ids if ids[:1] == (1,) else _inputs(ids)
    return {"embed_requires_grad": mask is not None, **fields}, taps


# Whether heads of queries and keys have norms, by the decoder's `model_type`.
_QK_NORM = {"llama": False, "qwen3": True}


@dataclasses.dataclass(frozen=True)
class _Decoder:
    model_type: Literal["llama", "qwen3"] = "qwen3"


@dataclasses.dataclass(frozen=True)
class _General:
    algorithm: Literal["eagle3", "peagle"] = "eagle3"


def _from_speculators(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Returns the fields of a file of speculators, and the tapped layers.

    It numbers the inputs of layers, of which there is one more than layers.
    """
    known = {*_DEFAULTS, _IDS} - {*_OF_DECODER, "qk_norm", "target_layer_ids"}
    layouts_config.check_known(config, known)
    general = hf_config.read_group(config, "speculators_config")
    algorithm = hf_config.read_fields(general, _General).algorithm
    is_parallel = "peagle" in (algorithm, config.get("speculators_model_type"))
    decoder = layouts_config.decoder_of_speculators(config)
    kind = hf_config.read_fields(decoder, _Decoder).model_type
    if is_parallel and config.get("mask_token_id") is None:
        raise errors.CheckpointError(f"{hf_config.FILE}: missing mask_token_id")
    stated = {name: config[name] for name in known if config.get(name) is not None}
    methods = general.get("proposal_methods") or [None]
    first = {"proposal_methods": methods[0] if isinstance(methods, list) else methods}
    return {
        "draft_vocab_size": layouts_config.DEFAULT_SIZES["draft_vocab_size"],
        "embed_requires_grad": is_parallel,
        **hf_config.read_group(first, "proposal_methods"),
        **decoder,
        **stated,
        "model_type": kind,
        "qk_norm": _QK_NORM[kind],
    }, _inputs(_read_ids(config))


def _to_speculators(fields: dict[str, Any], decoder: dict[str, Any]) -> dict[str, Any]:
    """Returns a file of speculators, which does not say for how deep a target it is."""
    algorithm = "eagle3" if fields["mask_token_id"] is None else "peagle"
    has_norms = fields.pop("qk_norm")
    decoder |= {name: fields.pop(name) for name in _OF_DECODER}
    decoder["model_type"] = next(kind for kind, norms in _QK_NORM.items() if norms == has_norms)
    taps, drafts = fields.pop("target_layer_ids"), fields.pop("speculative_tokens")
    proposal = {"proposal_type": "greedy", "speculative_tokens": drafts or _NUM_DRAFTS}
    del fields["num_target_layers"]
    return fields | {
        "architectures": [{"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}[algorithm]],
        "speculators_model_type": algorithm,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        layouts_config.DECODER: decoder,
        _IDS: taps and [layer + 1 for layer in taps],
    }
