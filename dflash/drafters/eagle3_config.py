"""Config keys and shape of EAGLE-3 drafters."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Self

from dflash import errors
from dflash.checkpoints import defaults_config, hf_config
from dflash.config.schema import TargetArchitecture, option
from dflash.drafters import base_config
from dflash.drafters.base_config import (
    MAX_LAYERS,
    CheckpointKey,
    DrafterShape,
    DraftLayers,
    LayeredDrafterConfig,
    OverlapKeys,
    TapSizes,
)

_NUM_TAPS = 3
# Variants of the norms around the projection of features and the residual stream.
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


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
    num_draft_tokens: int = option(7, minimum=1, maximum=1023)  # Length of a chain.
    tree: BeamTree | None = None  # None: a chain.
    # Number of steps for which training feeds the drafter its own output.
    training_steps: int = option(7, minimum=1, maximum=64)
    architecture: Eagle3Architecture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Shape(TapSizes, DrafterShape):
    """Contents of an EAGLE-3 checkpoint's config.json.

    Attributes:
      decoder: Architecture of the layer: width, heads, rotary base and so on. Its vocabulary is the
        target's.
      num_target_layers: Depth of the target that the drafter was trained for; None if not stated.
    """

    decoder: TargetArchitecture
    num_target_layers: int | None = option(None, minimum=1, maximum=MAX_LAYERS)

    @property
    def num_taps(self) -> int:
        """Number of target layers whose outputs are the features."""
        return _NUM_TAPS if self.target_layer_ids is None else len(self.target_layer_ids)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        for key in ("attention_bias", "mlp_bias", *_NORMS):
            hf_config.check_only(config, key, False)
        names = ("draft_vocab_size", "target_layer_ids", "num_target_layers")
        sizes = hf_config.read_some(config, cls, names, dict.fromkeys(names))
        eagle = hf_config.read_group(config, "eagle_config")
        hf_config.check_only(eagle, "use_aux_hidden_state", True)
        ambiguous = eagle.get("eagle_aux_hidden_state_layer_ids")
        if ambiguous is not None and sizes["target_layer_ids"] is None:
            # Implementations disagree on whether the ids mean the layers' inputs or outputs.
            raise errors.CheckpointError(
                f"{hf_config.FILE}: eagle_aux_hidden_state_layer_ids are ambiguous; state the "
                "layers whose outputs the drafter reads, counted from 0, as target_layer_ids"
            )
        fields = {key: config[key] for key in config if (key, config[key]) != ("rope_theta", None)}
        defaults = defaults_config.of(config, "llama", sizes=False)
        decoder = hf_config.read_architecture(fields, defaults=defaults)
        sizes["draft_vocab_size"] = sizes["draft_vocab_size"] or decoder.vocab_size
        shape = cls(decoder=decoder, **sizes)
        base_config.check_file(shape._problems())
        return shape

    def to_hf(self) -> dict[str, Any]:
        taps = self.target_layer_ids
        return hf_config.write_architecture(self.decoder) | {
            "model_type": "llama",
            "draft_vocab_size": self.draft_vocab_size,
            "target_layer_ids": None if taps is None else list(taps),
            "num_target_layers": self.num_target_layers,
        }

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
        base_config.check_same_target(target, self.decoder, self.num_target_layers)
        taps = self.target_layer_ids or default_taps(depth)
        if max(taps) >= depth:
            raise errors.CheckpointError(
                f"drafter: taps layers {list(taps)}, but the target has {depth} layers"
            )
        return dataclasses.replace(self, target_layer_ids=taps, num_target_layers=depth)

    def _problems(self) -> Iterable[base_config.Problem]:
        layers = self.decoder.num_hidden_layers
        if layers != 1:
            yield ("num_hidden_layers",), f"{layers}, but EAGLE-3 has 1"
        yield from base_config.vocabulary_problems(self.draft_vocab_size, self.decoder.vocab_size)


def default_taps(num_target_layers: int) -> tuple[int, int, int]:
    """Returns the layers whose outputs enter layers 2, L // 2 and L - 3 of L layers."""
    taps = 1, num_target_layers // 2 - 1, num_target_layers - 4
    last = num_target_layers - 1
    low, middle, high = (min(max(layer, 0), last) for layer in taps)  # Toy targets are too shallow.
    return low, middle, high
