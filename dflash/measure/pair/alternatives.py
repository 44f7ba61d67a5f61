"""Alternative readings of a drafter's config.json, each of which changes one field.

A drafter that is run with a wrong field decodes losslessly but accepts little. Which field it is
shows when the same weights accept more under another reading.
"""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from dflash import errors
from dflash.config.schema import TargetArchitecture
from dflash.drafters.dflash_config import WINDOWS
from dflash.text.tokenizer import Tokenizer

_MASK_WORDS = ("mask", "pad")
_MAX_MASKS = 3


@dataclasses.dataclass(frozen=True)
class Alternative:
    """Another value of one field.

    Attributes:
      field: Field of config.json, or key of the run's config.
      change: The other value, in words.
      shape: Shape of the drafter under this reading; None if the drafter stays as it is.
      prompts: Changed fields of the config group `prompts`.
    """

    field: str
    change: str
    shape: Any = None
    prompts: dict[str, Any] = dataclasses.field(default_factory=dict)


def of_drafter(
    shape: Any,
    target: TargetArchitecture,
    tokenizer: Tokenizer,
    window: Any = None,
    longest_prompt: int = 0,
) -> Iterator[Alternative]:
    """Yields the alternative readings of a drafter's shape that its weights fit.

    Args:
      shape: Shape of the drafter; a strategy without one of the fields has no such readings.
      tokenizer: Tokenizer of the target, whose special tokens may be the mask.
      window: Window that the drafter's config.json states, for layers that may not use it.
    """
    if hasattr(shape, "views"):
        yield from _views(shape, window)
        yield from of_windows(shape, [window for window in WINDOWS if 2 * window <= longest_prompt])
    if getattr(shape, "target_layer_ids", None):
        yield from _taps(shape, target.num_hidden_layers)
    if hasattr(shape, "decoder"):
        yield from _rotary(shape, target)
    if hasattr(shape, "mask_token_id"):
        yield from _masks(shape, tokenizer)


def of_windows(shape: Any, windows: Iterable[int]) -> Iterator[Alternative]:
    """Yields values of `drafter.window` that narrow what a block drafter of this shape sees."""
    for window in windows:
        narrowed = shape.seen_through(window)
        if narrowed != shape:
            yield Alternative("drafter.window", f"{window}", narrowed)


def of_prompts(prompts: Any, tokenizer: Tokenizer) -> Iterator[Alternative]:
    """Yields the alternative readings of the config group `prompts`.

    Args:
      tokenizer: Tokenizer of the target; without a chat template there is no alternative.
    """
    if not tokenizer.has_chat_template:
        return
    if prompts.text and prompts.chat is False:
        yield Alternative("prompts.chat", "true", prompts={"chat": True})
    messages = [{"role": "user", "content": "Hi"}]
    usual = tokenizer.render_chat(messages)
    for thinking in (True, False):
        with contextlib.suppress(errors.InputError):
            if tokenizer.render_chat(messages, enable_thinking=thinking) != usual:
                change = {"thinking": thinking}
                yield Alternative("prompts.thinking", str(thinking).lower(), prompts=change)


def _views(shape: Any, window: Any) -> Iterator[Alternative]:
    def seen(field: str, change: str, *views) -> Iterator[Alternative]:
        if views != shape.views:
            yield Alternative(field, change, dataclasses.replace(shape, views=views))

    def with_causality(causal: bool, sliding_only: bool = False):
        return tuple(
            dataclasses.replace(view, causal=causal)
            if view.window is not None or not sliding_only
            else view
            for view in shape.views
        )

    yield from seen("is_causal", "true (every layer)", *with_causality(True))
    yield from seen("is_causal", "false (every layer)", *with_causality(False))
    sliding = {view.causal for view in shape.views if view.window is not None}
    if sliding and len(sliding) < len({(view.window, view.causal) for view in shape.views}):
        other = not sliding.pop()
        views = with_causality(other, sliding_only=True)
        yield from seen("sliding_window_non_causal", str(not other).lower(), *views)
    if type(window) is int and window > 0 and all(view.window is None for view in shape.views):
        slid = tuple(dataclasses.replace(view, window=window) for view in shape.views)
        yield from seen("layer_types", f"sliding_attention (every layer, {window})", *slid)
    full = tuple(dataclasses.replace(view, window=None) for view in shape.views)
    yield from seen("layer_types", "full_attention (every layer)", *full)


def _taps(shape: Any, depth: int) -> Iterator[Alternative]:
    """Yields the tapped layers counted from the layer before or after."""
    for shift in (-1, 1):
        taps = tuple(layer + shift for layer in shape.target_layer_ids)
        if min(taps) >= 0 and max(taps) < depth:
            other = dataclasses.replace(shape, target_layer_ids=taps)
            yield Alternative("target_layer_ids", f"{list(taps)}", other)


def _rotary(shape: Any, target: TargetArchitecture) -> Iterator[Alternative]:
    decoder = shape.decoder
    for field in ("rope_theta", "rope_scaling"):
        of_target = getattr(target, field)
        if of_target != getattr(decoder, field):
            other = dataclasses.replace(decoder, **{field: of_target})
            what = "the target's" if of_target is not None else "none, like the target's"
            value = f"{of_target:g} ({what})" if field == "rope_theta" else what
            yield Alternative(field, value, dataclasses.replace(shape, decoder=other))


def _masks(shape: Any, tokenizer: Tokenizer) -> Iterator[Alternative]:
    for token, spelling in mask_candidates(tokenizer, shape.decoder.vocab_size).items():
        if token != shape.mask_token_id:
            other = dataclasses.replace(shape, mask_token_id=token)
            yield Alternative("mask_token_id", f"{token} ({spelling})", other)


def mask_candidates(tokenizer: Tokenizer, vocab_size: int) -> dict[int, str]:
    """Returns up to three special tokens that are named like a mask, with their spellings."""
    named = [
        (token, spelling)
        for token, spelling in sorted(tokenizer.special_spellings.items())
        if any(word in spelling.lower() for word in _MASK_WORDS) and token < vocab_size
    ]
    return dict(named[:_MAX_MASKS])
