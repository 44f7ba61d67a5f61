"""Text of the diagnosis of a pair of target and drafter."""

from collections.abc import Iterator
from typing import Any

from dflash.loading.job import Job
from dflash.measure.pair.alternatives import mask_candidates
from dflash.measure.pair.diagnosis import Acceptance, Reading

_LOW = 0.4  # Share of first drafts accepted, below which a pair does not fit.
_MAX_POSITIONS = 15


def facts(job: Job) -> Iterator[str]:
    """Yields a line for each field that must fit between target and drafter."""
    target, shape = job.target.arch, getattr(job.drafter, "shape", None)
    name = job.config.drafter.name
    yield _row("target", f"{target.num_hidden_layers} layers, {target.hidden_size} wide")
    if shape is None:
        yield _row("drafter", f"{name}, without weights")
    else:
        yield _row("drafter", f"{name}, {_drafter_size(shape)}")
        yield from _shape_facts(job, shape)
    prompts, words = job.config.prompts, job.tokenizer
    chat = words.has_chat_template if prompts.chat is None else prompts.chat
    template = "chat template" if chat or not prompts.text else "plain text"
    if not words.has_chat_template:
        template += " (the target has no chat template)"
    thinking = {None: "by default", True: "on", False: "off"}[prompts.thinking]
    yield _row("prompts", f"{len(job.prompts)}, {template}, thinking {thinking}")
    yield _row("dtype", job.config.dtype)


def acceptance_lines(job: Job, acceptance: Acceptance) -> Iterator[str]:
    """Yields a table of the share of cycles that accept each draft position."""
    positions = min(job.drafter.longest_path - 1, _MAX_POSITIONS)
    tokens = job.config.decode.max_new_tokens
    yield f"acceptance over {acceptance.cycles.total()} cycles, up to {tokens} tokens per prompt"
    yield _shares("draft position", range(1, positions + 1), "d")
    yield _shares("accepted", acceptance.survival(positions), ".2f")
    yield f"  τ {acceptance.tau:.2f}"


def reading_line(reading: Reading, acceptance: Acceptance) -> str:
    """Returns the line of one alternative, beside the acceptance of the files' own reading."""
    alternative, tau = reading.alternative, reading.acceptance.tau
    change = f"{alternative.field} = {alternative.change}"
    return f"  {change:<58} τ {tau:.2f}  ({tau - acceptance.tau:+.2f})"


def verdict(job: Job, acceptance: Acceptance, suspect: Reading | None) -> str:
    """Returns what to do about the pair."""
    if suspect is not None:
        alternative = suspect.alternative
        place = "the run's config"
        if alternative.shape is not None and not alternative.field.startswith("drafter."):
            place = f"{job.drafter_source.directory}/config.json"
        return (
            f"suspicious: {alternative.field}. With {alternative.change}, τ is "
            f"{suspect.acceptance.tau:.2f} instead of {acceptance.tau:.2f}; set it in {place}"
        )
    first = acceptance.survival(1)[0]
    if first < _LOW:
        return (
            f"low acceptance ({first:.0%} of first drafts), and no single field explains it: check "
            "that the drafter was trained for this revision of the target and for such prompts"
        )
    return "no other reading of a field accepts clearly more: the fields fit the weights"


def _shape_facts(job: Job, shape: Any) -> Iterator[str]:
    target = job.target.arch
    if taps := getattr(shape, "target_layer_ids", None):
        layers = ", ".join(map(str, taps))
        yield _row("taps", f"outputs of layers {layers} of 0 to {target.num_hidden_layers - 1}")
    if hasattr(shape, "views"):
        yield _row("attention", _views(shape.views))
    if hasattr(shape, "decoder"):
        decoder = shape.decoder
        same = all(
            getattr(decoder, name) == getattr(target, name)
            for name in ("rope_theta", "rope_scaling")
        )
        beside = "as the target's" if same else f"the target's base is {target.rope_theta:g}"
        yield _row("rotary", f"base {decoder.rope_theta:g}; {beside}")
        yield _row("vocabulary", _vocabulary(shape))
    if hasattr(shape, "mask_token_id"):
        token, spellings = shape.mask_token_id, job.tokenizer.special_spellings
        candidates = mask_candidates(job.tokenizer, target.vocab_size)
        named = spellings.get(token, "no special token")
        more = [f"{other} is {text}" for other, text in candidates.items() if other != token]
        yield _row("mask token", "; ".join([f"{token} ({named})", *more]))


def _drafter_size(shape: Any) -> str:
    layers = getattr(getattr(shape, "decoder", shape), "num_hidden_layers", None)
    block = getattr(shape, "block_size", None)
    parts = [f"{layers} layers" if layers else "", f"blocks of {block}" if block else ""]
    return ", ".join(part for part in parts if part) or "with weights"


def _vocabulary(shape: Any) -> str:
    size, drafted = shape.decoder.vocab_size, getattr(shape, "draft_vocab_size", None)
    return f"{size} tokens" if drafted in (None, size) else f"{drafted} of {size} tokens"


def _views(views: Any) -> str:
    texts = []
    for view in views:
        seen = "full" if view.window is None else f"window {view.window}"
        texts.append(f"{seen}, {'causal' if view.causal else 'bidirectional'}")
    counted = [f"{texts.count(text)} × {text}" for text in dict.fromkeys(texts)]
    return "; ".join(counted)


def _shares(name: str, values: Any, form: str) -> str:
    return f"  {name:<16}" + "".join(f"{value:>5{form}}" for value in values)


def _row(name: str, text: str) -> str:
    return f"{name:<12}{text}"
