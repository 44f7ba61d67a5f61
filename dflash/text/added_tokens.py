"""Special tokens that are named outside tokenizer.json, as transformers adds them."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.text import chat_template

if TYPE_CHECKING:
    import tokenizers

_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")


def complete(tokenizer: "tokenizers.Tokenizer", directory: pathlib.Path) -> None:
    """Adds the tokens that only tokenizer_config.json or special_tokens_map.json name.

    Without them, their spellings would be split into ordinary tokens. A token that the vocabulary
    contains keeps its id; any other one gets the next free id.

    Args:
      tokenizer: Tokenizer of tokenizer.json; changed in place.
      directory: Directory of the checkpoint.
    Raises:
      InputError: A file states a token that is neither a string nor a mapping with "content".
    """
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for token in _stated(directory):
        if token.content not in known:
            known.add(token.content)
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])


def _stated(directory: pathlib.Path) -> Iterator["tokenizers.AddedToken"]:
    """Yields the tokens of the two files, those with ids first, in the order of their ids."""
    named = chat_template.named_tokens(directory)
    file = directory / chat_template.TOKENIZER_CONFIG
    by_id = named.get("added_tokens_decoder") or {}
    if not isinstance(by_id, Mapping) or not all(str(number).isdecimal() for number in by_id):
        raise errors.InputError(f"{file}: added_tokens_decoder: expected a mapping from token ids")
    for number in sorted(by_id, key=int):
        yield _added(by_id[number], f"{file}: added_tokens_decoder: {number}")
    for name in _NAMES:
        tokens = named.get(name) or ()
        if isinstance(tokens, Mapping) and "content" not in tokens:
            tokens = list(tokens.values())
        for token in tokens if isinstance(tokens, list | tuple) else (tokens,):
            yield _added(token, f"{file}: {name}", special=True)


def _added(token: Any, where: str, *, special: bool | None = None) -> "tokenizers.AddedToken":
    import tokenizers

    options = token if isinstance(token, Mapping) else {"content": token}
    if not isinstance(options.get("content"), str):
        raise errors.InputError(f'{where}: expected a string, or a mapping with "content"')
    special = bool(options.get("special")) if special is None else special
    flags = {name: bool(options[name]) for name in _OPTIONS if name in options}
    return tokenizers.AddedToken(options["content"], special=special, **flags)
