r"""Final answers in the text of a solution, and whether two of them are the same.

A number counts however it is written (1,000 = 1{,}000.0 = \frac{2000}{2}), and other expressions
count by their value (2x = x+x); see `latex_values` for what is supported. Everything else is
compared as LaTeX without its decoration, so a right answer in another form counts as wrong.

Libraries for this (math-verify 0.9) understand more of LaTeX, but bound their time by signals,
which threads cannot use, and still never return on some answers. Here each step is linear in the
text, or of bounded size.
"""

import re
from collections.abc import Sequence

from dflash.data import latex_values

MAX_CHARACTERS = 1000  # of an answer that is more than compared
MAX_ITEMS = 50  # of a list or set whose items are compared one by one

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_DIGITS = re.compile(r"\d[\d.,]*")
_GROUPED = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?")
_PLAIN = re.compile(r"\d+(?:\.\d+)?")
_BRACED_COMMA = re.compile(r"(?<=\d)\{,\}(?=\d{3}(?!\d))")  # as TeX sets thousands well
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
    r"""The final answer of a solution: in its last \boxed{}, after its last "####", or a number.

    Args:
      text: of the solution, such as a model's.
      finished: False where the text was cut off at a limit. Its last number is then no answer, and
        neither is what a last line without an end marks.
    Returns:
      The answer as written; where nothing marks one, the last number; None without even that.
    """
    boxes = boxed(text)
    if boxes:
        return boxes[-1]
    lines = text if finished else text[: text.rfind("\n") + 1]
    return marked(lines) or (_last_number(text) if finished else None)


def agree(text: str, reference: str, *, finished: bool = True) -> bool | None:
    """Whether a text has the same final answer as a reference; None if that has none.

    Args:
      text: to be graded.
      reference: a worked solution.
      finished: see `find`.
    """
    wanted = find(reference)
    if not wanted:
        return None
    found = find(text, finished=finished)
    return bool(found) and same(found, wanted)


def marked(text: str) -> str | None:
    """What follows the last "####" that begins a line, as the solutions of GSM8K end."""
    answers = [line[4:].strip() for line in text.splitlines() if line.startswith("####")]
    return next((answer for answer in reversed(answers) if answer), None)


def boxed(text: str) -> list[str]:
    r"""What each \boxed{…} of a text holds; a box that never closes does not count."""
    boxes = [match.end() for match in _BOX.finditer(text)]
    ends = _partners(text) if boxes else {}
    return [text[start + 1 : ends[start]].strip() for start in boxes if start in ends]


def same(answer: str, reference: str) -> bool:
    """Whether two final answers have the same value, or else are the same expression."""
    if max(len(answer), len(reference)) > MAX_CHARACTERS:
        return answer.strip() == reference.strip()
    return _same(simplified(answer), simplified(reference))


def simplified(answer: str) -> str:
    """An answer without what does not change its value: spaces, dollars, units, sizes of braces."""
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
    # 3 4 is not 34, and \pi k is not \pik.
    return _SPACE.sub(lambda kept: f"{kept[1]} " if kept[1] else "", text)


def _same(one: str, other: str) -> bool:
    """`same` of simplified answers."""
    if one == other:
        return True
    (bracket, items), (other_bracket, others) = _items(one), _items(other)
    if bracket == other_bracket and 1 < len(items) == len(others) <= MAX_ITEMS:
        if bracket in ("", "\\{"):
            return _same_in_any_order(items, others)
        return all(map(_same, items, others))
    values = latex_values.evaluate(one)
    return values is not None and latex_values.equal(values, latex_values.evaluate(other))


def _same_in_any_order(items: Sequence[str], others: Sequence[str]) -> bool:
    rest = list(others)
    for item in items:
        place = next((place for place, other in enumerate(rest) if _same(item, other)), None)
        if place is None:
            return False
        del rest[place]
    return True


def _items(text: str) -> tuple[str, list[str]]:
    r"""The brackets of a list, "" without any, and its items: "[1,2)" -> "[)", ["1", "2"]."""
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
    """The last number of a text as written, with its minus sign."""
    for match in reversed(list(_DIGITS.finditer(text))):
        run = match.group().rstrip(".,")
        number = run if _GROUPED.fullmatch(run) else run.rpartition(",")[2]
        if _PLAIN.fullmatch(number.replace(",", "")):
            before = text[: match.start()][-2:] if number == run else ""
            minus = before.endswith(("-", "−")) and not re.match(r"[\w)\]}]", before[:-1])
            return f"-{number}" if minus else number
    return None


def _partners(text: str) -> dict[int, int]:
    r"""The place of the closing brace of each opening one; \{ and \} are no braces."""
    pairs, opened = {}, []
    for match in _BRACE.finditer(text):
        if match.group() == "{":
            opened.append(match.start())
        elif match.group() == "}" and opened:
            pairs[opened.pop()] = match.start()
    return pairs
