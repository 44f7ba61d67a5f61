r"""Values of LaTeX expressions, exact where possible, in bounded time and memory.

Supported are numbers, letters, \pi, + - * / \times \cdot \div, powers, \frac, \sqrt, mixed numbers
(5\frac{1}{2}), parentheses and implicit products (2x). Expressions are evaluated at two points, at
which each letter has a fixed value. Expressions with equal values at both points count as equal.
"""

import fractions
import hashlib
import math
import re

Value = fractions.Fraction | float

MAX_DEPTH = 20
MAX_BITS = 4000  # size of a numerator or denominator
MAX_EXPONENT = 1000
POINTS = 2
_TOLERANCE = 1e-12  # relative; for irrational values
_MAX_LETTERS = 3  # a longer run of letters is a word

_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\\?\S")
_FRACTION = re.compile(r"\\frac(?:(\d)(\d)|\{(\d+)\}\{(\d+)\})")
_WORD = re.compile(rf"^[a-zA-Z]{{2,}}$|(?<![\\a-zA-Z])[a-zA-Z]{{{_MAX_LETTERS + 1},}}")
_TIMES, _OVER = ("*", "\\times", "\\cdot", "×", "·"), ("/", "\\div")


class _NoValue(Exception):
    """The expression is unsupported, ambiguous or too large."""


def evaluate(text: str) -> tuple[Value, ...] | None:
    """Evaluates an expression at the two points; returns None if it is not supported."""
    try:
        return tuple(_Parser(text, point).value() for point in range(POINTS))
    except (_NoValue, ArithmeticError):
        return None


def equal(first: tuple[Value, ...] | None, second: tuple[Value, ...] | None) -> bool:
    """Returns whether both expressions have values and these are equal."""
    if first is None or second is None:
        return False
    return all(map(_equal, first, second))


def _equal(first: Value, second: Value) -> bool:
    if isinstance(first, float) or isinstance(second, float):
        return math.isclose(first, second, rel_tol=_TOLERANCE)
    return first == second


class _Parser:
    def __init__(self, text: str, point: int):
        if _WORD.search(text):
            raise _NoValue
        self._tokens = _TOKEN.findall(text)
        self._place = self._depth = 0
        self._point = point

    def value(self) -> Value:
        result = self._sum()
        if self._peek():
            raise _NoValue
        return result

    def _peek(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._peek()
        if not token or (expected and token not in expected):
            raise _NoValue
        self._place += 1
        return token

    def _sum(self) -> Value:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise _NoValue
        result = self._product()
        while self._peek() in ("+", "-"):
            sign = 1 if self._take() == "+" else -1
            result = _checked(result + sign * self._product())
        self._depth -= 1
        return result

    def _product(self) -> Value:
        sign = 1
        while self._peek() in ("+", "-"):
            sign *= 1 if self._take() == "+" else -1
        result, divided = sign * self._power(), False
        while self._peek() not in ("", "+", "-", ")", "}", "]"):
            token = self._peek()
            if token in _TIMES or token in _OVER:
                divided = self._take() in _OVER
                factor = self._power()
                result = _checked(result / factor if divided else result * factor)
            elif divided or token[0].isdigit() or token[0] == ".":
                raise _NoValue  # 1/2x is ambiguous, and 3 4 has no meaning
            else:
                result = _checked(result * self._power())
        return result

    def _power(self) -> Value:
        base = self._atom()
        if self._peek() != "^":
            return base
        self._take()
        if self._peek() == "-":
            self._take()
            return _power(base, -self._argument())
        return _power(base, self._argument())

    def _atom(self) -> Value:
        token = self._take()
        if token == "\\frac":
            return _checked(self._argument(max_digits=1) / self._argument(max_digits=1))
        if token == "\\sqrt":
            return self._root()
        if token == "\\pi":
            return math.pi
        if token in ("(", "{"):
            result = self._sum()
            self._take(")" if token == "(" else "}")
            return result
        if token[0].isdigit() or token[0] == ".":
            return self._number(token)
        if len(token) == 1 and token.isascii() and token.isalpha():
            return _letter(token, self._point)
        raise _NoValue

    def _root(self) -> Value:
        degree: Value = fractions.Fraction(2)
        if self._peek() == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        elif self._peek().isdigit() and len(self._peek()) > 1:
            # TeX reads one digit of \sqrt12, but its author means all of them.
            raise _NoValue
        return _power(self._argument(), 1 / degree)

    def _number(self, token: str) -> Value:
        r"""Parses a number, or a mixed number if a \frac below one follows."""
        number = _rational(token)
        part = _FRACTION.match("".join(self._tokens[self._place :]))
        if not part:
            return number
        above, below = (int(digits) for digits in part.groups() if digits)
        if not token.isdigit() or above >= below:
            raise _NoValue  # 2\frac{3}{2} may be a product or a mistake
        return _checked(number + self._atom())

    def _argument(self, max_digits: int | None = None) -> Value:
        """Parses a group in braces or one token; of a number, at most `max_digits` digits."""
        token = self._peek()
        if not token[:1].isdigit():
            return self._atom()
        if max_digits and len(token) > max_digits:
            self._tokens[self._place] = token[max_digits:]
            return _rational(token[:max_digits])
        return _rational(self._take())


def _rational(digits: str) -> fractions.Fraction:
    return _checked(fractions.Fraction(digits))


def _checked(value: Value) -> Value:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _NoValue
    elif max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _NoValue
    return value


def _power(base: Value, exponent: Value) -> Value:
    if isinstance(exponent, float) or exponent.denominator != 1:
        if base < 0:
            raise _NoValue
        return _checked(float(base) ** float(exponent))
    if abs(exponent) > MAX_EXPONENT or (
        not isinstance(base, float)
        and abs(exponent) * max(base.numerator.bit_length(), base.denominator.bit_length())
        > MAX_BITS
    ):
        raise _NoValue
    return _checked(base ** int(exponent))


def _letter(letter: str, point: int) -> fractions.Fraction:
    digest = hashlib.sha256(f"{letter}{point}".encode()).digest()
    return fractions.Fraction(int.from_bytes(digest[:3], "big") + 1, 2**20)
