"""Encodes texts from clients: no further than needed, and without the server's paths in errors."""

import pathlib
import re
from collections.abc import Callable, Sequence

from dflash import errors
from dflash.serving.request_error import RequestError

# Rarely is a token longer on average, so that long prompts take a single attempt.
_CHARACTERS_PER_TOKEN = 8
_SPLIT_TOKENS = 100  # A cut within a long token may make several of it.
_DIRECTORY = re.compile(r"""(?<![^\s'"(=])/(?:[^\s/:'"]+/)+""")


def encode_within(
    text: str, encode: Callable[[str], Sequence[int]], param: str, max_length: int
) -> tuple[int, ...]:
    """Encodes a text, or rejects it as soon as its beginning has too many tokens.

    The time of a rejection is then bounded by `max_length` and not by the text.

    Args:
      text: Text to encode.
      encode: Function that encodes a text.
      param: Name of the field.
      max_length: Number of tokens that the context holds.
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
    """Returns the error for the client of a text that cannot be encoded.

    Args:
      error: Error of the tokenizer or the chat template, which may name files of the server.
      param: Name of the field.
      root: Name of the target's checkpoint, often a path.
    """
    message = str(error).replace(root, pathlib.PurePath(root).name)
    return RequestError(_DIRECTORY.sub("", message), param=param)
