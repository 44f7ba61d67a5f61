"""Grammars that constrain an output: any JSON object, a JSON schema, a regular expression, or Lark.

    vocabulary = Vocabulary.of(tokenizer)             # once per tokenizer
    grammar = of_source("json_schema", {"type": "integer"}, vocabulary)
    matcher = grammar.matcher()                       # once per output
    matcher.fill(masks, tokens, parents, ends=ends)   # computes the allowed next tokens
    matcher.advance(tokens)                           # appends tokens to the output

llguidance (the extra `grammar`) does the matching. The allowed tokens depend only on
the grammar and the output so far, so all processes of a run compute the same masks. Its limits
bound the time of one mask, and a budget of processor time bounds the masks of one grammar, because
an ambiguous grammar may need as long for each of them as the model for a whole cycle.
"""

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dflash.text import grammar_compiler
from dflash.text.grammar_compiler import Kind
from dflash.text.token_bytes import TokenBytes
from dflash.text.tokenizer import Tokenizer

# Processor time for the masks of a grammar. Masks of real schemas take 0.1 ms, a few take 20 ms.
MASK_SECONDS = 0.5  # saved up at most
ROW_SECONDS = 0.0005  # added for each row


class Vocabulary:
    """Tokens of a tokenizer, indexed for grammars; all grammars of the tokenizer share it."""

    def __init__(self, tokens: TokenBytes):
        """Stores the tokens; the first grammar indexes them, in less than a second."""
        self.tokens = tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Vocabulary":
        """Returns the vocabulary of a tokenizer."""
        return cls(tokenizer.token_bytes())

    @property
    def end(self) -> int:
        """Extra token id that marks the end of the output, one past the largest id."""
        return len(self.tokens.tokens)

    @functools.cached_property
    def index(self) -> Any:
        """Tokenizer object of llguidance."""
        library = grammar_compiler.import_llguidance()
        return library.LLTokenizer(library.TokenizerWrapper(_TokenizerAdapter(self)))

    @functools.cached_property
    def not_first(self) -> np.ndarray:
        """Bit mask of the tokens that may not begin an output, int32 [words]."""
        dropped = [
            self.tokens.drops_space and b" " in (token or b"") for token in self.tokens.tokens
        ]
        return _pack(np.array([*dropped, False]))


class _TokenizerAdapter:
    """Tokenizer interface that llguidance requires.

    Tokens without text match no text; a Lark grammar may name them by id, as in `<[7]>`. llguidance
    splits literal text of a grammar into tokens, which must work with any vocabulary. Therefore 256
    single-byte tokens follow the end token; no mask contains them.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary):
        texts = [*vocabulary.tokens.tokens, None, *(bytes([byte]) for byte in range(256))]
        # Special tokens need names that differ, by which the library tells them apart.
        self.tokens = [text or b"<%d>" % i for i, text in enumerate(texts)]
        self.special_token_ids = [i for i, text in enumerate(texts) if not text]
        self.eos_token_id = vocabulary.end
        self._id_of = {text: i for i, text in reversed(list(enumerate(texts))) if text}
        self._longest = max(map(len, self._id_of))

    def __call__(self, text: bytes | str) -> list[int]:
        """Splits a text into tokens by greedy longest match."""
        remaining, token_ids = text.encode() if isinstance(text, str) else text, []
        while remaining:
            sizes = range(min(self._longest, len(remaining)), 0, -1)
            size = next(size for size in sizes if remaining[:size] in self._id_of)
            token_ids.append(self._id_of[remaining[:size]])
            remaining = remaining[size:]
        return token_ids


@dataclasses.dataclass(frozen=True)
class Grammar:
    """Constraint on an output; built and checked by the functions of this module.

    Attributes:
      source: JSON schema, regular expression or Lark grammar; "" for any JSON object.
    """

    kind: Kind
    source: str
    vocabulary: Vocabulary = dataclasses.field(repr=False)

    def matcher(self, *, timed: bool = True) -> "Matcher":
        """Returns a matcher at the beginning of an output; the first call compiles the grammar.

        Args:
          timed: Whether outputs fail when their masks exceed the grammar's `budget`. False where
            several processes must compute equal masks, since time differs between them.
        """
        return Matcher(self, timed)

    @functools.cached_property
    def budget(self) -> "Budget":
        """Processor time left for the masks of all outputs of this grammar."""
        return Budget()

    def begin(self, *, recompile: bool = False) -> Any:
        """Returns a matcher of llguidance at the beginning of an output.

        Args:
          recompile: Whether to compile the grammar again. Copies of a compiled matcher share its
            lexer states, and therefore also the limit on their number.
        """
        if recompile:
            self.__dict__.pop("_compiled", None)
        return self._compiled.deep_copy()

    @functools.cached_property
    def _compiled(self) -> Any:
        library = grammar_compiler.import_llguidance()
        compiled = library.LLMatcher(
            self.vocabulary.index,
            grammar_compiler.serialize(self.kind, self.source),
            log_level=0,
            limits=library.LLParserLimits(**grammar_compiler.limits(self.kind)),
        )
        if compiled.is_error():
            raise grammar_compiler.unusable(self.kind, compiled.get_error())
        return compiled


class Budget:
    """Processor time that masks may still take; every row adds a little, up to a maximum.

    Attributes:
      seconds: Time left; below 0 once the budget is exceeded.
    """

    def __init__(self):
        self.seconds = MASK_SECONDS

    def charge(self, since: float) -> float:
        """Subtracts the thread's processor time since `since`, and returns the present time."""
        now = time.thread_time()
        self.seconds = min(MASK_SECONDS, self.seconds + ROW_SECONDS - (now - since))
        return now


def of_source(kind: Kind, source: Mapping[str, Any] | str, vocabulary: Vocabulary) -> Grammar:
    """Returns the grammar of a source; see `compiled` for the errors.

    Args:
      kind: A regular expression has Rust's syntax without look-around, and must match the whole
        output; Lark is llguidance's dialect.
      source: Text; a JSON schema may also be a value, and "" is any JSON object.
    """
    if not isinstance(source, str):
        try:
            source = json.dumps(source, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise grammar_compiler.unusable(kind, str(error)) from error
    return compiled(Grammar(kind, source, vocabulary))


def compiled(grammar: Grammar, is_abandoned: Callable[[], bool] = lambda: False) -> Grammar:
    """Returns the grammar after checking and compiling it, which may block for seconds.

    Args:
      is_abandoned: Returns True once nobody waits for the result, which ends the check.
    Raises:
      InputError: The grammar is invalid or uses unsupported features, takes too much time or memory
        to compile, or matches nothing that the tokenizer can write; or llguidance is not installed.
      UserError: The check was abandoned, or ended for a reason that does not lie in the grammar.
    """
    # Lark grammars name tokens; others need no more than bytes.
    num_tokens = grammar.vocabulary.end if grammar.kind == "lark" else 0
    grammar_compiler.check(grammar.kind, grammar.source, num_tokens, is_abandoned)
    masks = np.zeros((1, len(grammar.vocabulary.not_first)), np.int32)
    matcher = grammar.matcher()
    matcher.fill(masks, ends=(grammar.vocabulary.end,))
    if not matcher.may_end and _allows(masks[0], grammar.vocabulary.end):
        problem = matcher.problem or "no token of the target can begin what it matches"
        raise grammar_compiler.unusable(grammar.kind, problem)
    return grammar


class Matcher:
    """Position of an output within its grammar."""

    def __init__(self, grammar: Grammar, timed: bool = True):
        self._grammar, self._vocabulary, self._timed = grammar, grammar.vocabulary, timed
        self._state = grammar.begin()
        self._output_ids: list[int] = []
        self._is_over_budget = False
        self._charged_until = 0.0  # processor time of the thread

    @property
    def may_end(self) -> bool:
        """True if the output so far is a complete match of the grammar."""
        return not self._has_failed and self._state.is_accepting()

    @property
    def problem(self) -> str:
        """Description of the limit that the output exceeds, or ""."""
        if self._is_over_budget:
            return "its masks take too much time; make it less ambiguous"
        return self._state.get_error()

    @property
    def _has_failed(self) -> bool:
        return self._is_over_budget or self._state.is_error()

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the output; the masks must allow them, and none may be an end token."""
        self._charged_until = time.thread_time()
        self._output_ids += tokens
        self._state.consume_tokens(list(tokens))
        self._charge()

    def fill(
        self,
        masks: np.ndarray,
        tokens: Sequence[int] = (),
        parents: Sequence[int] | None = None,
        *,
        ends: Sequence[int],
        first_end: int = 0,
    ) -> None:
        """Computes the tokens that may follow the output so far and each draft of a proposal.

        If no token may follow, because none fits or the grammar exceeds its limits or its budget,
        the mask allows only the end tokens; then `may_end` is False, since the output is
        incomplete. Rows of drafts that the grammar rejects, and of their descendants, stay
        unchanged.

        Args:
          masks: Masks to fill, int32 [R, ceil(V / 32)]; bit v % 32 of word v // 32 is for token v.
            Row 0 follows the output so far, and row g + 1 follows draft g.
          tokens: The G = R - 1 draft tokens.
          parents: Row that each draft continues; None for a chain.
          ends: Tokens that end the output; they are allowed only where the output may end.
          first_end: Minimum length of the output in tokens; a shorter output ends only if no other
            token is possible.
        """
        children: dict[int, list[int]] = {}
        for draft, token in enumerate(tokens):
            if token not in ends:
                parent = draft if parents is None else parents[draft]
                children.setdefault(parent, []).append(draft)
        self._charged_until = time.thread_time()
        self._fill_row(masks[0], len(self._output_ids), ends, first_end)
        if self._state.is_error():  # other outputs may have used up the shared limits
            self._restart()
            self._fill_row(masks[0], len(self._output_ids), ends, first_end)
        is_valid = not self._has_failed
        path = [(0, iter(children.get(0, ())))]
        while path and not self._has_failed:
            row, siblings = path[-1]
            draft = next(siblings, None)
            if draft is None:
                path.pop()
                if path:
                    self._state.rollback(1)
            elif _allows(masks[row], tokens[draft]):
                self._state.consume_token(tokens[draft])
                self._fill_row(masks[draft + 1], len(self._output_ids) + len(path), ends, first_end)
                path.append((draft + 1, iter(children.get(draft + 1, ()))))
        if is_valid and self._is_over_budget:
            self._fill_row(masks[0], len(self._output_ids), ends, first_end)
        elif is_valid and self._state.is_error():  # at a draft, which may not become output
            self._restart()

    def _restart(self) -> None:
        self._state = self._grammar.begin(recompile=True)
        self._state.consume_tokens(self._output_ids)
        self._charge()

    def _fill_row(self, row: np.ndarray, length: int, ends: Sequence[int], first_end: int) -> None:
        """Computes the mask of the tokens that may follow an output of `length` tokens."""
        end = self._vocabulary.end
        words = np.zeros(end // 32 + 1, np.int32)
        if not self._is_over_budget:
            computed = np.frombuffer(self._state.compute_bitmask(), np.int32)
            self._charge()
        if not self._has_failed:
            words[:] = computed[: len(words)]
        if length == 0:
            words &= ~self._vocabulary.not_first
        may_end = _allows(words, end)
        words.view(np.uint32)[-1] &= np.uint32((1 << end % 32) - 1)
        forbid(words, [token for token in ends if token < end])
        shared = min(len(row), len(words))
        row[:shared], row[shared:] = words[:shared], 0
        if (may_end and length >= first_end) or not words.any():
            for token in ends:
                _set(row, token, True)

    def _charge(self) -> None:
        """Subtracts the time since the last row from the grammar's budget."""
        self._charged_until = self._grammar.budget.charge(self._charged_until)
        if self._timed and self._grammar.budget.seconds < 0:
            self._is_over_budget = True


def forbid(words: np.ndarray, tokens: Sequence[int]) -> None:
    """Clears the bits of tokens in a mask, int32 [words]."""
    for token in tokens:
        _set(words, token, False)


def _allows(words: np.ndarray, token: int) -> bool:
    return token < 32 * len(words) and bool(words.view(np.uint32)[token // 32] >> (token % 32) & 1)


def _set(words: np.ndarray, token: int, value: bool) -> None:
    bit = np.uint32(1 << (token % 32))
    unsigned = words.view(np.uint32)
    if value:
        unsigned[token // 32] |= bit
    else:
        unsigned[token // 32] &= ~bit


def _pack(bits: np.ndarray) -> np.ndarray:
    """Packs bool [n] into int32 [ceil(n / 32)]."""
    padded = np.zeros(-(-len(bits) // 32) * 32, bool)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.int32)
