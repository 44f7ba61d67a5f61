r"""Values of LaTeX expressions, exact where possible, in bounded time and memory.

Supported are numbers, letters, \pi, + - * / \times \cdot \div, powers, \frac, \sqrt, mixed numbers
(5\frac{1}{2}), parentheses and implicit products (2x). An expression is rewritten in Python's
syntax, and its tree is evaluated at a point, at which each letter has a fixed value. Expressions
with equal values there count as equal.
"""

import ast
import fractions
import hashlib
import math
import operator
import re

Value = fractions.Fraction | float

MAX_TOKENS = 200
MAX_BITS = 4000  # size of a numerator or denominator
_TOLERANCE = 1e-12  # relative; for irrational values

# Four letters or more are a word, and so are two that stand alone.
_WORD = re.compile(r"^[a-zA-Z]{2,}$|(?<![\\a-zA-Z])[a-zA-Z]{4,}")
_MIXED = re.compile(r"(?<![\w.^)}])([\d.]+)\\frac(?:(\d)(\d)|\{(\d+)\}\{(\d+)\})")
_ARGUMENT = r"(?:\{([^{}]*)\}|(\d|[a-zA-Z]|\\pi(?![a-zA-Z])))"
# Each takes arguments without inner braces, so the innermost commands are rewritten first.
_COMMANDS = (
    (re.compile(rf"\\frac{_ARGUMENT}{_ARGUMENT}"), r"((\1\2)/(\3\4))"),
    (re.compile(rf"\\sqrt\[([^\[\]]*)\]{_ARGUMENT}"), r"((\2\3)^(1/(\1)))"),
    # TeX reads one digit of \sqrt12, but its author means all of them.
    (re.compile(rf"\\sqrt(?!\d\d){_ARGUMENT}"), r"((\1\2)^(1/2))"),
    (re.compile(r"((?:^|[-+*/^({]))\{([^{}]*)\}"), r"\1(\2)"),
)
_TOKEN = re.compile(r"\d+\.?\d*|\.\d+|\\[a-zA-Z]+|\S")
_SPELLINGS = {"\\times": "*", "\\cdot": "*", "×": "*", "·": "*", "\\div": "/", "^": "**"}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class _NoValue(Exception):
    """The expression is unsupported, ambiguous or too large."""


def evaluate(text: str) -> Value | None:
    """Evaluates an expression at the point; returns None if it is not supported."""
    try:
        return _value(ast.parse(_as_python(text), mode="eval").body)
    except (_NoValue, ArithmeticError, SyntaxError, MemoryError):
        return None


def equal(first: Value | None, second: Value | None) -> bool:
    """Returns whether both expressions have values and these are equal."""
    if first is None or second is None:
        return False
    if isinstance(first, float) or isinstance(second, float):
        return math.isclose(first, second, rel_tol=_TOLERANCE)
    return first == second


def _as_python(text: str) -> str:
    if _WORD.search(text):
        raise _NoValue
    text, rewritten = _MIXED.sub(_sum, text), None
    while text != rewritten:
        rewritten = text
        for command, replacement in _COMMANDS:
            text = command.sub(replacement, text)
    tokens = [_SPELLINGS.get(token, token) for token in _TOKEN.findall(text)]
    if len(tokens) > MAX_TOKENS:
        raise _NoValue
    words, divided = [], [False]  # For each open parenthesis, whether its product ends in "/ x".
    for previous, token in zip(["(", *tokens], tokens, strict=False):
        is_number = token[0].isdecimal() or token[0] == "."
        is_letter = token == "\\pi" or (len(token) == 1 and token.isascii() and token.isalpha())
        if (is_number or is_letter or token == "(") and (previous[-1] not in "(+-*/"):
            if is_number or divided[-1]:
                raise _NoValue  # 3 4 has no meaning, and 1/2x is ambiguous
            words.append("*")
        if token == "(":
            divided.append(False)
        elif token == ")" and len(divided) > 1:
            divided.pop()
        elif token in ("+", "-", "*", "/"):
            divided[-1] = token == "/"
        elif is_number:
            token = "({}/{})".format(*fractions.Fraction(token).as_integer_ratio())
        elif not is_letter and token != "**":
            raise _NoValue
        words.append(token.removeprefix("\\"))
    return " ".join(words)


def _sum(mixed: re.Match) -> str:
    whole, above, below = (digits for digits in mixed.groups() if digits)
    if not whole.isdecimal() or int(above) >= int(below):
        raise _NoValue  # 2\frac{3}{2} may be a product or a mistake
    return f"({whole}+{above}/{below})"


def _value(node: ast.expr) -> Value:
    match node:
        case ast.Constant(value=number):
            return _checked(fractions.Fraction(number))
        case ast.Name(id=name):
            return math.pi if name == "pi" else _letter(name)
        case ast.UnaryOp(op=sign, operand=operand):
            value = _value(operand)
            return -value if isinstance(sign, ast.USub) else value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=kind, right=right):
            apply = _OPERATORS[type(kind)]
            return _checked(apply(_value(left), _value(right)))
    raise _NoValue


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
    if not isinstance(base, float):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) * bits > MAX_BITS:
            raise _NoValue
    return _checked(base ** int(exponent))


def _letter(letter: str) -> fractions.Fraction:
    digest = hashlib.sha256(letter.encode()).digest()
    return fractions.Fraction(int.from_bytes(digest[:4], "big") + 1, 2**28)
