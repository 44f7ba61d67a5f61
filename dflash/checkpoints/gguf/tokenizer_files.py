"""Conversion of a tokenizer in the metadata of a GGUF file to the files that `dflash.text` reads.

Byte-level BPE becomes tokenizer.json; sentencepiece BPE becomes tokenizer.model. The spellings of
special tokens and the chat template go to tokenizer_config.json.

Source of the pre-tokenizers and of the tokens that end an answer: llama.cpp, src/llama-vocab.cpp.
"""

import dataclasses
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any

from dflash import errors
from dflash.checkpoints.gguf import file_header
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.text.tokenizer import SENTENCEPIECE_MODEL, TOKENIZER_JSON

TOKENIZER_CONFIG = "tokenizer_config.json"

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"  # A named template has a dot and its name behind it.
_NO_MODEL, BYTE_LEVEL, SENTENCEPIECE = "none", "gpt2", "llama"
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
      pattern: Regular expression of words; None for that of GPT-2.
      single_digits: Each digit is split off first.
      nfc: Texts are normalized to NFC, as in the tokenizer.json that the file was made from.
      ignore_merges: Words in the vocabulary are tokens, whatever the merges.
      adds_bos: The beginning-of-sequence token is added unless the file states otherwise.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False


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


def _words_by_case() -> str:
    """Returns the pattern of GPT-4o, in which a word's capitals precede its small letters."""
    capitals, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{before}{capitals}*{small}+{_SUFFIXES}?|{before}{capitals}+{small}*{_SUFFIXES}?|"
        rf"{_UP_TO_3_DIGITS}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_QWEN = _PreTokenizer(_words(r"\p{N}"), nfc=True)
_LLAMA3 = _PreTokenizer(_words(_UP_TO_3_DIGITS), ignore_merges=True, adds_bos=True)
_PRE_TOKENIZERS = {
    "gpt-2": _PreTokenizer(),
    "smollm": _PreTokenizer(single_digits=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "qwen35": _PreTokenizer(_words(r"\p{N}", marks=r"\p{M}"), nfc=True),
    "gpt-4o": _PreTokenizer(_words_by_case()),
    "smaug-bpe": _PreTokenizer(_words(_UP_TO_3_DIGITS)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
}


def files_of(header: GgufHeader) -> dict[str, bytes]:
    """Returns the content of each file of the tokenizer, by name; none without a tokenizer."""
    model = header.get(PREFIX + "model", str, _NO_MODEL)
    if model == _NO_MODEL:
        return {}
    if model not in (BYTE_LEVEL, SENTENCEPIECE):
        raise errors.CheckpointError(
            f"{header.file}: {PREFIX}model: {model!r} is not supported, only "
            f"{BYTE_LEVEL} and {SENTENCEPIECE}"
        )
    tokens, types = _vocabulary(header)
    ids = {name: _id(header, key) for key, name in NAMED.items()}
    named = {name: tokens[token] for name, token in ids.items() if token is not None}
    config: dict[str, Any] = {**named, "chat_template": list(_templates(header))}
    if model == BYTE_LEVEL:
        name, content = TOKENIZER_JSON, _encode(_byte_level(header, tokens, types))
    else:
        config["add_bos_token"] = header.get(PREFIX + "add_bos_token", bool, True)
        name, content = SENTENCEPIECE_MODEL, _sentencepiece(header, tokens, types, named)
    return {name: content, TOKENIZER_CONFIG: _encode(config)}


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


def end_ids(header: GgufHeader) -> tuple[int, ...]:
    """Returns the ids of the tokens that end an answer, by name or by spelling."""
    named = (_id(header, name) for name in (*ENDS, *_CODE_ENDS))
    ids = *(token for token in named if token is not None), *_spelled_ends(header)
    return tuple(dict.fromkeys(ids))


def _spelled_ends(header: GgufHeader) -> list[int]:
    tokens, types = (header.get(PREFIX + name, list, []) for name in ("tokens", "token_type"))
    ids = {token: number for number, token in enumerate(tokens) if token in _END_SPELLINGS}
    if all(ids.keys() & ends for ends in _AFTER_MESSAGES):
        ids.pop("<|end|>", None)
    if _HTML_TOO in ids and types[ids[_HTML_TOO] :][:1] != [TokenType.CONTROL]:
        del ids[_HTML_TOO]
    return sorted(ids.values())


def _templates(header: GgufHeader) -> Iterator[dict[str, str]]:
    """Yields the chat templates as entries of tokenizer_config.json."""
    for key in header.metadata:
        name = key.removeprefix(TEMPLATE)
        if key == TEMPLATE or name.startswith("."):
            yield {"name": name[1:] or "default", "template": header.get(key, str)}


def _encode(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode()


def _vocabulary(header: GgufHeader) -> tuple[list[str], list[int]]:
    tokens = header.require(PREFIX + "tokens", list)
    types = header.get(PREFIX + "token_type", list, [1] * len(tokens))
    texts = bool(tokens) and all(isinstance(token, str) for token in tokens)
    if not texts or len(types) != len(tokens):
        raise file_header.unsupported(header.file, f"{PREFIX}tokens and token_type do not fit")
    unknown = next((kind for kind in types if type(kind) is not int or kind not in _TYPES), None)
    if unknown is not None:
        raise file_header.unsupported(header.file, f"{PREFIX}token_type has a type {unknown}")
    hidden = {token for token, kind in enumerate(types) if kind == TokenType.UNKNOWN}
    hidden |= {*end_ids(header)}
    kinds = (TokenType.CONTROL if token in hidden else kind for token, kind in enumerate(types))
    return [text or f"[EMPTY_{token}]" for token, text in enumerate(tokens)], [*kinds]


def _id(header: GgufHeader, name: str) -> int | None:
    """Returns the id of a special token, such as "bos"; None if there is none."""
    key = f"{PREFIX}{name}_token_id"
    count = len(header.get(PREFIX + "tokens", list, []))
    token = header.get(key, int)
    if token is None and header.get(PREFIX + "model", str) == SENTENCEPIECE:
        default = _DEFAULT_IDS.get(name, count)
        return default if default < count else None
    if token is None or token in _NO_TOKEN:
        return None
    if token < 0 or token >= count > 0:  # A file without tokens may still name ids.
        raise file_header.unsupported(header.file, f"{key} is {token} of {count} tokens")
    return token


def _byte_level(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    name = header.get(PREFIX + "pre", str)
    if name is None:
        raise errors.CheckpointError(
            f"{header.file}: lacks {PREFIX}pre, without which texts cannot be split into words as "
            "the model expects; convert the model again with a present llama.cpp"
        )
    if name not in _PRE_TOKENIZERS:
        raise errors.CheckpointError(
            f"{header.file}: {PREFIX}pre: {name!r} is not supported, only "
            f"{', '.join(_PRE_TOKENIZERS)}"
        )
    pre = _PRE_TOKENIZERS[name]
    adds_bos = header.get(PREFIX + "add_bos_token", bool, pre.adds_bos)
    added = {
        token
        for token, kind in enumerate(types)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    }
    return {
        "version": "1.0",
        "added_tokens": [_added(token, tokens[token], types[token]) for token in sorted(added)],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(_splits(pre))},
        "post_processor": _beginning(header, tokens) if adds_bos else None,
        "decoder": _byte_level_part(use_regex=False),
        "model": {
            "type": "BPE",
            "vocab": {text: token for token, text in enumerate(tokens)},
            "merges": _merges(header, set(tokens)),
            "ignore_merges": pre.ignore_merges,
            "byte_fallback": False,
            "fuse_unk": False,
        },
    }


def _merges(header: GgufHeader, known: set[str]) -> list[list[str]]:
    merges = [
        merge.split(" ") if isinstance(merge, str) else []
        for merge in header.require(PREFIX + "merges", list)
    ]
    for number, parts in enumerate(merges):
        if len(parts) != 2 or not {*parts, "".join(parts)} <= known:
            problem = f"{PREFIX}merges: merge {number} is no pair of tokens that form a token"
            raise file_header.unsupported(header.file, problem)
    return merges


def _splits(pre: _PreTokenizer) -> Iterator[dict[str, Any]]:
    if pre.single_digits:
        yield {"type": "Digits", "individual_digits": True}
    if pre.pattern is not None:
        pattern = {"Regex": pre.pattern}
        yield {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    yield _byte_level_part(use_regex=pre.pattern is None)


def _byte_level_part(*, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _beginning(header: GgufHeader, tokens: list[str]) -> dict[str, Any] | None:
    """Returns the post-processor that adds the beginning-of-sequence token."""
    token = _id(header, "bos")
    if token is None:
        return None
    spelling = {"id": tokens[token], "type_id": 0}
    pair = [{"Sequence": {"id": name, "type_id": 0}} for name in ("A", "B")]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": spelling}, pair[0]],
        "pair": [{"SpecialToken": spelling}, *pair],
        "special_tokens": {
            tokens[token]: {"id": tokens[token], "ids": [token], "tokens": [tokens[token]]}
        },
    }


def _added(token: int, text: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token, "content": text, **flags, "special": kind == TokenType.CONTROL}


def _sentencepiece(
    header: GgufHeader, tokens: list[str], types: list[int], named: Mapping[str, str]
) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    scores = header.require(PREFIX + "scores", list)
    if len(scores) != len(tokens) or not all(isinstance(score, float) for score in scores):
        raise file_header.unsupported(header.file, f"{PREFIX}scores do not fit the tokens")
    unknown = _id(header, "unknown")
    if unknown is None:
        raise errors.CheckpointError(f"{header.file}: {PREFIX}unknown_token_id names no token")
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
    normalizer.add_dummy_prefix = header.get(PREFIX + "add_space_prefix", bool, True)
    normalizer.remove_extra_whitespaces = False
    return model.SerializeToString()
