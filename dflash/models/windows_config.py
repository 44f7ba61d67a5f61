"""Architecture fields of families in which layers attend to a sliding window."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from dflash.config.schema import TargetArchitecture, option

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedArchitecture(TargetArchitecture):
    """Architecture in which all or some layers attend to a sliding window.

    Attributes:
      sliding_window: Positions up to its own that a row of a sliding layer sees; None for all.
      layer_types: Kind of each layer; empty if all layers slide.
    """

    sliding_window: int | None = option(None, minimum=1)
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()

    def is_sliding(self, layer: int) -> bool:
        """Returns whether layer number `layer` is a sliding one."""
        return not self.layer_types or self.layer_types[layer] == SLIDING

    def window(self, layer: int) -> int | None:
        """Returns the window of layer number `layer`; None if it sees all positions."""
        return self.sliding_window if self.is_sliding(layer) else None

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            names, layers = len(self.layer_types), self.num_hidden_layers
            yield ("layer_types",), f"names {names} layers, but num_hidden_layers is {layers}"
        if SLIDING in self.layer_types and self.sliding_window is None:
            layer = self.layer_types.index(SLIDING)
            yield ("sliding_window",), f"missing, but layer_types[{layer}] is {SLIDING!r}"
