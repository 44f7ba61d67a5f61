r"""Final answers in the text of a solution, and whether two of them are the same.

A number counts however it is written (1,000 = 1000.0 = \frac{2000}{2}); everything else is compared
as LaTeX without its decoration. Equal expressions in other forms, such as 2x and x+x, count as
different, so a share of right answers can only come out too low.
"""

import fractions
import re

_BOX = re.compile(r"\\(?:boxed|fbox)\b\s*")
_MARKED = re.compile(r"^#### *(\S.*?)\s*$", re.MULTILINE)
_NUMBER = re.compile(r"(?:(?<![\w)\]}])-)?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\d.]*\d)")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?:\D|$))")
_FRACTION = re.compile(r"^(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}$")
_EXACT = re.compile(r"[-+]?(?:\d{1,100}(?:\.\d{0,100})?|\.\d{1,100})|[-+]?\d{1,100}/\d{1,100}")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")  # \frac12, as TeX takes it
_TEXT = re.compile(r"\\(?:text|mbox|textbf|mathrm|mathbf|operatorname)\s*\{([^{}]*)\}")
_UNITS = re.compile(r"(?<=\d)\s*\\(?:text|mbox|mathrm)\s*\{\s*[a-zA-Z ./^\d]*\}(?:\^\{?\d\}?)?\s*$")
_LETTER = re.compile(r"^\\(?:text|mbox)\s*\{\(?([A-Z])\)?\}$")
_NAMED = re.compile(r"^[a-zA-Z](?:_\w|\([a-z]\))?=(?=[^=])")  # the "x=" of "x=5"
_DECORATION = (
    "\\left", "\\right", "\\displaystyle", "\\!", "\\,", "\\;", "\\:", "\\ ", "~", "\\$", "$",
    "^\\circ", "^{\\circ}", "\\degree", "\\%", "%", "\\(", "\\)", "\\[", "\\]",
)  # fmt: skip


def find(text: str) -> str | None:
    r"""The final answer of a solution: in its last \boxed{}, after its last "####", or a number.

    Args:
      text: of the solution, such as a model's.
    Returns:
      The answer as written; where nothing marks one, the last number; None without even that.
    """
    boxes = boxed(text)
    if boxes:
        return boxes[-1]
    numbers = _NUMBER.findall(text)
    return marked(text) or (numbers[-1] if numbers else None)


def agree(text: str, reference: str) -> bool | None:
    """Whether a text comes to the same final answer as a reference; None if that has none."""
    wanted = find(reference)
    if wanted is None:
        return None
    found = find(text)
    return found is not None and same(found, wanted)


def marked(text: str) -> str | None:
    """What stands after the last "####" of a text, as the solutions of GSM8K end."""
    found = _MARKED.findall(text)
    return found[-1] if found else None


def boxed(text: str) -> list[str]:
    r"""What each \boxed{…} of a text holds; a box that never closes does not count."""
    found = []
    for match in _BOX.finditer(text):
        inner = _braced(text, match.end())
        if inner is not None:
            found.append(inner.strip())
    return found


def same(answer: str, reference: str) -> bool:
    """Whether two final answers are the same number, or else the same expression."""
    one, other = number(answer), number(reference)
    if one is not None and other is not None:
        return one == other
    return simplified(answer) == simplified(reference)


def number(answer: str) -> fractions.Fraction | None:
    """The exact number that an answer is; None for other expressions."""
    text = simplified(answer)
    ratio = _FRACTION.match(text)
    if ratio:
        sign = -1 if ratio[1] else 1
        below = int(ratio[3])
        return fractions.Fraction(sign * int(ratio[2]), below) if below else None
    text = _THOUSANDS.sub("", text)
    # Not whatever Python reads as a number: 1e999999999 would take all memory.
    if not _EXACT.fullmatch(text):
        return None
    try:
        return fractions.Fraction(text)
    except ZeroDivisionError:
        return None


def simplified(answer: str) -> str:
    """An answer without what does not change its value: spaces, dollars, units, sizes of braces."""
    text = answer.strip().rstrip(".").strip()
    text = _LETTER.sub(r"\1", text)
    text = _UNITS.sub("", text)
    text = _TEXT.sub(r"\1", text)
    for mark in _DECORATION:
        text = text.replace(mark, "")
    text = "".join(text.split())
    text = text.replace("dfrac", "frac").replace("tfrac", "frac").replace("−", "-")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    return _NAMED.sub("", text)


def _braced(text: str, start: int) -> str | None:
    r"""What stands between the brace at `start` and its partner; \{ and \} are no braces."""
    if text[start : start + 1] != "{":
        return None
    depth, place = 0, start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1  # the next character is escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if not depth:
                return text[start + 1 : place]
        place += 1
    return None
