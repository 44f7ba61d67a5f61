"""Tokenizers of tokenizer.json and of sentencepiece, which most checkpoints use."""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import pathlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.text import chat_template, special_tokens, token_bytes
from dflash.text.chat_template import ChatTemplate, Messages
from dflash.text.special_tokens import SpecialTokens
from dflash.text.token_bytes import TokenBytes
from dflash.text.tokenizer import SENTENCEPIECE_MODEL, TIKTOKEN_MODEL, TOKENIZER_JSON, Tokenizer
from dflash.version import install_command

# Characters or tokens up to which the GIL may be held; tokenizers releases it for batches alone.
_SHORT = 2000
_SPACE_SIGN = "\u2581"  # symbol of sentencepiece for a space


class TemplateTokenizer(Tokenizer):
    """Tokenizer with special tokens and an optional chat template."""

    _special_tokens: SpecialTokens
    _template: ChatTemplate

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    @property
    def chat_template(self) -> str:
        return self._template.source

    def render_chat(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        messages = self._template.formed(messages, tools=bool(variables.get("tools")))
        return self._template.render(
            self._special_tokens.mark(messages),
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens.mark(variables),
        )

    @functools.cached_property
    def switches_thinking(self) -> bool:
        return self._greeting(True) != self._greeting(False)

    def _greeting(self, thinking: bool) -> str | None:
        with contextlib.suppress(errors.InputError):
            messages = [{"role": "user", "content": "Hi"}]
            return self.render_chat(messages, enable_thinking=thinking)
        return None

    @property
    def special_spellings(self) -> Mapping[int, str]:
        return self._special_tokens.spellings

    def mark(self, text: str) -> str:
        return self._special_tokens.mark(text)

    def special_ends(self, rendered: str) -> list[tuple[int, int]]:
        return [(token, end) for token, _, _, end in self._special_tokens.spans(rendered)]


class HuggingFaceTokenizer(TemplateTokenizer):
    """Tokenizer of tokenizer.json, by the `tokenizers` library."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        file = directory / TOKENIZER_JSON
        try:
            import tokenizers  # noqa: F401
        except ImportError as error:
            raise errors.InputError(
                f"{file}: needs tokenizers; {install_command('hf')}, or give prompts as prompt_ids"
            ) from error
        self._file = file
        with _reported_damage(file):
            self._tokenizer = _completed(file.read_bytes(), directory)
        # Some files truncate or pad every text to a training length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        named = chat_template.special_tokens(directory)
        self._template = ChatTemplate(directory, named | variables, date)
        self.fingerprint = fingerprint_of(directory, variables, date)
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_tokens = _special_tokens(
            {number: token for number, token in added.items() if token.special}
        )
        self._added_tokens = _special_tokens(added)
        self._hidden = frozenset(self._special_tokens.spellings)

    def special_ends(self, rendered: str) -> list[tuple[int, int]]:
        # Some files do not mark the tokens of the template as special.
        return [(token, end) for token, _, _, end in self._added_tokens.spans(rendered)]

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        with _reported_damage(self._file):
            literal = self._model_has_special or self._special_tokens.spelled_in(text)
            encoder = self._literal if literal and not special_tokens else self._tokenizer
            return _encode(encoder, text, add_special_tokens=add_special_tokens)

    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        with _reported_damage(self._file):
            return self._encode_rendered(text, beginning)

    def _encode_rendered(self, text: str, beginning: bool) -> list[int]:
        # The template adds the beginning-of-sequence token, which must not occur twice.
        literal = self._model_has_special or special_tokens.MARK in text
        if (beginning or not self._prefix) and not literal:
            return _encode(self._tokenizer, text)
        ids: list[int] = []
        inner = not beginning
        for special, piece in self._special_tokens.split(text):
            if special is None:
                encoder = self._unprefixed if inner else self._literal
                ids += _encode(encoder, piece)
            else:
                ids.append(special)
            inner = self._prefix == "first"
        return ids

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        # The library would show special tokens whose spelling the normalizer changes.
        ids = [token for token in ids if special_tokens or token not in self._hidden]
        with _reported_damage(self._file):
            if len(ids) <= _SHORT:
                return self._tokenizer.decode(ids, skip_special_tokens=False)
            return self._tokenizer.decode_batch([ids], skip_special_tokens=False)[0]

    def token_bytes(self) -> TokenBytes:
        known = token_bytes.of_tokenizer_json(self._content(), self.vocab_size)
        return known or super().token_bytes()

    def _content(self) -> dict[str, Any]:
        """Returns a new copy of the content of tokenizer.json, with the tokens added to it."""
        return json.loads(self._tokenizer.to_str())

    @functools.cached_property
    def _prefix(self) -> str:
        """Texts that get a leading space: "" (none), "first", or "each" (after special tokens)."""
        prefixes = {_prefix_of(part) for part in _parts(self._content())}
        return "each" if "each" in prefixes else "first" if "first" in prefixes else ""

    @functools.cached_property
    def _model_has_special(self) -> bool:
        """Returns whether the model may encode text as a special token, as after normalizing it."""
        import tokenizers

        model = self._tokenizer.model
        if isinstance(model, tokenizers.models.BPE) and not model.ignore_merges:
            return False
        return any(
            model.token_to_id(spelling) is not None for spelling in self.special_spellings.values()
        )

    @functools.cached_property
    def _literal(self) -> Any:
        """Tokenizer that encodes spellings of special tokens as plain text."""
        return _without_special_tokens(self._content())

    @functools.cached_property
    def _unprefixed(self) -> Any:
        """Variant of `_literal` that adds no leading space, for texts that follow others."""
        content = self._content()
        for part in _parts(content):
            if part["type"] == "Metaspace":
                part["prepend_scheme"] = "never"
            elif part["type"] == "ByteLevel":
                part["add_prefix_space"] = False
            elif part["type"] == "Prepend":
                part["prepend"] = ""
        return _without_special_tokens(content)


@contextlib.contextmanager
def _reported_damage(file: pathlib.Path) -> Iterator[None]:
    """Turns an error or a panic of the `tokenizers` library into InputError, which names the file.

    The library checks only a part of the file when it loads it; an error may surface with any
    text that is tokenized later.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust; not an Exception
        is_plain = type(error) in (Exception, ValueError) or isinstance(error, OSError)
        if not is_panic and not is_plain:
            raise
        raise errors.InputError(f"{file}: damaged ({chat_template.first_line(error)})") from error


def _completed(content: bytes, directory: pathlib.Path) -> Any:
    """Returns the tokenizer of a tokenizer.json with the tokens that other files add to it.

    The library numbers added tokens consecutively. Where the files state other ids, these tokens
    and special ones for the ids between them join the vocabulary, whose ids the library keeps.
    """
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_buffer(content)
    special_tokens.complete(tokenizer, directory)
    parsed = json.loads(content)
    vocabulary, added = parsed["model"]["vocab"], parsed.get("added_tokens") or []
    if not isinstance(vocabulary, Mapping):
        return tokenizer
    declared_ids = _stated_ids(vocabulary, added, directory)
    ids = {*vocabulary.values(), *declared_ids.values()}
    gaps = set(range(max(ids, default=0))) - ids
    if not gaps and all(
        tokenizer.token_to_id(text) == token for text, token in declared_ids.items()
    ):
        return tokenizer
    names = {f"<unused {token}>": token for token in gaps}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    unused = [{"id": names[name], "content": name, "special": True, **flags} for name in names]
    parsed["added_tokens"] = [*added, *unused]
    vocabulary |= declared_ids | names
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(parsed))
    special_tokens.complete(tokenizer, directory)
    return tokenizer


def _stated_ids(
    vocabulary: Mapping[str, int], added: Iterable[Mapping[str, Any]], directory: pathlib.Path
) -> dict[str, int]:
    """Returns the ids that files state for tokens beyond a vocabulary, by spelling."""
    declared = (
        (options["content"], token) for token, options in special_tokens.declared(directory)
    )
    taken, declared_ids = {*vocabulary.values(), None}, {}
    for text, token in (*((entry["content"], entry["id"]) for entry in added), *declared):
        if text not in vocabulary and text not in declared_ids and token not in taken:
            declared_ids[text] = token
            taken.add(token)
    return declared_ids


def _encode(encoder: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    if len(text) <= _SHORT:
        return encoder.encode(text, add_special_tokens=add_special_tokens).ids
    return encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def _special_tokens(tokens: Mapping[int, Any]) -> SpecialTokens:
    return SpecialTokens(
        {token.content: number for number, token in tokens.items()},
        strips={token.content: (token.lstrip, token.rstrip) for token in tokens.values()},
    )


def _parts(content: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """Yields the normalizers and pre-tokenizers of a tokenizer.json, with sequences unpacked."""
    for part in (content["normalizer"], content["pre_tokenizer"]):
        inner = part and (part.get("normalizers") or part.get("pretokenizers"))
        yield from inner or ([part] if part else [])


def _prefix_of(part: Mapping[str, Any]) -> str:
    if part["type"] == "Metaspace":
        return {"first": "first", "always": "each"}.get(part["prepend_scheme"], "")
    prefixed = part["type"] == "Prepend" or (
        part["type"] == "ByteLevel" and part["add_prefix_space"]
    )
    return "each" if prefixed else ""


def _without_special_tokens(content: dict[str, Any]) -> Any:
    """Returns the tokenizer of a tokenizer.json that never encodes text as a special token.

    The models of some files (unigram, WordPiece, BPE with `ignore_merges`) have special tokens
    among their pieces, so these get names that no text contains.
    """
    import tokenizers

    names = {
        token["content"]: f"{token['content']}{secrets.token_hex(16)}"
        for token in content["added_tokens"]
        if token["special"]
    }
    for token in content["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    if isinstance(model["vocab"], Mapping):
        model["vocab"] = {names.get(piece, piece): token for piece, token in model["vocab"].items()}
    else:  # (piece, score) pairs of a unigram model
        model["vocab"] = [(names.get(piece, piece), score) for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if _merged(pair) not in names]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _merged(pair: str | Sequence[str]) -> str:
    return "".join(pair.split(" ", 1) if isinstance(pair, str) else pair)


class SentencePieceTokenizer(TemplateTokenizer):
    """Tokenizer of tokenizer.model, by the `sentencepiece` library.

    A text after a special token begins a text, which may get a leading space, unless
    tokenizer_config.json has `legacy: false`. Prompts get a beginning-of-sequence id if it has
    `add_bos_token: true`.
    """

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        import sentencepiece

        self._specification, strips = read_sentencepiece(directory)
        serialized = self._specification.SerializeToString()
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=serialized)
            self.vocab_size = self._model.vocab_size()
            pieces = [self._model.id_to_piece(token) for token in range(self.vocab_size)]
        except (RuntimeError, UnicodeDecodeError) as error:
            file = directory / SENTENCEPIECE_MODEL
            raise errors.InputError(f"{file}: not a sentencepiece model, or damaged") from error
        ends = {"bos_token": self._model.bos_id(), "eos_token": self._model.eos_id()}
        named = {name: pieces[token] for name, token in ends.items() if token >= 0}
        named |= chat_template.special_tokens(directory)
        self._template = ChatTemplate(directory, named | variables, date)
        self.fingerprint = fingerprint_of(directory, variables, date)
        config = chat_template.tokenizer_config(directory)
        self._add_bos = bool(config.get("add_bos_token", False))
        self._prefixes_each = config.get("legacy") is not False
        # sentencepiece encodes the spellings of control pieces, such as </s>, as plain text.
        control = filter(self._is_control, range(self.vocab_size))
        self._special_tokens = SpecialTokens(
            {pieces[token]: token for token in control}, strips=strips
        )
        # sentencepiece would encode its space symbol as a space, so it is encoded as bytes instead.
        sign = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_SIGN.encode()]
        self._sign = sign if all(map(self._model.is_byte, sign)) else None

    def encode(
        self, text: str, *, special_tokens: bool = False, add_special_tokens: bool = True
    ) -> list[int]:
        adds = add_special_tokens and self._add_bos and self._model.bos_id() >= 0
        bos = [self._model.bos_id()] if adds else []
        return bos + self.encode_rendered(
            text if special_tokens else self._special_tokens.mark(text)
        )

    def encode_rendered(self, text: str, *, beginning: bool = True) -> list[int]:
        ids: list[int] = []
        for special, piece in self._special_tokens.split(text):
            if special is None:
                ids += self._encode_text(piece, beginning=beginning)
            else:
                ids.append(special)
            beginning = self._prefixes_each
        return ids

    def decode(self, ids: Iterable[int], *, special_tokens: bool = False) -> str:
        known = [token for token in ids if 0 <= token < self.vocab_size]
        if not special_tokens and not self._prefixes_each:
            return self._model.decode([token for token in known if not self._is_control(token)])
        # sentencepiece does not decode control pieces, and drops the prefix of a whole text only.
        shown = self._model.id_to_piece if special_tokens else lambda token: ""
        return "".join(
            "".join(map(shown, part)) if control else self._model.decode(list(part))
            for control, part in itertools.groupby(known, self._is_control)
        )

    def token_bytes(self) -> TokenBytes:
        return token_bytes.of_sentencepiece(self._model)

    def _encode_text(self, text: str, *, beginning: bool) -> list[int]:
        ids: list[int] = []
        parts = [text] if self._sign is None else text.split(_SPACE_SIGN)
        for place, part in enumerate(parts):
            if place:
                ids += self._sign
            inner = ids or not beginning
            # If leading spaces are removed, the prefix of sentencepiece restores one of them.
            drops_spaces = self._specification.normalizer_spec.remove_extra_whitespaces
            keeps = not (drops_spaces and part[:1].isspace())
            ids += (self._unprefixed if inner and keeps else self._model).encode(part)
        return ids

    @functools.cached_property
    def _unprefixed(self) -> Any:
        """Variant of the model that adds no leading space, for texts that follow others."""
        import sentencepiece

        specification = type(self._specification)()
        specification.CopyFrom(self._specification)
        specification.normalizer_spec.add_dummy_prefix = False
        serialized = specification.SerializeToString()
        return sentencepiece.SentencePieceProcessor(model_proto=serialized)

    def _is_control(self, token: int) -> bool:
        return self._model.is_control(token)


def read_sentencepiece(directory: pathlib.Path) -> tuple[Any, dict[str, tuple[bool, bool]]]:
    """Returns the model in tokenizer.model with the tokens that other files add to it.

    Special tokens become control pieces, which the library encodes no text as.

    Returns:
      The `ModelProto`, and whether a token absorbs the spaces before and after it, by spelling.
    """
    from google.protobuf import message
    from sentencepiece import sentencepiece_model_pb2

    file = directory / SENTENCEPIECE_MODEL
    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    except (OSError, message.DecodeError) as error:
        raise errors.InputError(f"{file}: not a sentencepiece model, or damaged") from error
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
    strips = {}
    for number, options in special_tokens.declared(directory):
        spelling = options["content"]
        token = ids.setdefault(spelling, len(model.pieces) if number is None else number)
        strips.setdefault(spelling, (bool(options.get("lstrip")), bool(options.get("rstrip"))))
        for unused in range(len(model.pieces), token + 1):
            model.pieces.add(piece=f"<unused {unused}>", score=0.0, type=kinds.UNUSED)
        piece = model.pieces[token]
        piece.piece = spelling
        if piece.type in (kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED):
            piece.type = kinds.CONTROL if options["special"] else kinds.USER_DEFINED
    return model, strips


def fingerprint_of(
    directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date
) -> str:
    """Hashes the files of a tokenizer and the variables that its chat template depends on."""
    digest = hashlib.sha256()
    patterns = (
        *("tokenizer*", TIKTOKEN_MODEL, "special_tokens_map.json", "chat_template*"),
        special_tokens.ADDED_TOKENS,
        f"{chat_template.NAMED_TEMPLATES}/*.jinja",
    )
    paths = {path for pattern in patterns for path in directory.glob(pattern) if path.is_file()}
    names = set()  # variables and functions whose names occur in the files
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode())
        digest.update(content)
        names |= {
            name for name in (*variables, "thinking", "strftime_now") if name.encode() in content
        }
    if "enable_thinking" not in names:
        variables = {**chat_template.thinking_variables(variables), **variables}
    used = {name: variables[name] for name in variables if name in names}
    if used:
        digest.update(json.dumps(used, sort_keys=True).encode())
    if "strftime_now" in names:
        digest.update(date.isoformat().encode())
    return digest.hexdigest()
