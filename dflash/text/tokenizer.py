"""Interface of tokenizers, those that need no files, and decoding of ids as they arrive.

decoder = IncrementalDecoder(tokenizer)
for ids in stream:
    print(decoder.push(ids), end="")
print(decoder.flush())
"""

import abc
import copy
import functools
import pathlib
from collections.abc import Iterable
from typing import Any

from dflash import errors
from dflash.text.chat_template import Messages
from dflash.text.token_bytes import TokenBytes

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
TIKTOKEN_MODEL = "tiktoken.model"


class Tokenizer(abc.ABC):
    """Converts between text and token ids."""

    vocab_size: int  # number of tokens; a model's vocabulary is often padded beyond it
    fingerprint: str  # equal for tokenizers that turn the same text into the same ids

    @abc.abstractmethod
    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        """Ids of a text; a beginning-of-sequence id is added where the tokenizer's files say so.

        Args:
          text: of a user.
          special_tokens: whether special tokens that the text spells are read as such; otherwise
            they are text like any other.
          add_special_tokens: whether to add what the files say at a text's ends.
        """

    def encode_chat(self, messages: Messages, **variables: Any) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the answer begins.

        Special tokens come from the template alone: those that messages spell are text.

        Args:
          messages: each with "role" and "content".
          **variables: see `render_chat`.
        Raises:
          InputError: there is no chat template, or it cannot render these messages.
        """
        return self.encode_rendered(self.render_chat(messages, **variables))

    @abc.abstractmethod
    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """A conversation in the chat template; without generation prompt, up to its last message.

        Special tokens that messages and variables spell are marked, for `encode_rendered`; see
        `special_tokens`.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: whether the answer is to begin where the text ends.
          **variables: what the template may ask for, such as `enable_thinking`, in place of those
            that the tokenizer was loaded with.
        """

    @abc.abstractmethod
    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        """Ids of what `render_chat` wrote, or of a piece of it: nothing is added at its ends.

        Args:
          text: with marks.
          beginning: whether it is the beginning of a text, where many tokenizers put a space.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD.

        Args:
          ids: token ids.
          special_tokens: whether to spell special tokens, rather than leave them out.
        """

    def token_bytes(self) -> TokenBytes:
        """The bytes that each token writes, for grammars.

        Raises:
          InputError: they are not known for this kind of tokenizer.
        """
        raise errors.InputError(
            "this checkpoint's tokenizer does not say which bytes its tokens write, which "
            "structured output needs"
        )


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, for random weights, which have no tokenizer; 256 shows as ⟨256⟩."""

    vocab_size = 256
    fingerprint = "bytes"

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        return list(text.encode("utf-8"))

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        # Random weights have no chat template either: the contents, a line each.
        return "".join(f"{message['content']}\n" for message in messages)

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
    """Of a checkpoint without a tokenizer: refuses text, and shows id 7 as ⟨7⟩."""

    vocab_size = 0
    fingerprint = ""

    def __init__(self, directory: pathlib.Path):
        self._message = (
            f"{directory}: no tokenizer ({TOKENIZER_JSON}, {SENTENCEPIECE_MODEL} or "
            f"{TIKTOKEN_MODEL}); "
            "give prompts as prompt_ids"
        )

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        raise errors.InputError(self._message)

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        raise errors.InputError(self._message)

    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        raise errors.InputError(self._message)

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        return "".join(f"⟨{token}⟩" for token in ids)


class IncrementalDecoder:
    """Decodes ids as they arrive, in whole characters.

    What `push` returned, joined, equals `decode` of all ids at once, as far as the bytes are UTF-8.
    """

    # A character has up to 4 bytes, so up to 4 tokens. Some decoders garble a whole run of byte
    # tokens while one is missing, so a few more are awaited before giving up.
    _MAX_PENDING = 8

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool = False):
        self._decode = functools.partial(tokenizer.decode, special_tokens=special_tokens)
        self._reset()

    def fork(self) -> "IncrementalDecoder":
        """Returns a decoder in the same state that shares the tokenizer."""
        twin = copy.copy(self)
        twin._ids = list(self._ids)
        return twin

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that is now final."""
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        """Returns the text that is still held back, and resets."""
        rest = self._decode(self._ids)[len(self._shown) :]
        self._reset()
        return rest

    def _reset(self) -> None:
        # The window: ids whose text can still change, after some context, because the first token
        # of a text may decode differently (without its leading space).
        self._ids: list[int] = []
        self._shown = ""  # text of the window that was returned already
        self._context = 0  # ids of the window that are context

    def _push_one(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        patient = len(self._ids) - self._context <= self._MAX_PENDING
        held = min(3, len(text) - len(text.rstrip("\ufffd")))
        if held and patient:
            text = text[: len(text) - held]
            if not text.startswith(self._shown):
                return ""
        new, self._shown = text[len(self._shown) :], text
        if held and patient:
            return new
        if new:  # a token without text is no context: the next one would decode as the first
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._shown = self._decode(self._ids)
        elif not patient:
            self._ids.pop()  # an endless run of special tokens
        return new
