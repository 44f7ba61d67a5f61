"""HTML report as one self-contained page: figures, plots, and a replay."""

import base64
import dataclasses
import importlib.resources
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dflash.measure.replay import Replay

_PLACE = "@DATA@"


@dataclasses.dataclass(frozen=True)
class TimedReplay:
    """Replay with the times to play it at.

    Attributes:
      replay: Recorded cycles.
      ttft_ms: Time to the first token.
      cycle_ms: Time of each cycle after it.
    """

    replay: Replay
    ttft_ms: float
    cycle_ms: float


def render(
    results: Mapping[str, Any],
    *,
    notes: Sequence[str],
    plots: Mapping[str, Mapping[str, bytes]],
    replays: Mapping[str, tuple[str, Mapping[str, TimedReplay]]],
) -> str:
    """Returns the page as HTML.

    Args:
      results: Content of results.json.
      notes: Sentences to show with the figures.
      plots: PNG files, by theme ("light", "dark") and by the name of the figure.
      replays: By task, the prompt's text and the replay of each strategy.
    """
    data = {
        "results": results,
        "notes": list(notes),
        "plots": {
            theme: {name: base64.b64encode(png).decode("ascii") for name, png in some.items()}
            for theme, some in plots.items()
        },
        "replays": {
            task: {
                "prompt": prompt,
                "strategies": {name: _replay_values(timed) for name, timed in by_strategy.items()},
            }
            for task, (prompt, by_strategy) in replays.items()
        },
    }
    # Escape "<", because only "</" and "<!--" have a meaning inside a script element.
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")
    template = importlib.resources.files("dflash.measure").joinpath("page.html")
    return template.read_text(encoding="utf-8").replace(_PLACE, text)


def _replay_values(timed: TimedReplay) -> dict[str, Any]:
    return {
        "first": timed.replay.first,
        "frames": [dataclasses.asdict(frame) for frame in timed.replay.frames],
        "ttft_ms": timed.ttft_ms,
        "cycle_ms": timed.cycle_ms,
    }
