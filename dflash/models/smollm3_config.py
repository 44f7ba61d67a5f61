"""Config keys and architecture of SmolLM3."""

import dataclasses
from collections.abc import Iterator

from dflash.config.schema import TargetArchitecture, TargetConfig, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmolLM3Architecture(TargetArchitecture):
    """Architecture of a SmolLM3 target.

    Attributes:
      no_rope_layers: For each layer, 1 if its attention has rotary position embedding and 0 if it
        has none; empty if every layer has it but the ones that `no_rope_layer_interval` names.
      no_rope_layer_interval: Every layer whose number, counted from 1, is a multiple has none.
    """

    no_rope_layers: tuple[int, ...] = option((), minimum=0, maximum=1)
    no_rope_layer_interval: int = option(4, minimum=1)

    def rotates(self, layer: int) -> bool:
        """Returns whether layer number `layer` has rotary position embedding."""
        if self.no_rope_layers:
            return bool(self.no_rope_layers[layer])
        return (layer + 1) % self.no_rope_layer_interval != 0

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        names, layers = len(self.no_rope_layers), self.num_hidden_layers
        if 0 < names < layers:
            yield ("no_rope_layers",), f"names {names} layers, but num_hidden_layers is {layers}"


@dataclasses.dataclass(frozen=True)
class SmolLM3Config(TargetConfig):
    """Keys of a SmolLM3 target."""

    architecture: SmolLM3Architecture | None = None
