"""Facts about the served model that requests depend on."""

import dataclasses
from collections.abc import Callable, Mapping

from dflash import errors
from dflash.config.schema import DecodeConfig
from dflash.text.chat_formats.table import PLAIN, ChatFormat
from dflash.text.grammar import Vocabulary
from dflash.text.tokenizer import Tokenizer


class TokenNames:
    """Cache of the texts of single tokens."""

    def __init__(self, tokenizer: Tokenizer):
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


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Facts about the served model that requests depend on.

    Attributes:
      name: Name in /v1/models and in a request's "model".
      vocabulary: Function that returns the vocabulary for grammars; may raise InputError.
      decode: Defaults for fields that are absent from a request.
      max_length: Maximum number of tokens of a prompt and its output together.
      drafts: Most tokens that the strategy drafts in a cycle; 0 if it drafts none.
      compares: Whether requests can also be decoded without drafting.
      shares_prefixes: Whether requests without a cache salt share cached pages.
      chat_format: How the target writes reasoning and tool calls.
      adapters: Directories of the target's adapters by their names, in the order of their numbers.
    """

    name: str
    root: str
    drafter: str
    tokenizer: Tokenizer
    names: TokenNames
    vocabulary: Callable[[], Vocabulary]
    decode: DecodeConfig
    eos_ids: tuple[int, ...]
    vocab_size: int
    max_length: int
    drafts: int
    special_tokens: bool = False
    compares: bool = False
    shares_prefixes: bool = True
    chat_format: ChatFormat = PLAIN
    adapters: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def single_turn(self) -> bool:
        """Returns whether the chat template leaves out earlier questions and answers."""
        if not self.tokenizer.has_chat_template:
            return False
        roles = ("user", "assistant", "user")
        turns = [{"role": role, "content": f"turn {n}"} for n, role in enumerate(roles)]
        return "turn 0" not in self.tokenizer.render_chat(turns)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that requests give as their model, by the number of the adapter; 0 is none."""
        return (self.name, *self.adapters)
