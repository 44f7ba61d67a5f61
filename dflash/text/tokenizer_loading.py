"""Chooses the tokenizer of a checkpoint by the files in its directory.

tokenizer = load_tokenizer(directory)
ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
"""

import datetime
import functools
import pathlib
import sys
from typing import Any

from dflash.text.tiktoken_file import TiktokenTokenizer
from dflash.text.tokenizer import (
    SENTENCEPIECE_MODEL,
    TIKTOKEN_MODEL,
    TOKENIZER_JSON,
    ByteTokenizer,
    NoTokenizer,
    Tokenizer,
)
from dflash.text.tokenizer_files import HuggingFaceTokenizer, SentencePieceTokenizer

# The first of these files that a directory holds determines the class.
_CLASSES = {
    TOKENIZER_JSON: HuggingFaceTokenizer,
    SENTENCEPIECE_MODEL: SentencePieceTokenizer,
    TIKTOKEN_MODEL: TiktokenTokenizer,
}


def load_tokenizer(
    directory: pathlib.Path, *, date: datetime.date | None = None, **template_variables: Any
) -> Tokenizer:
    """Loads the tokenizer of a checkpoint; without one, token ids can still be decoded.

    Args:
      date: Date that chat templates print; None for today. All processes of a run share one date,
        also after it resumes, so that its prompts stay the same.
    """
    date = date or datetime.date.today()
    for file, kind in _CLASSES.items():
        if (directory / file).exists():
            return kind(directory, template_variables, date)
    return NoTokenizer(directory)


def for_target(
    directory: pathlib.Path | None, *, thinking: bool | None, date: datetime.date | None = None
) -> Tokenizer:
    """Returns the tokenizer of a target, which decoding and training share.

    Args:
      directory: Directory of the checkpoint; None for random weights, whose tokens are bytes.
      thinking: Whether the chat template asks for reasoning before the answer; None leaves that to
        the template.
    """
    if directory is None:
        return ByteTokenizer()
    variables = {} if thinking is None else {"enable_thinking": thinking}
    tokenizer = load_tokenizer(directory, date=date, **variables)
    if thinking and tokenizer.has_chat_template and not tokenizer.switches_thinking:
        _warn_of_no_effect(directory)
    return tokenizer


@functools.cache  # A run may load a tokenizer several times.
def _warn_of_no_effect(directory: pathlib.Path) -> None:
    print(
        f"warning: thinking=true has no effect: the chat template of {directory} reads neither "
        "enable_thinking nor thinking",
        file=sys.stderr,
    )
