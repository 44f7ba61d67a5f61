"""Decoding of UTF-8 text files, with clear errors for other encodings."""

import codecs

from dflash import errors

# UTF-32 comes first, since its little-endian byte order mark begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_LOOKED_AT = 64  # Number of bytes that `check` reads.


def decode(content: bytes) -> str:
    """Returns the text of a file, without the byte order mark that some editors write.

    Raises:
      InputError: The content is not UTF-8; the message names the encoding, or the invalid byte.
    """
    check(content)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{content[error.start]:02x} at offset {error.start}"
        raise errors.InputError(message) from error


def check(beginning: bytes) -> None:
    """Raises InputError if the beginning of a file shows UTF-16 or UTF-32."""
    encoding = next((name for mark, name in _MARKS.items() if beginning.startswith(mark)), None)
    # English text in UTF-16 without a byte order mark: every other byte is zero.
    looked_at = beginning[:_LOOKED_AT]
    if encoding is None and looked_at.count(0) > len(looked_at) // 3 > 0:
        encoding = "UTF-16 or binary"
    if encoding is not None:
        raise errors.InputError(f"{encoding}, expected UTF-8: save the file in that encoding")
