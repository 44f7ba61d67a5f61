"""Encodes prompts from clients: no further than needed, without the server's paths in errors."""

import functools
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config.schema import MAX_TOKENS
from dflash.serving.bodies import MAX_CHOICES
from dflash.serving.served_model import ServedModel
from dflash.serving.validation import RequestError
from dflash.text import jsonl

# Accepted types of a prompt, with their names in errors.
PROMPT_KINDS = {str: "a string", list: "a list of token ids"}

# Rarely is a token longer on average, so that long prompts take a single attempt.
_CHARACTERS_PER_TOKEN = 8
_SPLIT_TOKENS = 100  # A cut within a long token may make several of it.
_DIRECTORY = re.compile(r"""(?<![^\s'"(=])/(?:[^\s/:'"]+/)+""")


def token_ids(value: Any, param: str, model: ServedModel) -> tuple[int, ...]:
    """Returns a list of token ids, which may be empty; raises RequestError for another value."""
    if not isinstance(value, list | tuple):
        message = f"{param}: expected a list of token ids; got {jsonl.quote(value)}"
        raise RequestError(message, param=param)
    for place, token in enumerate(value):
        where = f"{param}[{place}]"
        if isinstance(token, bool) or not isinstance(token, int):
            message = f"{where}: expected a token id; got {jsonl.quote(token)}"
            raise RequestError(message, param=param)
        if not 0 <= token < model.vocab_size:
            raise RequestError(
                f"{where}: {jsonl.quote(token)} is outside the vocabulary of {model.vocab_size}",
                param=param,
            )
    return tuple(value)


def encode_prompts(
    value: Any,
    param: str,
    model: ServedModel,
    *,
    kinds: Mapping[type, str] = PROMPT_KINDS,
    add_special_tokens: bool = True,
) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Encodes a field that holds one prompt or several, as texts or token ids.

    Args:
      kinds: Accepted types of a prompt, with their names in errors.
      add_special_tokens: Add the tokens that the tokenizer puts around a text, such as BOS.
    Returns:
      Token ids of the prompts, and whether the value is a list of prompts.
    Raises:
      RequestError: The value has another type, or a prompt cannot be encoded or is too long.
    """
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], int | float)
    values = (
        {f"{param}[{i}]": prompt for i, prompt in enumerate(value)} if several else {param: value}
    )
    if len(values) > MAX_CHOICES:
        raise RequestError(f"{param}: expected at most {MAX_CHOICES} prompts", param=param)
    prompts = []
    for where, prompt in values.items():
        if type(prompt) not in kinds:
            expected = " or ".join(kinds.values()) + ("" if several else ", or a list of prompts")
            message = f"{where}: expected {expected}; got {jsonl.quote(prompt)}"
            raise RequestError(message, param=where)
        if isinstance(prompt, str):
            ids = encode_text(
                prompt,
                where,
                model,
                add_special_tokens=add_special_tokens,
                max_length=model.max_length,
            )
        else:
            ids = token_ids(prompt, where, model)
        prompts.append(check_prompt(ids, where, model))
    return tuple(prompts), several


def encode_text(
    text: str,
    param: str,
    model: ServedModel,
    *,
    add_special_tokens: bool = True,
    max_length: int = MAX_TOKENS,
) -> tuple[int, ...]:
    """Encodes a text prompt, without a chat template.

    Args:
      max_length: Number of tokens beyond which a text is too long.
    Raises:
      RequestError: The text cannot be encoded, or is much too long.
    """
    encode = functools.partial(
        model.tokenizer.encode,
        special_tokens=model.special_tokens,
        add_special_tokens=add_special_tokens,
    )
    try:
        return encode_within(jsonl.check_unicode(text, param), encode, param, max_length)
    except errors.InputError as error:
        raise input_error(error, param, model.root) from error


def check_prompt(ids: tuple[int, ...], param: str, model: ServedModel) -> tuple[int, ...]:
    """Returns a prompt's ids unchanged; raises RequestError if the target cannot decode them."""
    if not ids:
        raise RequestError(f"{param}: empty; expected at least one token", param=param)
    if max(ids) >= model.vocab_size:
        raise RequestError(
            f"{param}: token {max(ids)} is outside the vocabulary of {model.vocab_size}: the "
            "tokenizer does not fit the target",
            param=param,
        )
    if len(ids) >= model.max_length:
        raise RequestError(
            f"{param}: {len(ids)} tokens, but the context holds {model.max_length} including the "
            "output; shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )
    return ids


def encode_within(
    text: str, encode: Callable[[str], Sequence[int]], param: str, max_length: int
) -> tuple[int, ...]:
    """Encodes a text, or rejects it as soon as its beginning has too many tokens.

    The time of a rejection is then bounded by `max_length` and not by the text.

    Raises:
      RequestError: The text has more tokens than the context holds.
    """
    end = _CHARACTERS_PER_TOKEN * max_length
    while end < len(text):
        if len(encode(text[:end])) > max_length + _SPLIT_TOKENS:
            raise RequestError(
                f"{param}: {len(text)} characters are more than {max_length} tokens, which the "
                "context holds including the output; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )
        end *= _CHARACTERS_PER_TOKEN
    return tuple(encode(text))


def input_error(error: errors.InputError, param: str, root: str) -> RequestError:
    """Returns the client's error of a text, without the paths of the server that it may name."""
    message = str(error).replace(root, pathlib.PurePath(root).name)
    return RequestError(_DIRECTORY.sub("", message), param=param)
