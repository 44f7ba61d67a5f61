"""Text <-> token ids: Hugging Face tokenizer.json, sentencepiece, or plain bytes; chat templates.

tokenizer = load_tokenizer(directory)
ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])

decoder = IncrementalDecoder(tokenizer)
for ids in stream:
    print(decoder.push(ids), end="")
print(decoder.flush())
"""

import abc
import datetime
import json
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dflash import errors

Messages = Sequence[Mapping[str, Any]]

TOKENIZER_JSON = "tokenizer.json"
SENTENCEPIECE_MODEL = "tokenizer.model"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer(abc.ABC):
    """What encoding prompts and showing answers needs."""

    vocab_size: int  # tokens it knows; a model's vocabulary is often padded beyond

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text; a beginning-of-sequence id is added where the tokenizer's files say so.

        Special tokens spelled out in the text are read as such.
        """

    @abc.abstractmethod
    def encode_chat(self, messages: Messages) -> list[int]:
        """Ids of a conversation in the checkpoint's chat template, up to where the answer begins.

        Args:
          messages: each with "role" and "content".
        Raises:
          InputError: there is no chat template, or it cannot render these messages.
        """

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, without special tokens; bytes that are not UTF-8 become U+FFFD."""


def load_tokenizer(directory: pathlib.Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint; without one, token ids can still be decoded.

    Raises:
      InputError: it is damaged, or a library for it is absent.
    """
    if (directory / TOKENIZER_JSON).exists():
        return HuggingFaceTokenizer(directory)
    if (directory / SENTENCEPIECE_MODEL).exists():
        return SentencePieceTokenizer(directory)
    return NoTokenizer(directory)


class HuggingFaceTokenizer(Tokenizer):
    """tokenizer.json, by the `tokenizers` library."""

    def __init__(self, directory: pathlib.Path):
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
            raise errors.InputError(f"{file}: damaged ({_first_line(error)})") from error
        # Some files ask for every text to be cut or filled to a training length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template = ChatTemplate(directory, _special_tokens(directory))
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def encode_chat(self, messages: Messages) -> list[int]:
        # The template writes the beginning-of-sequence token itself; it must not come twice.
        text = self._template.render(messages)
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


class SentencePieceTokenizer(Tokenizer):
    """tokenizer.model, by the `sentencepiece` library.

    Prompts get a beginning-of-sequence id where tokenizer_config.json says `add_bos_token: true`.
    """

    def __init__(self, directory: pathlib.Path):
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
        self._template = ChatTemplate(directory, special | _special_tokens(directory))
        self._add_bos = bool(_tokenizer_config(directory).get("add_bos_token", False))
        # sentencepiece itself reads control pieces in a text, such as </s>, as plain characters.
        pieces = [self._model.id_to_piece(i) for i in range(self.vocab_size) if self._is_control(i)]
        self._control = re.compile("|".join(map(re.escape, pieces)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        bos = [self._model.bos_id()] if self._add_bos and self._model.bos_id() >= 0 else []
        return bos + self._encode(text)

    def encode_chat(self, messages: Messages) -> list[int]:
        return self._encode(self._template.render(messages))

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in ids if 0 <= i < self.vocab_size and not self._is_control(i)]
        return self._model.decode(known)

    def _is_control(self, token: int) -> bool:
        return self._model.is_control(token)

    def _encode(self, text: str) -> list[int]:
        ids, start = [], 0
        for match in self._control.finditer(text):
            ids += self._model.encode(text[start : match.start()])
            ids.append(self._model.piece_to_id(match.group()))
            start = match.end()
        return ids + self._model.encode(text[start:])


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes as ids, for random weights, which have no tokenizer; 256 shows as ⟨256⟩."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_chat(self, messages: Messages) -> list[int]:
        # Random weights have no chat template either: the contents, a line each.
        return self.encode("".join(f"{message['content']}\n" for message in messages))

    def decode(self, ids: Iterable[int]) -> str:
        encoded = b"".join(
            bytes([token]) if token < self.vocab_size else f"⟨{token}⟩".encode() for token in ids
        )
        return encoded.decode("utf-8", errors="replace")


class NoTokenizer(Tokenizer):
    """Of a checkpoint without one: takes no text, and shows id 7 as ⟨7⟩."""

    vocab_size = 0

    def __init__(self, directory: pathlib.Path):
        self._directory = directory

    def encode(self, text: str) -> list[int]:
        raise errors.InputError(
            f"{self._directory}: no tokenizer ({TOKENIZER_JSON} or {SENTENCEPIECE_MODEL}); "
            "give prompts as prompt_ids"
        )

    def encode_chat(self, messages: Messages) -> list[int]:
        return self.encode("")

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


class ChatTemplate:
    """A checkpoint's Jinja template: chat_template.jinja, else in tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, special_tokens: Mapping[str, str]):
        self._directory = directory
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages) -> str:
        """The conversation as text, up to where the answer begins.

        Raises:
          InputError: there is no template, jinja2 is absent, or the template refuses.
        """
        source, text = self._read()
        try:
            import jinja2
        except ImportError as error:
            raise errors.InputError(
                f"{source}: chat templates need jinja2; pip install 'dflash[hf]'"
            ) from error
        try:
            template = _environment().from_string(text)
            return template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            reason = _first_line(error)
            raise errors.InputError(f"{source}: chat template fails: {reason}") from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            reason = f"{type(error).__name__}: {_first_line(error)}"
            raise errors.InputError(f"{source}: chat template fails: {reason}") from error

    def _read(self) -> tuple[pathlib.Path, str]:
        path = self._directory / "chat_template.jinja"
        if path.exists():
            return path, path.read_text(encoding="utf-8")
        path = self._directory / "tokenizer_config.json"
        template = _tokenizer_config(self._directory).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise errors.InputError(
                f"{self._directory}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give plain text prompts or prompt_ids"
            )
        return path, template


def _environment():
    """The names and settings that templates on the Hugging Face hub are written for.

    Templates are other people's code: they run in jinja2's sandbox.
    Source: transformers, `utils/chat_template_utils.py`.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the answer for training; here its body is all that counts."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter escapes <, > and & for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _special_tokens(directory: pathlib.Path) -> dict[str, str]:
    """Spelling of bos_token, eos_token and so on, which templates refer to."""
    config = _read_json(directory / "special_tokens_map.json") | _tokenizer_config(directory)
    tokens = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _tokenizer_config(directory: pathlib.Path) -> dict[str, Any]:
    return _read_json(directory / "tokenizer_config.json")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise errors.InputError(f"{path}: not valid JSON") from error
    if not isinstance(content, dict):
        raise errors.InputError(f"{path}: expected a JSON object")
    return content


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
