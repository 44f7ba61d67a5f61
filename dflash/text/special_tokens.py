"""Special tokens in rendered chats, which only the template may add.

A message may contain the spelling of a special token, such as "<|im_end|>", which must be encoded
as plain text. Before the template renders it, `mark` inserts a mark before each character of such a
spelling, so that the rendered text only contains the special tokens of the template. `split` finds
these and removes the marks. Other messages are rendered and encoded unchanged.

`declared` and `complete` find tokens that are named outside tokenizer.json, as transformers does.
"""

import pathlib
import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.text import chat_template

if TYPE_CHECKING:
    import tokenizers

ADDED_TOKENS = "added_tokens.json"
MARK = "\ufdd0"  # Unicode noncharacter, reserved for internal use
_MARKED = re.compile(f"{MARK}(.)", re.DOTALL)
_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")
_MAX_IDS = 2**24  # Vocabularies have some 100,000 tokens.


class SpecialTokens:
    """Spellings of the special tokens of a tokenizer, and their ids."""

    def __init__(
        self, ids: Mapping[str, int], *, strips: Mapping[str, tuple[bool, bool]] | None = None
    ):
        """Compiles the patterns; `strips` tells which tokens absorb spaces before and after."""
        self._ids = {spelling: token for spelling, token in ids.items() if spelling}
        spellings = sorted(self._ids, key=len, reverse=True)  # the longest match wins
        self._longest = max(map(len, spellings), default=0)
        self._beginnings = {text[:size] for text in spellings for size in range(1, len(text))}
        plain = "|".join(map(re.escape, spellings)) or "(?!)"
        self._spelled = re.compile(f"{plain}|{MARK}")
        parts = (_pattern(text, *(strips or {}).get(text, (False, False))) for text in spellings)
        # A mark consumes the character after it, so that no special token is found there.
        self._found = re.compile(f"{MARK}.|({'|'.join(parts) or '(?!)'})", re.DOTALL)

    @property
    def spellings(self) -> Mapping[int, str]:
        """Spellings by token id."""
        return {token: spelling for spelling, token in self._ids.items()}

    def spelled_in(self, text: str) -> bool:
        """Returns whether a text contains the spelling of a special token, or a mark."""
        return self._spelled.search(text) is not None

    def mark(self, value: Any) -> Any:
        """Marks the spellings of special tokens in a text, or in every text of a JSON value.

        The beginning of a spelling at the end of a text is also marked, because the next text may
        complete it.
        """
        if isinstance(value, str):
            marked = self._spelled.sub(lambda match: _mark_all(match.group()), value)
            end = self._opened_at(marked)
            return marked[:end] + _mark_all(marked[end:])
        if isinstance(value, Mapping):
            return {self._mark_key(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def _mark_key(self, key: Any) -> Any:
        """Marks the spellings in a name that a message gives, such as that of an argument."""
        return self.mark(key) if isinstance(key, str) and not key.isidentifier() else key

    def _opened_at(self, marked: str) -> int:
        """Returns where an incomplete spelling at the end of a text starts; its length if none."""
        unmarked = max((match.end() for match in _MARKED.finditer(marked)), default=0)
        first = max(unmarked, len(marked) - self._longest)
        places = (at for at in range(first, len(marked)) if marked[at:] in self._beginnings)
        return next(places, len(marked))

    def spans(self, text: str) -> Iterator[tuple[int, str, int, int]]:
        """Yields (token id, spelling, start, end) of each special token in a rendered text.

        The span includes the spaces that the token absorbs.
        """
        for match in self._found.finditer(text):
            if match[1] is not None:
                spelling = match[1] if match[1] in self._ids else match[1].strip()
                yield self._ids[spelling], spelling, match.start(), match.end()

    def split(self, text: str) -> Iterator[tuple[int | None, str]]:
        """Splits a rendered text into special tokens (id, spelling) and plain text (None, text)."""
        done = 0
        for token, spelling, start, end in self.spans(text):
            if start > done:
                yield None, without_marks(text[done:start])
            yield token, spelling
            done = end
        if done < len(text):
            yield None, without_marks(text[done:])


def without_marks(text: str) -> str:
    """Removes the marks from a text."""
    return _MARKED.sub(r"\1", text)


def _mark_all(text: str) -> str:
    return "".join(MARK + character for character in text)


def _pattern(spelling: str, strips_left: bool, strips_right: bool) -> str:
    # The lookbehind avoids quadratic time, since long runs of spaces match from their start only.
    before = r"(?:(?<!\s)\s+)?" if strips_left else ""
    return before + re.escape(spelling) + (r"\s*" if strips_right else "")


def complete(tokenizer: "tokenizers.Tokenizer", directory: pathlib.Path) -> None:
    """Adds the tokens that `declared` yields, or gives them the options that come with an id.

    Without them, their spellings would be split into ordinary tokens. A token that the vocabulary
    contains keeps its id; any other one gets the next free id.
    """
    import tokenizers

    known = {token.content: repr(token) for token in tokenizer.get_added_tokens_decoder().values()}
    for number, options in declared(directory):
        flags = {name: bool(options[name]) for name in _OPTIONS if name in options}
        token = tokenizers.AddedToken(options["content"], special=options["special"], **flags)
        is_known = token.content in known
        if not is_known or (number is not None and repr(token) != known[token.content]):
            known[token.content] = repr(token)
            add = tokenizer.add_special_tokens if token.special else tokenizer.add_tokens
            add([token])


def declared(directory: pathlib.Path) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """Yields id and options, such as "content", of each token that files beside a vocabulary name.

    Tokens with ids come first, in the order of their ids; those with a role only have None.
    """
    named = list(_named(directory))
    yield from _with_ids(directory, {options["content"] for options in named})
    yield from ((None, {**options, "special": True}) for options in named)


def _with_ids(
    directory: pathlib.Path, named: Collection[str]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the tokens of added_tokens_decoder or, in older checkpoints, of added_tokens.json."""
    where = f"{directory / chat_template.TOKENIZER_CONFIG}: added_tokens_decoder"
    by_id = chat_template.named_tokens(directory).get("added_tokens_decoder")
    if by_id is None:
        where = str(directory / ADDED_TOKENS)
        ids = chat_template.read_json(directory / ADDED_TOKENS)
        by_id = {
            number: {"content": spelling, "special": spelling in named}
            for spelling, number in ids.items()
        }
    if not isinstance(by_id, Mapping) or not all(map(_is_id, by_id)):
        raise errors.InputError(f"{where}: expected a mapping with token ids")
    for number in sorted(by_id, key=int):
        options = _options(by_id[number], f"{where}: {number}")
        yield int(number), {**options, "special": bool(options.get("special"))}


def _is_id(number: Any) -> bool:
    return str(number).isdecimal() and int(number) < _MAX_IDS


def _named(directory: pathlib.Path) -> Iterator[Mapping[str, Any]]:
    """Yields the tokens with a role, such as eos_token."""
    fields = chat_template.named_tokens(directory)
    for name in _NAMES:
        tokens = fields.get(name) or ()
        if isinstance(tokens, Mapping) and "content" not in tokens:
            tokens = list(tokens.values())
        for token in tokens if isinstance(tokens, list | tuple) else (tokens,):
            yield _options(token, f"{directory / chat_template.TOKENIZER_CONFIG}: {name}")


def _options(token: Any, where: str) -> Mapping[str, Any]:
    options = token if isinstance(token, Mapping) else {"content": token}
    if not isinstance(options.get("content"), str):
        raise errors.InputError(f'{where}: expected a string, or a mapping with "content"')
    return options
