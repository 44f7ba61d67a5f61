"""Conversion of a checkpoint's tokenizer to the metadata of a GGUF file; see `tokenizer_files`."""

import datetime
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.checkpoints import checkpoint, files
from dflash.checkpoints.gguf import file_header, hf_tensors, tokenizer_files
from dflash.checkpoints.gguf.tokenizer_files import PREFIX, TokenType
from dflash.text import chat_template
from dflash.text.chat_template import ChatTemplate
from dflash.text.tokenizer import SENTENCEPIECE_MODEL, TOKENIZER_JSON
from dflash.text.tokenizer_files import read_sentencepiece

_UNUSED_SCORE = -1e4


def values_of(directory: pathlib.Path, vocab_size: int) -> dict[str, Any]:
    """Returns the metadata of a tokenizer, by key; ids from its size to `vocab_size` are unused."""
    if (directory / hf_tensors.WEIGHTS).exists():
        values = _copied(directory)
    elif (directory / TOKENIZER_JSON).exists():
        values = _byte_level(directory)
    elif (directory / SENTENCEPIECE_MODEL).exists():
        values = _sentencepiece(directory)
    else:
        values = {}
    if not values:
        raise errors.CheckpointError(
            f"{directory}: has no {TOKENIZER_JSON} or {SENTENCEPIECE_MODEL}, which llama.cpp "
            "needs, also of a drafter; give the target's checkpoint with --tokenizer"
        )
    return _padded(values, vocab_size, directory)


def _copied(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the metadata of the GGUF file behind a directory."""
    metadata = file_header.read_header(hf_tensors.weights_file(directory)).metadata
    values = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    return values if PREFIX + "tokens" in values else {}


def _padded(values: dict[str, Any], vocab_size: int, directory: pathlib.Path) -> dict[str, Any]:
    tokens = values[PREFIX + "tokens"]
    if len(tokens) > vocab_size:
        raise errors.CheckpointError(
            f"{directory}: its tokenizer has {len(tokens)} tokens, but the model only {vocab_size}"
        )
    missing = range(len(tokens), vocab_size)
    padding: dict[str, list[Any]] = {
        "tokens": [f"[PAD{token}]" for token in missing],
        "token_type": [int(TokenType.UNUSED)] * len(missing),
        "scores": [_UNUSED_SCORE] * len(missing),
    }
    extended = {
        PREFIX + name: [*values[PREFIX + name], *added]
        for name, added in padding.items()
        if PREFIX + name in values
    }
    return values | extended


def _byte_level(directory: pathlib.Path) -> dict[str, Any]:
    file = directory / TOKENIZER_JSON
    content = files.read_json(file)
    try:
        model, added = content["model"], content.get("added_tokens") or []
        kind = model["type"]
        ids = {token: text for text, token in model["vocab"].items()}
        ids |= {token["id"]: token["content"] for token in added}
        special = {token["id"]: token["special"] for token in added}
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        splits = tokenizer_files.pre_tokenizer_name(content)
    except (KeyError, TypeError, AttributeError) as error:
        raise errors.CheckpointError(f"{file}: not a byte-level BPE tokenizer") from error
    if kind != "BPE" or splits is None:
        raise errors.CheckpointError(
            f"{file}: only byte-level BPE with a known pre-tokenizer can be written to a GGUF "
            "file; give a GGUF file of the target with --tokenizer"
        )
    tokens, types = [], []
    for token in range(max(ids) + 1):
        tokens.append(ids.get(token, f"[PAD{token}]"))
        types.append(_type_of(token, ids, special))
    bos = chat_template.special_tokens(directory).get("bos_token")
    values = {
        "model": tokenizer_files.BYTE_LEVEL,
        "pre": splits,
        "tokens": tokens,
        "token_type": types,
        "merges": merges,
        "add_bos_token": bos is not None and repr(bos) in str(content.get("post_processor")),
    }
    return _with_names(directory, values)


def _type_of(token: int, ids: Mapping[int, str], special: Mapping[int, bool]) -> int:
    if token not in ids:
        return int(TokenType.UNUSED)
    if token not in special:
        return int(TokenType.NORMAL)
    return int(TokenType.CONTROL if special[token] else TokenType.USER_DEFINED)


def _sentencepiece(directory: pathlib.Path) -> dict[str, Any]:
    model, _ = read_sentencepiece(directory)
    if model.trainer_spec.model_type != model.trainer_spec.BPE:
        raise errors.CheckpointError(
            f"{directory / SENTENCEPIECE_MODEL}: only sentencepiece models with BPE can be written "
            "to a GGUF file"
        )
    values = {
        "model": tokenizer_files.SENTENCEPIECE,
        "tokens": [tokenizer_files.spelled(piece.piece, piece.type) for piece in model.pieces],
        "token_type": [piece.type for piece in model.pieces],
        "scores": [piece.score for piece in model.pieces],
        "add_space_prefix": model.normalizer_spec.add_dummy_prefix,
        "add_bos_token": bool(chat_template.tokenizer_config(directory).get("add_bos_token")),
    }
    return _with_names(directory, values)


def _with_names(directory: pathlib.Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the metadata under their keys, with special tokens and chat template."""
    metadata = {PREFIX + name: value for name, value in values.items()}
    tokens: Sequence[str] = values["tokens"]
    spellings = chat_template.special_tokens(directory)
    ids = {
        name: tokens.index(spellings[field])
        for name, field in tokenizer_files.NAMED.items()
        if spellings.get(field) in tokens
    }
    ids |= dict(zip(tokenizer_files.ENDS, checkpoint.eos_token_ids(directory), strict=False))
    templates = ChatTemplate(directory, {}, datetime.date.today()).sources
    for name, template in templates.items():
        named = "" if name == "default" else f".{name}"
        metadata[tokenizer_files.TEMPLATE + named] = template
    return metadata | {f"{PREFIX}{name}_token_id": token for name, token in ids.items()}
