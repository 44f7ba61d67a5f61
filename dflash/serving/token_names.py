"""Texts of single tokens, as log-probabilities and /detokenize show them."""

from dflash import errors
from dflash.text.tokenizer import Tokenizer


class TokenNames:
    """Texts of tokens, looked up once each."""

    def __init__(self, tokenizer: Tokenizer):
        """Takes the target's tokenizer."""
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}
        self._bytes: tuple[bytes | None, ...] | None = None
        # After another token: the first one of a text may lose its space.
        try:
            self._before = tokenizer.encode("a", add_special_tokens=False)[-1:]
        except errors.InputError:  # there is no tokenizer
            self._before = []
        self._start = len(tokenizer.decode(self._before))

    def of(self, token: int) -> str:
        """The text of a token within an output."""
        if token not in self._texts:
            text = self._tokenizer.decode([*self._before, token], special_tokens=True)
            self._texts[token] = text[self._start :]
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token writes; those of its text where the tokenizer does not tell."""
        if self._bytes is None:
            try:
                self._bytes = self._tokenizer.token_bytes().tokens
            except errors.InputError:
                self._bytes = ()
        found = self._bytes[token] if token < len(self._bytes) else None
        return self.of(token).encode() if found is None else found
