"""Conversion of a tokenizer in the metadata of a GGUF file to the files that `dflash.text` reads.

Byte-level BPE and that of Gemma 4 become tokenizer.json; sentencepiece BPE becomes tokenizer.model.
The spellings of special tokens and the chat template go to tokenizer_config.json.

Source of the pre-tokenizers and of the tokens that end an answer: llama.cpp, src/llama-vocab.cpp.
"""

import dataclasses
import enum
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.text.tokenizer import SENTENCEPIECE_MODEL, TOKENIZER_JSON

TOKENIZER_CONFIG = "tokenizer_config.json"

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # A named template has a dot and its name behind it.
_NO_MODEL, BYTE_LEVEL, SENTENCEPIECE, _GEMMA4 = "none", "gpt2", "llama", "gemma4"
_MODELS = BYTE_LEVEL, SENTENCEPIECE, _GEMMA4
_SPACE_SIGN = "\u2581"  # Symbol of sentencepiece for a space.
NAMED = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
ENDS = "eos", "eot", "eom"
_CODE_ENDS = "fim_pad", "fim_rep", "fim_sep"  # Ends of a text that fills in the middle of code.
# Tokens that end an answer, whether or not the file names them.
_END_SPELLINGS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    *("<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
# Beside a token of each of these sets, <|end|> ends a message within an answer.
_AFTER_MESSAGES = {"<|call|>", "<|calls|>"}, {"<|return|>", "<|flush|>"}
_HTML_TOO = "</s>"  # Where it is no control token, it ends a text that is struck through.
_DEFAULT_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # Those of sentencepiece.
_NO_TOKEN = -1, 2**32 - 1  # How writers of int32 and of uint32 say that there is no such token.


class TokenType(enum.IntEnum):
    """Type of a token; sentencepiece has the same numbers."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_TYPES = frozenset(TokenType)


@dataclasses.dataclass(frozen=True)
class _PreTokenizer:
    """Splits texts into words before BPE.

    Attributes:
      patterns: Regular expressions of words, each of which splits what those before it leave; empty
        for that of GPT-2.
      single_digits: Each digit is split off first.
      nfc: Texts are normalized to NFC, as in the tokenizer.json that the file was made from.
      ignore_merges: Words in the vocabulary are tokens, whatever the merges.
      adds_bos: The beginning-of-sequence token is added unless the file states otherwise.
      spelled: Tokens are spelled as in sentencepiece, not as bytes: with its symbol for spaces, and
        <0xE2> for a byte.
    """

    patterns: tuple[str, ...] = ()
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False
    spelled: bool = False


_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UP_TO_3_DIGITS = r"\p{N}{1,3}"


def _words(digits: str, marks: str = "") -> str:
    """Returns the pattern that Llama 3 and Qwen share but for digits and marks within words."""
    letters = r"\p{L}" + marks
    letter = f"[{letters}]" if marks else letters
    return (
        rf"{_SUFFIXES}|[^\r\n\p{{L}}\p{{N}}]?{letter}+|"
        rf"{digits}| ?[^\s{letters}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _words_by_case(digits: str, suffixes: str = "") -> str:
    """Returns the pattern of GPT-4o and Tekken: a word's capitals precede its small letters."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{capitals}*{small}+{suffixes}|{before}{capitals}+{small}*{suffixes}|"
        rf"{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LINE_ENDS, _IDEOGRAPHS = "[\r\n]", "[一-龥ࠀ-一가-퟿]+"  # As the patterns of DeepSeek have them.
# Letters with case, of DeepSeek-LLM. Escapes are of letters that normalization would replace.
_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎ"
    "ↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_QWEN = _PreTokenizer((_words(r"\p{N}"),), nfc=True)
_LLAMA3 = _PreTokenizer((_words(_UP_TO_3_DIGITS),), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": _PreTokenizer((_words(r"\p{N}", marks=r"\p{M}"),), nfc=True),
    "gpt-4o": _PreTokenizer((_words_by_case(_UP_TO_3_DIGITS, f"{_SUFFIXES}?"),)),
    "smaug-bpe": _PreTokenizer((_words(_UP_TO_3_DIGITS),)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "tekken": _PreTokenizer((_words_by_case(r"\p{N}"),), ignore_merges=True, adds_bos=True),
    "deepseek-coder": _PreTokenizer(
        (_LINE_ENDS, r"\s?\p{L}+", r"\s?\p{P}+", _IDEOGRAPHS, r"\p{N}")
    ),
    "deepseek-llm": _PreTokenizer(
        (
            *(_LINE_ENDS, rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+"),
            *(r"\s+$", _IDEOGRAPHS, r"\p{N}+"),
        )
    ),
    _GEMMA4: _PreTokenizer((r"[^\n]+|\n+",), adds_bos=True, spelled=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """Metadata of a tokenizer, by key without the prefix."""

    model: str = _NO_MODEL
    pre: str | None = None
    tokens: list = ()
    token_type: list | None = None
    scores: list | None = None
    merges: list | None = None
    add_bos_token: bool | None = None
    add_space_prefix: bool = True


_NAMES = sorted({*NAMED, *ENDS, *_CODE_ENDS})
_Ids = dataclasses.make_dataclass("_Ids", [(f"{n}_token_id", int | None, None) for n in _NAMES])


def of_file(header: GgufHeader) -> "GgufTokenizer":
    """Returns the tokenizer of a file; raises CheckpointError if a value has a wrong type."""
    templates = {}
    for key, template in header.metadata.items():
        name = key.removeprefix(TEMPLATE)
        if key == TEMPLATE or name.startswith("."):
            templates[name[1:] or "default"] = str(template)
    ids = vars(header.read(_Ids, PREFIX))
    return GgufTokenizer(header.file, header.read(_Keys, PREFIX), ids, templates)


@dataclasses.dataclass(frozen=True)
class GgufTokenizer:
    """Tokenizer as the metadata of a file describe it; chat templates are by name."""

    file: pathlib.Path
    keys: _Keys
    ids: Mapping[str, int | None]
    templates: Mapping[str, str]

    def files(self) -> dict[str, bytes]:
        """Returns the content of each file of the tokenizer, by name; none without a tokenizer."""
        model = self.keys.model
        if model == _NO_MODEL:
            return {}
        if model not in _MODELS:
            raise self._unusable(f"model: {model!r} is not supported, only {', '.join(_MODELS)}")
        tokens, types = self._vocabulary()
        ids = {name: self._id(key) for key, name in NAMED.items()}
        named = {name: tokens[token] for name, token in ids.items() if token is not None}
        templates = [{"name": k, "template": text} for k, text in self.templates.items()]
        config: dict[str, Any] = {**named, "chat_template": templates}
        if model != SENTENCEPIECE:
            name, content = TOKENIZER_JSON, _encode(self._bpe(tokens, types))
        else:
            config["add_bos_token"] = self.keys.add_bos_token is not False
            name, content = SENTENCEPIECE_MODEL, self._sentencepiece(tokens, types, named)
        return {name: content, TOKENIZER_CONFIG: _encode(config)}

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids of the tokens that end an answer, by name or by spelling."""
        named = (self._id(name) for name in (*ENDS, *_CODE_ENDS))
        ids = *(token for token in named if token is not None), *self._spelled_ends()
        return tuple(dict.fromkeys(ids))

    def _spelled_ends(self) -> list[int]:
        types = self.keys.token_type or []
        ids = {
            token: number
            for number, token in enumerate(self.keys.tokens)
            if token in _END_SPELLINGS
        }
        if all(ids.keys() & ends for ends in _AFTER_MESSAGES):
            ids.pop("<|end|>", None)
        if _HTML_TOO in ids and types[ids[_HTML_TOO] :][:1] != [TokenType.CONTROL]:
            del ids[_HTML_TOO]
        return sorted(ids.values())

    def _vocabulary(self) -> tuple[list[str], list[int]]:
        """Returns spelling and type of each token; those that end an answer are control tokens."""
        tokens = self.keys.tokens
        types = [1] * len(tokens) if self.keys.token_type is None else self.keys.token_type
        texts = bool(tokens) and all(isinstance(token, str) for token in tokens)
        if not texts or len(types) != len(tokens):
            raise self._unsupported("tokens and token_type do not fit")
        unknown = [kind for kind in types if type(kind) is not int or kind not in _TYPES]
        if unknown:
            raise self._unsupported(f"token_type has a type {unknown[0]}")
        hidden = {token for token, kind in enumerate(types) if kind == TokenType.UNKNOWN}
        hidden |= {*self.end_ids()}
        kinds = (TokenType.CONTROL if token in hidden else kind for token, kind in enumerate(types))
        return [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)], [*kinds]

    def _id(self, name: str) -> int | None:
        """Returns the id of a special token, such as "bos"; None if there is none."""
        count, token = len(self.keys.tokens), self.ids[f"{name}_token_id"]
        if token is None and self.keys.model == SENTENCEPIECE:
            default = _DEFAULT_IDS.get(name, count)
            return default if default < count else None
        if token is None or token in _NO_TOKEN:
            return None
        if token < 0 or token >= count > 0:  # A file without tokens may still name ids.
            raise self._unsupported(f"{name}_token_id is {token} of {count} tokens")
        return token

    def _pre_tokenizer(self) -> _PreTokenizer:
        name = _GEMMA4 if self.keys.model == _GEMMA4 else self.keys.pre
        if name is None:
            raise errors.CheckpointError(
                f"{self.file}: lacks {PREFIX}pre, without which texts cannot be split into words "
                "as the model expects; convert the model again with a present llama.cpp"
            )
        if name not in _PRE_TOKENIZERS:
            known = ", ".join(_PRE_TOKENIZERS)
            raise self._unusable(f"pre: {name!r} is not supported, only {known}")
        return _PRE_TOKENIZERS[name]

    def _bpe(self, tokens: list[str], types: list[int]) -> dict[str, Any]:
        pre, adds_bos = self._pre_tokenizer(), self.keys.add_bos_token
        # Some files of Gemma 4 wrongly state that none is added.
        if adds_bos is None or pre.spelled:
            adds_bos = pre.adds_bos
        added = (TokenType.CONTROL, TokenType.USER_DEFINED)
        return {
            "version": "1.0",
            "added_tokens": [
                _added(token, tokens[token], kind)
                for token, kind in enumerate(types)
                if kind in added
            ],
            "normalizer": _normalizer(pre),
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_splits(pre))},
            "post_processor": self._beginning(tokens) if adds_bos else None,
            "decoder": _SPELLED_DECODER if pre.spelled else _byte_level_part(use_regex=False),
            "model": {
                "type": "BPE",
                "vocab": {text: token for token, text in enumerate(tokens)},
                "merges": self._merges(set(tokens)),
                "ignore_merges": pre.ignore_merges,
                "byte_fallback": pre.spelled,
                "fuse_unk": False,
            },
        }

    def _merges(self, known: set[str]) -> list[list[str]]:
        merges = [
            merge.split(" ") if isinstance(merge, str) else [] for merge in self._required("merges")
        ]
        for number, parts in enumerate(merges):
            if len(parts) != 2 or not {*parts, "".join(parts)} <= known:
                raise self._unsupported(
                    f"merges: merge {number} is no pair of tokens that form a token"
                )
        return merges

    def _beginning(self, tokens: list[str]) -> dict[str, Any] | None:
        """Returns the post-processor that adds the beginning-of-sequence token."""
        token = self._id("bos")
        if token is None:
            return None
        text = tokens[token]
        spelling = {"SpecialToken": {"id": text, "type_id": 0}}
        pair = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
        return {
            "type": "TemplateProcessing",
            "single": [spelling, pair[0]],
            "pair": [spelling, *pair],
            "special_tokens": {text: {"id": text, "ids": [token], "tokens": [text]}},
        }

    def _sentencepiece(
        self, tokens: list[str], types: list[int], named: Mapping[str, str]
    ) -> bytes:
        from sentencepiece import sentencepiece_model_pb2

        scores = self._required("scores")
        if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
            raise self._unsupported("scores do not fit the tokens")
        unknown = self._id("unknown")
        if unknown is None:
            raise self._unusable("unknown_token_id names no token")
        types[unknown] = TokenType.UNKNOWN
        model = sentencepiece_model_pb2.ModelProto()
        for text, kind, score in zip(tokens, types, scores, strict=True):
            piece = text.replace(" ", _SPACE_SIGN) if kind == TokenType.USER_DEFINED else text
            model.pieces.add(piece=piece, score=score, type=kind)
        trainer, normalizer = model.trainer_spec, model.normalizer_spec
        trainer.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
        trainer.byte_fallback = TokenType.BYTE in types
        trainer.unk_piece = tokens[unknown]
        for field, name in (("bos_piece", "bos_token"), ("eos_piece", "eos_token")):
            setattr(trainer, field, named.get(name, ""))
        normalizer.name = "identity"
        normalizer.add_dummy_prefix = self.keys.add_space_prefix
        normalizer.remove_extra_whitespaces = False
        return model.SerializeToString()

    def _required(self, name: str) -> list:
        value = getattr(self.keys, name)
        if value is None:
            raise errors.CheckpointError(f"{self.file}: the metadata lacks {PREFIX}{name}")
        return value

    def _unusable(self, problem: str) -> errors.CheckpointError:
        return errors.CheckpointError(f"{self.file}: {PREFIX}{problem}")

    def _unsupported(self, problem: str) -> errors.CheckpointError:
        return self._unusable(f"{problem}, which is not supported")


def spelled(piece: str, kind: int) -> str:
    """Returns a piece of sentencepiece as a GGUF file spells it."""
    return piece.replace(_SPACE_SIGN, " ") if kind == TokenType.USER_DEFINED else piece


def pre_tokenizer_name(content: Mapping[str, Any]) -> str | None:
    """Returns the name of the pre-tokenizer of a tokenizer.json; None if it is unknown."""
    pre_tokenizer = content.get("pre_tokenizer") or {}
    parts = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    essences = [_essence(part) for part in parts]
    ignores = bool(content["model"].get("ignore_merges", False))
    for name, pre in _PRE_TOKENIZERS.items():
        expected = [_essence(part) for part in _splits(pre)]
        if essences == expected and ignores == pre.ignore_merges:
            return name
    return None


def _essence(part: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what decides how a part of a pre-tokenizer splits texts."""
    names = "individual_digits", "pattern", "behavior", "invert", "add_prefix_space", "use_regex"
    return part.get("type"), *(str(part.get(name)) for name in names)


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _splits(pre: _PreTokenizer) -> Iterator[dict[str, Any]]:
    if pre.single_digits:
        yield {"type": "Digits", "individual_digits": True}
    for pattern in pre.patterns:
        regex = {"Regex": pattern}
        yield {"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": False}
    if not pre.spelled:
        yield _byte_level_part(use_regex=not pre.patterns)


def _normalizer(pre: _PreTokenizer) -> dict[str, Any] | None:
    if pre.spelled:
        return _replacement(" ", _SPACE_SIGN)
    return {"type": "NFC"} if pre.nfc else None


def _replacement(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


_SPELLED_DECODER = {
    "type": "Sequence",
    "decoders": [_replacement(_SPACE_SIGN, " "), {"type": "ByteFallback"}, {"type": "Fuse"}],
}


def _byte_level_part(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _added(token: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": kind == TokenType.CONTROL}
