r"""Extraction and comparison of the final answers of solutions.

Numbers are compared by value in any notation (1,000 = 1{,}000.0 = \frac{2000}{2}), and so are the
other expressions that `latex_values` supports (2x = x+x). Everything else is compared as LaTeX
without decoration, so a right answer in another form counts as wrong.

Libraries such as math-verify 0.9 support more of LaTeX, but they limit their time with signals,
which threads cannot use, and some answers still never return. Here each step takes linear time or
works on input of bounded size.
"""

import re
from collections.abc import Sequence

from dflash.data import latex_values

MAX_CHARACTERS = 1000  # longer answers are only compared as strings
MAX_ITEMS = 50  # largest list or set whose items are compared one by one

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = re.compile(r"\d[\d.,]*")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_PLAIN = re.compile(r"\d+(?:\.\d+)?")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")  # thousands separator in TeX
_MIXED = re.compile(r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])")
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_UNITS = re.compile(r"(?<=\d)\s*\\(?:text|mbox|mathrm)\s*\{[a-zA-Z ./^\d]*\}(?:\^\{?\d\}?)?\s*$")
_LETTER = re.compile(r"^\\(?:text|mbox)\s*\{\(?([A-Z])\)?\}$")
_NAMED = re.compile(r"^[a-zA-Z](?:_\w|\([a-z]\))?\s*=\s*(?=[^=])")  # the "x=" of "x=5"
_SPACE = re.compile(r"(\\[a-zA-Z]+(?=\s+[a-zA-Z])|\d(?=\s+\d))?\s+")
_DECORATION = (
    "\\left", "\\right", "\\displaystyle", "\\!", "\\,", "\\;", "\\:", "\\ ", "~", "\\$", "$",
    "^\\circ", "^{\\circ}", "\\degree", "\\%", "%", "\\(", "\\)", "\\[", "\\]",
)  # fmt: skip
_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}


def find(text: str, *, finished: bool = True) -> str | None:
    r"""Finds the final answer of a solution: in its last \boxed{}, after "####", or a number.

    Args:
      finished: False if the text was cut off at a limit. Then its last number is not taken as the
        answer, and a "####" in its incomplete last line is ignored.
    Returns:
      The answer as written; the last number if no answer is marked; None without any number.
    """
    boxes = boxed(text)
    if boxes:
        return boxes[-1]
    lines = text if finished else text[: text.rfind("\n") + 1]
    return marked(lines) or (_last_number(text) if finished else None)


def agree(text: str, reference: str, *, finished: bool = True) -> bool | None:
    """Returns whether a text has the final answer of a reference; None if that has no answer.

    Args:
      reference: Worked solution.
      finished: False if the text was cut off at a limit; see `find`.
    """
    expected = find(reference)
    if not expected:
        return None
    answer = find(text, finished=finished)
    return bool(answer) and same(answer, expected)


def marked(text: str) -> str | None:
    """Returns the text after the last "####" at the beginning of a line, as in GSM8K."""
    answers = [line[4:].strip() for line in text.splitlines() if line.startswith("####")]
    return next((answer for answer in reversed(answers) if answer), None)


def boxed(text: str) -> list[str]:
    r"""Returns the content of each \boxed{…} in a text; boxes that never close are skipped."""
    boxes = [match.end() for match in _BOX.finditer(text)]
    ends = _partners(text) if boxes else {}
    return [text[start + 1 : ends[start]].strip() for start in boxes if start in ends]


def same(answer: str, reference: str) -> bool:
    """Returns whether two final answers have equal values or are the same expression."""
    if max(len(answer), len(reference)) > MAX_CHARACTERS:
        return answer.strip() == reference.strip()
    return _same(simplified(answer), simplified(reference))


def simplified(answer: str) -> str:
    """Removes whatever does not change the value of an answer: spaces, dollar signs, units."""
    text = answer.strip().rstrip(".").strip()
    text = _LETTER.sub(r"\1", text)
    text = _UNITS.sub("", text)
    text = _TEXT.sub(r"\1", text)
    for mark in _DECORATION:
        text = text.replace(mark, "")
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("−", "-")
    text = _NAMED.sub("", _BRACED_COMMA.sub("", text.strip()))
    if _GROUPED.fullmatch(text):
        return text.replace(",", "")
    text = _MIXED.sub(r"\1\\frac{\2}{\3}", text)
    # Keep the spaces in "3 4", which is not 34, and in "\pi k", which is not "\pik".
    return _SPACE.sub(lambda match: f"{match[1]} " if match[1] else "", text)


def _same(answer: str, reference: str) -> bool:
    if answer == reference:
        return True
    (bracket, items), (other_bracket, other_items) = _items(answer), _items(reference)
    if bracket == other_bracket and 1 < len(items) == len(other_items) <= MAX_ITEMS:
        if bracket in ("", "\\{"):
            return _same_in_any_order(items, other_items)
        return all(map(_same, items, other_items))
    values = latex_values.evaluate(answer)
    return values is not None and latex_values.equal(values, latex_values.evaluate(reference))


def _same_in_any_order(items: Sequence[str], other_items: Sequence[str]) -> bool:
    unmatched = list(other_items)
    for item in items:
        place = next((place for place, other in enumerate(unmatched) if _same(item, other)), None)
        if place is None:
            return False
        del unmatched[place]
    return True


def _items(text: str) -> tuple[str, list[str]]:
    r"""Splits a list into its brackets and its items: "[1,2)" -> "[)", ["1", "2"]."""
    kind = ""
    for opening, closing in _BRACKETS.items():
        if text.startswith(opening) and text.endswith((")", "]", closing)):
            closed = closing if text.endswith(closing) else text[-1]
            kind = opening if opening == "\\{" else opening + closed
            text = text[len(opening) : len(text) - len(closed)]
            break
    items, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            items.append("")
        else:
            items[-1] += character
    return kind, items


def _last_number(text: str) -> str | None:
    for match in reversed(list(_DIGITS.finditer(text))):
        run = match.group().rstrip(".,")
        number = run if _GROUPED.fullmatch(run) else run.rpartition(",")[2]
        if _PLAIN.fullmatch(number.replace(",", "")):
            before = text[: match.start()][-2:] if number == run else ""
            minus = before.endswith(("-", "−")) and not re.match(r"[\w)\]}]", before[:-1])
            return f"-{number}" if minus else number
    return None


def _partners(text: str) -> dict[int, int]:
    r"""Maps the position of each opening brace to its closing one; skips escaped braces."""
    pairs, opened = {}, []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs
