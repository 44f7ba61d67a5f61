"""Text <-> token ids: Hugging Face tokenizer.json, sentencepiece, or plain bytes; chat templates.

tokenizer = load_tokenizer(directory)
ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])

decoder = IncrementalDecoder(tokenizer)
for ids in stream:
    print(decoder.push(ids), end="")
print(decoder.flush())
"""

import abc
import hashlib
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from dflash import errors
from dflash.text import chat_template
from dflash.text.chat_template import Messages

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
_SPACE_SIGN = "\u2581"  # what sentencepiece writes for a space


class Tokenizer(abc.ABC):
    """What encoding prompts and showing answers needs."""

    vocab_size: int  # tokens it knows; a model's vocabulary is often padded beyond
    fingerprint: str  # equal for tokenizers that turn the same text into the same ids

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; a beginning-of-sequence id is added where the tokenizer's files say so.

        Special tokens spelled out in the text are read as such.
        """

    def encode_chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the answer begins.

        Args:
          messages: each with "role" and "content".
        Raises:
          InputError: there is no chat template, or it cannot render these messages.
        """
        return self.encode_rendered(self.render_chat(messages))

    @abc.abstractmethod
    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """A conversation in the chat template; without generation prompt it ends as it stands."""

    @abc.abstractmethod
    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what `render_chat` wrote, or of a piece of it: nothing is added at its ends."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""


def load_tokenizer(directory: pathlib.Path, **template_variables: Any) -> Tokenizer:
    """Loads the tokenizer of a checkpoint; without one, token ids can still be decoded.

    Args:
      directory: of the checkpoint.
      **template_variables: what the chat template may ask for, such as `enable_thinking`.
    Raises:
      InputError: it is damaged, or a library for it is absent.
    """
    if (directory / TOKENIZER_JSON).exists():
        return HuggingFaceTokenizer(directory, template_variables)
    if (directory / SENTENCEPIECE_MODEL).exists():
        return SentencePieceTokenizer(directory, template_variables)
    return NoTokenizer(directory)


class HuggingFaceTokenizer(Tokenizer):
    """tokenizer.json, by the `tokenizers` library."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any]):
        file = directory / TOKENIZER_JSON
        try:
            import tokenizers
        except ImportError as error:
            raise errors.InputError(
                f"{file}: needs tokenizers; pip install 'dflash[hf]', or give prompts as prompt_ids"
            ) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise errors.InputError(
                f"{file}: damaged ({chat_template.first_line(error)})"
            ) from error
        # Some files ask for every text to be cut or filled to a training length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = chat_template.ChatTemplate(
            directory, chat_template.special_tokens(directory) | variables
        )
        self.fingerprint = _fingerprint(directory)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_rendered(self, text: str) -> list[int]:
        # The template writes the beginning-of-sequence token itself; it must not come twice.
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class SentencePieceTokenizer(Tokenizer):
    """tokenizer.model, by the `sentencepiece` library.

    Prompts get a beginning-of-sequence id where tokenizer_config.json says `add_bos_token: true`.
    """

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any]):
        import sentencepiece

        file = directory / SENTENCEPIECE_MODEL
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (OSError, RuntimeError) as error:
            raise errors.InputError(f"{file}: not a sentencepiece model") from error
        self.vocab_size = self._model.vocab_size()
        special = {
            name: self._model.id_to_piece(token)
            for name, token in [
                ("bos_token", self._model.bos_id()),
                ("eos_token", self._model.eos_id()),
            ]
            if token >= 0
        }
        self._template = chat_template.ChatTemplate(
            directory, special | chat_template.special_tokens(directory) | variables
        )
        self.fingerprint = _fingerprint(directory)
        self._add_bos = bool(chat_template.tokenizer_config(directory).get("add_bos_token", False))
        # sentencepiece itself reads control pieces in a text, such as </s>, as plain characters,
        # and its sign for a space as a space: where there are pieces for bytes, those spell it.
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size) if self._is_control(i)]
        self._apart = {piece: [self._model.piece_to_id(piece)] for piece in pieces}
        space = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_SIGN.encode()]
        if all(map(self._model.is_byte, space)):
            self._apart[_SPACE_SIGN] = space
        self._apart_pattern = re.compile("|".join(map(re.escape, self._apart)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        bos = [self._model.bos_id()] if self._add_bos and self._model.bos_id() >= 0 else []
        return bos + self.encode_rendered(text)

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def encode_rendered(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in self._apart_pattern.finditer(text):
            ids += self._model.encode(text[start : match.start()])
            ids += self._apart[match.group()]
            start = match.end()
        return ids + self._model.encode(text[start:])

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size and not self._is_control(i)]
        return self._model.decode(known)

    def _is_control(self, token: int) -> bool:
        return self._model.is_control(token)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, for random weights, which have no tokenizer; 256 shows as ⟨256⟩."""

    vocab_size = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        # Random weights have no chat template either: the contents, a line each.
        return "".join(f"{message['content']}\n" for message in messages)

    def encode_rendered(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        encoded = b"".join(
            bytes([token]) if token < self.vocab_size else f"⟨{token}⟩".encode() for token in ids
        )
        return encoded.decode("utf-8", errors="replace")


class NoTokenizer(Tokenizer):
    """Of a checkpoint without one: takes no text, and shows id 7 as ⟨7⟩."""

    vocab_size = 0
    fingerprint = ""

    def __init__(self, directory: pathlib.Path):
        self._complaint = (
            f"{directory}: no tokenizer ({TOKENIZER_JSON} or {SENTENCEPIECE_MODEL}); "
            "give prompts as prompt_ids"
        )

    def encode(self, text: str) -> list[int]:
        raise errors.InputError(self._complaint)

    def render_chat(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        raise errors.InputError(self._complaint)

    def encode_rendered(self, text: str) -> list[int]:
        raise errors.InputError(self._complaint)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"⟨{token}⟩" for token in ids)


class IncrementalDecoder:
    """Turns ids that arrive bit by bit into text, character by whole character.

    What `push` returned, joined, equals `decode` of all ids at once, as far as the bytes are UTF-8.
    """

    # A character has up to 4 bytes, so that many tokens. Some decoders spoil a whole run of byte
    # tokens for the sake of one that is missing, so a few more are waited for before giving up.
    _MAX_PENDING = 8

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._reset()

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids; returns the text that they make certain."""
        return "".join(self._push_one(token) for token in ids)

    def flush(self) -> str:
        """Returns what is still held back, and starts anew."""
        rest = self._tokenizer.decode(self._ids)[len(self._shown) :]
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
        text = self._tokenizer.decode(self._ids)
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
            self._shown = self._tokenizer.decode(self._ids)
        elif not patient:
            self._ids.pop()  # special tokens without end
        return new


def _fingerprint(directory: pathlib.Path) -> str:
    """A hash of the files that say how text becomes ids."""
    digest = hashlib.sha256()
    patterns = ("tokenizer*", "special_tokens_map.json", "chat_template*")
    paths = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    for path in sorted(paths):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
