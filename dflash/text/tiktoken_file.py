"""Tokenizers in the format of tiktoken (byte sequences with ranks), as Kimi K2 uses it."""

import base64
import datetime
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.text import chat_template, special_tokens
from dflash.text.chat_template import ChatTemplate
from dflash.text.special_tokens import SpecialTokens
from dflash.text.token_bytes import TokenBytes
from dflash.text.tokenizer import TIKTOKEN_MODEL
from dflash.text.tokenizer_files import TemplateTokenizer, fingerprint_of
from dflash.version import install_command

# Pattern that splits a text into words before bytes are merged. It is that of Kimi K2: the file of
# ranks has no pattern, and the code in a checkpoint is not run.
_WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}*{_LOWER}+{_SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_WORD}+{_LOWER}*{_SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
_CLASS = "TikTokenTokenizer"
_RESERVED = 256  # number of special token ids after those of the file
# Longer runs of spaces or non-spaces overflow the stack of the regular expressions of the library.
_LONGEST_RUN = 25_000


class TiktokenTokenizer(TemplateTokenizer):
    """Tokenizer of tiktoken.model, by the `tiktoken` library, as Kimi K2 uses it.

    Special tokens are those of `added_tokens_decoder` in tokenizer_config.json and the reserved
    ones after those of the file. Outputs show the special tokens that lack `special: true`.
    """

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        file = directory / TIKTOKEN_MODEL
        try:
            import tiktoken
        except ImportError as error:
            raise errors.InputError(
                f"{file}: needs tiktoken; {install_command('hf')}, or give prompts as prompt_ids"
            ) from error
        config = chat_template.tokenizer_config(directory)
        kind = config.get("tokenizer_class", _CLASS)
        if kind != _CLASS:
            raise errors.InputError(
                f"{directory / 'tokenizer_config.json'}: tokenizer_class: {kind!r} is not "
                f"supported with {TIKTOKEN_MODEL}; expected {_CLASS!r}"
            )
        ranks = _read_ranks(file)
        added = {
            number: (options["content"], options["special"])
            for number, options in special_tokens.declared(directory)
        }
        self.vocab_size = len(ranks) + _RESERVED
        spellings = {
            number: added.get(number, (f"<|reserved_token_{number}|>", True))
            for number in range(len(ranks), self.vocab_size)
        }
        self._special_tokens = SpecialTokens(
            {spelling: number for number, (spelling, _) in spellings.items()}
        )
        self._hidden = {number for number, (_, special) in spellings.items() if special}
        plain = sorted(ranks, key=ranks.get)
        self._spelled = (*plain, *(spelling.encode() for spelling, _ in spellings.values()))
        self._encoding = tiktoken.Encoding(
            TIKTOKEN_MODEL, pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )
        self._template = ChatTemplate(
            directory, chat_template.special_tokens(directory) | variables, date
        )
        self.fingerprint = fingerprint_of(directory, variables, date)

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        return self.encode_rendered(text if special_tokens else self._special_tokens.mark(text))

    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        ids: list[int] = []
        for special, piece in self._special_tokens.split(text):
            ids += self._encode_text(piece) if special is None else [special]
        return ids

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        shown = (
            self._spelled[token]
            for token in ids
            if 0 <= token < self.vocab_size and (special_tokens or token not in self._hidden)
        )
        return b"".join(shown).decode("utf-8", errors="replace")

    def token_bytes(self) -> TokenBytes:
        spellings = enumerate(self._spelled)
        return TokenBytes(tuple(None if id in self._hidden else text for id, text in spellings))

    def _encode_text(self, text: str) -> list[int]:
        pieces = _cut_runs(text, _LONGEST_RUN)
        return [token for piece in pieces for token in self._encoding.encode_ordinary(piece)]


def _read_ranks(file: pathlib.Path) -> dict[bytes, int]:
    """Reads lines, each a token in base64 and its rank, and returns the ranks by token."""
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line.strip()]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise errors.InputError(f"{file}: not a tiktoken file, or damaged") from error
    singles = all(bytes([byte]) in ranks for byte in range(256))
    if not singles or sorted(ranks.values()) != list(range(len(lines))):
        raise errors.InputError(
            f"{file}: ranks are not 0, 1, …, or some of the 256 bytes have none"
        )
    return ranks


def _cut_runs(text: str, longest: int) -> Iterator[str]:
    """Splits a text such that no run of spaces or of non-spaces is longer than `longest`."""
    begin = 0
    for match in re.finditer(rf"\s{{{longest}}}|\S{{{longest}}}", text):
        yield text[begin : match.end()]
        begin = match.end()
    if begin < len(text):
        yield text[begin:]
