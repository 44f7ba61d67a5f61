"""The bytes that each token of a tokenizer writes, exactly as its `decode` writes them."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

_SPACE_SIGN = "\u2581"  # what sentencepiece, and tokenizers after its example, write for a space


@dataclasses.dataclass(frozen=True)
class TokenBytes:
    """What tokens write.

    Attributes:
      tokens: bytes of each token; None for those that write no text: special and unknown ones.
      drops_space: whether spaces of an output's first token are not always written.
    """

    tokens: tuple[bytes | None, ...]
    drops_space: bool = False


def of_sentencepiece(model: Any) -> TokenBytes:
    """Of a SentencePieceProcessor."""
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
    """Of a tokenizer.json, parsed; None if its decoder is of a kind that is not known here.

    Args:
      content: of the file.
      size: tokens, the added ones included.
    """
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
    else:  # of a unigram model: (piece, score) pairs
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
    """The characters that byte-level tokenizers write for bytes (as GPT-2 did)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): byte for byte in printable}
    return signs | {chr(256 + place): byte for place, byte in enumerate(others)}


def _from_byte_level(spelling: str) -> bytes:
    signs = _byte_of_sign()
    if all(sign in signs for sign in spelling):
        return bytes(signs[sign] for sign in spelling)
    return spelling.encode()


def _from_spelled(steps: Sequence[Mapping[str, Any]], spelling: str) -> bytes:
    """Of a token that is spelled in characters, with <0xE2> for single bytes."""
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
    if step["type"] == "Strip":  # of one space at the beginning, which `drops_space` stands for
        return step["content"] == " " and step["stop"] == 0
    return True


def _drops_space(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Strip":
        return step["start"] > 0
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
