"""Text files in UTF-8, or what they are instead."""

import codecs

from dflash import errors

# UTF-32's little-endian mark begins with UTF-16's.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LOOKED_AT = 64  # bytes


def decode(content: bytes) -> str:
    """The text of a file; a mark at its beginning, which some editors write, is dropped.

    Raises:
      InputError: It is not UTF-8; the message says what it is, or where it goes wrong.
    """
    check(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}"
        raise errors.InputError(message) from error


def check(beginning: bytes) -> None:
    """Refuses, by its beginning, a file in another encoding.

    Raises:
      InputError: It is UTF-16 or UTF-32, with its mark or without.
    """
    found = next((name for mark, name in _MARKS.items() if beginning.startswith(mark)), None)
    # English without a mark: every other byte is zero.
    looked_at = beginning[:_LOOKED_AT]
    if found is None and looked_at.count(0) > len(looked_at) // 3 > 0:
        found = "UTF-16 or binary"
    if found is not None:
        raise errors.InputError(f"{found}, expected UTF-8: save the file in that encoding")
