"""Facts about the served model that requests depend on."""

import dataclasses
from collections.abc import Callable, Mapping

from dflash.config.schema import DecodeConfig
from dflash.serving.token_names import TokenNames
from dflash.text.chat_formats.table import PLAIN, ChatFormat
from dflash.text.grammar import Vocabulary
from dflash.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """Facts about the served model that requests depend on.

    Attributes:
      name: Name in /v1/models and in a request's "model".
      root: Checkpoint of the target.
      drafter: Name of the drafting strategy.
      tokenizer: Tokenizer of the target.
      names: Texts of single tokens.
      vocabulary: Function that returns the vocabulary for grammars; may raise InputError.
      decode: Defaults for fields that are absent from a request.
      eos_ids: Stop tokens of the checkpoint.
      vocab_size: Vocabulary size of the target.
      max_length: Maximum number of tokens of a prompt and its output together.
      drafts: Most tokens that the strategy drafts in a cycle; 0 if it drafts none.
      special_tokens: Whether text prompts may contain special tokens.
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
    def served_names(self) -> tuple[str, ...]:
        """Names that requests give as their model, by the number of the adapter; 0 is none."""
        return (self.name, *self.adapters)
