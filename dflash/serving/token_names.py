"""Texts of single tokens, for log-probabilities and /tokenize."""

from dflash import errors
from dflash.text.tokenizer import Tokenizer


class TokenNames:
    """Cache of the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
        """Creates an empty cache for the target's tokenizer."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: tuple[bytes | None, ...] | None = None
        # Decode each token after another one, because the first token of a text may lose its space.
        try:
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        except errors.InputError:  # The target has no tokenizer.
            self._before = []
        self._start = len(tokenizer.decode(self._before))

    def of(self, token: int) -> str:
        """Returns the text of a token within an output."""
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token], special_tokens=True)
            self._texts[token] = text[self._start :]
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, or of its text if the tokenizer does not provide them."""
        if self._bytes is None:
            try:
                self._bytes = self._tokenizer.token_bytes().tokens
            except errors.InputError:
                self._bytes = ()
        encoded = self._bytes[token] if token < len(self._bytes) else None
        return self.of(token).encode() if encoded is None else encoded
