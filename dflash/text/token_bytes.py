"""Bytes that each token of a tokenizer decodes to."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

_SPACE_SIGN = "\u2581"  # symbol for a space in sentencepiece and similar tokenizers


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """Bytes of all tokens of a tokenizer.

    Attributes:
      tokens: Bytes of each token; None for tokens without text, such as special and unknown ones.
      drops_space: Whether decoding may drop the spaces of the first token of an output.
    """

    tokens: tuple[bytes | None, ...]
    drops_space: bool = False


def of_sentencepiece(model: Any) -> TokenBytes:
    """Returns the bytes of the tokens of a SentencePieceProcessor."""
    from sentencepiece import sentencepiece_model_pb2

    content = sentencepiece_model_pb2.ModelProto.FromString(model.serialized_model_proto())
    rules = content.normalizer_spec
    return TokenBytes(
        tuple(_piece_bytes(model, token) for token in range(model.vocab_size())),
        drops_space=rules.add_dummy_prefix or rules.remove_extra_whitespaces,
    )


def _piece_bytes(model: Any, token: int) -> bytes | None:
    if model.is_control(token) or model.is_unknown(token) or model.is_unused(token):
        return None
    piece = model.id_to_piece(token)
    if model.is_byte(token):
        return bytes([int(piece[3:-1], 16)])  # <0xE2>
    return piece.replace(_SPACE_SIGN, " ").encode()


def of_tokenizer_json(content: Mapping[str, Any], size: int) -> TokenBytes | None:
    """Returns bytes of all `size` tokens of a tokenizer.json; None for an unsupported decoder."""
    decoder = content.get("decoder") or {}
    steps = decoder.get("decoders", [decoder])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        write, drops_space = _from_byte_level, False
    elif set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        if not all(map(_is_supported, steps)):
            return None
        write = functools.partial(_from_spelled, steps)
        drops_space = any(map(_drops_space, steps))
    else:
        return None
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, Mapping):
        named = dict(vocabulary)
    else:  # (piece, score) pairs of a unigram model
        named = {piece: number for number, (piece, _) in enumerate(vocabulary)}
    tokens: list[bytes | None] = [None] * size
    for spelling, number in named.items():
        tokens[number] = write(spelling)
    for added in content.get("added_tokens", ()):
        tokens[added["id"]] = None if added["special"] else write(added["content"])
    unknown = content["model"].get("unk_token")
    if unknown in named:
        tokens[named[unknown]] = None
    return TokenBytes(tuple(tokens), drops_space)


@functools.cache
def _byte_of_sign() -> dict[str, int]:
    """Returns the byte of each character in the spellings of byte-level tokenizers (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): byte for byte in printable}
    return signs | {chr(256 + place): byte for place, byte in enumerate(unprintable)}


def _from_byte_level(spelling: str) -> bytes:
    signs = _byte_of_sign()
    if all(sign in signs for sign in spelling):
        return bytes(signs[sign] for sign in spelling)
    return spelling.encode()


def _from_spelled(steps: Sequence[Mapping[str, Any]], spelling: str) -> bytes:
    """Returns the bytes of a spelling in characters, with <0xE2> for a single byte."""
    is_byte = len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">")
    if is_byte and any(step["type"] == "ByteFallback" for step in steps):
        return bytes([int(spelling[3:-1], 16)])
    for step in steps:
        if step["type"] == "Replace":
            spelling = spelling.replace(step["pattern"]["String"], step["content"])
        elif step["type"] == "Metaspace":
            spelling = spelling.replace(step["replacement"], " ")
    return spelling.encode()


def _is_supported(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return "String" in step["pattern"]
    if step["type"] == "Strip":  # only of one leading space, which sets `drops_space`
        return step["content"] == " " and step["stop"] == 0
    return True


def _drops_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step["start"] > 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
