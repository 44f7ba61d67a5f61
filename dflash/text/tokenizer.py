"""Interface of tokenizers, tokenizers without files, and incremental decoding.

decoder = IncrementalDecoder(tokenizer, prompt=prompt_ids)
for ids in stream:
    print(decoder.push(ids), end="")
print(decoder.flush())
"""

import abc
import copy
import functools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.text.chat_template import Messages
from dflash.text.token_bytes import TokenBytes

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
TIKTOKEN_MODEL = "tiktoken.model"


class Tokenizer(abc.ABC):
    """Converts between text and token ids."""

    vocab_size: int  # number of tokens; the vocabulary of a model may be padded to a larger size
    fingerprint: str  # equal for tokenizers that encode every text alike
    has_chat_template: bool = False  # whether the checkpoint has a chat template
    chat_template: str = ""  # source of the template for conversations with tools
    switches_thinking: bool = False  # whether `enable_thinking` changes what the template renders

    @abc.abstractmethod
    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Encodes a text as token ids.

        Args:
          special_tokens: Whether spellings of special tokens in the text are encoded as special
            tokens; otherwise they are encoded as plain text.
          add_special_tokens: Whether to add the special tokens that the files of the tokenizer
            prescribe at the ends of a text, such as a beginning-of-sequence id.
        """

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Encodes a conversation with the chat template, up to where the answer begins.

        Only the template adds special tokens; their spellings in messages are plain text.
        """
        return self.encode_rendered(self.render_chat(messages, **variables))

    @abc.abstractmethod
    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation with the chat template.

        Spellings of special tokens in messages and variables are marked for `encode_rendered`; see
        `special_tokens`.

        Args:
          add_generation_prompt: Whether to end with the text that begins an answer.
          **variables: Variables of the template, such as `enable_thinking`; they replace those that
            the tokenizer was loaded with.
        """

    @abc.abstractmethod
    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        """Encodes text from `render_chat` as it is; only a `beginning` may get a leading space."""

    def mark(self, text: str) -> str:
        """Marks the spellings of special tokens in a text, as `render_chat` does in messages."""
        return text

    def special_ends(self, rendered: str) -> list[tuple[int, int]]:
        """Returns (token id, end) of each special token in text from `render_chat`, in order."""
        del rendered
        return []

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        """Decodes token ids, by default without special ones; what is not UTF-8 becomes U+FFFD."""

    @property
    def special_spellings(self) -> Mapping[int, str]:
        """Spellings of the special tokens by token id."""
        return {}

    def token_bytes(self) -> TokenBytes:
        """Returns the bytes of each token, for grammars."""
        raise errors.InputError(
            "structured output needs the bytes of each token, which are unknown for this tokenizer"
        )


class ByteTokenizer(Tokenizer):
    """Tokenizer of UTF-8 bytes, for random weights; id 256 is decoded as ⟨256⟩."""

    vocab_size = 256
    fingerprint = "bytes"

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        return list(text.encode("utf-8"))

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        # Random weights have no chat template, so each message becomes a line.
        return "".join(f"{message['content'] or ''}\n" for message in messages)

    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        encoded = b"".join(
            bytes([token]) if token < self.vocab_size else f"⟨{token}⟩".encode() for token in ids
        )
        return encoded.decode("utf-8", errors="replace")

    def token_bytes(self) -> TokenBytes:
        return TokenBytes(tuple(bytes([byte]) for byte in range(self.vocab_size)))


class NoTokenizer(Tokenizer):
    """Stand-in for a missing tokenizer, which cannot encode text and decodes id 7 as ⟨7⟩."""

    vocab_size = 0
    fingerprint = ""

    def __init__(self, directory: pathlib.Path):
        self._message = (
            f"{directory}: no tokenizer ({TOKENIZER_JSON}, {SENTENCEPIECE_MODEL} or "
            f"{TIKTOKEN_MODEL}); give prompts as prompt_ids"
        )

    def encode(self, text: Any, **options: Any) -> list[int]:
        raise errors.InputError(self._message)

    render_chat = encode_rendered = encode

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        return "".join(f"⟨{token}⟩" for token in ids)


def decode_output(
    tokenizer: Tokenizer, prompt: Sequence[int], output_ids: Sequence[int], **options: bool
) -> str:
    """Decodes an output: returns what it adds to the text of its prompt.

    Many tokenizers drop the space of the first token of a text, which an output is not.
    """
    context = _context(tokenizer, prompt, **options)
    before = tokenizer.decode(context, **options)
    return _added(before, tokenizer.decode([*context, *output_ids], **options))


def _context(tokenizer: Tokenizer, prompt: Sequence[int], **options: bool) -> list[int]:
    """Returns the last tokens of a prompt: as few as have a text, and no character's rest."""
    size = IncrementalDecoder.MAX_PENDING
    while size < len(prompt) and not tokenizer.decode(prompt[-size:], **options).strip("\ufffd"):
        size *= 2
    return list(prompt[-size:])


def _added(before: str, text: str) -> str:
    """Returns what follows `before` in a text that may complete the last character of `before`."""
    return text[len(before if text.startswith(before) else before.rstrip("\ufffd")) :]


class IncrementalDecoder:
    """Decodes token ids as they arrive, in whole characters.

    The concatenated results equal `decode_output` of all ids if their bytes are valid UTF-8.
    """

    # A character has up to 4 bytes and therefore up to 4 tokens. Some decoders garble a whole run
    # of byte tokens while one is missing, so wait for a few more before giving up.
    MAX_PENDING = 8

    def __init__(
        self, tokenizer: Tokenizer, *, prompt: Sequence[int] = (), special_tokens: bool = False
    ):
        self._decode = functools.partial(tokenizer.decode, special_tokens=special_tokens)
        self._reset(_context(tokenizer, prompt, special_tokens=special_tokens))

    def fork(self) -> "IncrementalDecoder":
        """Returns a decoder in the same state that shares the tokenizer."""
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin

    def push(self, ids: Iterable[int]) -> str:
        """Appends token ids, and returns the text that is now final."""
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        """Returns the text that was held back, and resets the decoder."""
        remaining = _added(self._shown, self._decode(self._ids))
        self._reset([])
        return remaining

    def _reset(self, context: list[int]) -> None:
        # The window holds the ids whose text can still change, after some ids of context. Context
        # is needed because the first token of a text may be decoded without its leading space.
        self._ids = context
        self._shown = self._decode(context)  # text of the window that was already returned
        self._context = len(context)  # number of ids in the window that are context

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        patient = len(self._ids) - self._context <= self.MAX_PENDING
        incomplete = min(3, len(text) - len(text.rstrip("\ufffd")))
        if incomplete and patient:
            text = text[: len(text) - incomplete]
            if not text.startswith(self._shown):
                return ""
        new, self._shown = _added(self._shown, text), text
        if incomplete and patient:
            return new
        if new:  # after a context without text, the next token would decode as the first one
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._decode(self._ids)
        elif not patient:
            self._ids.pop()  # bounds the window in an endless run of special tokens
        return new
