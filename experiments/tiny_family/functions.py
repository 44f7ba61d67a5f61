"""Short functions to write from a description that determines every character.

A function applies an operation (count, sum, select, …) to the items of a list that meet a
condition: "Write a function that counts the prices that are greater than 50."
"""

import dataclasses
import random
import textwrap
from collections.abc import Mapping

from experiments.tiny_family.numbered import fill

COUNT = {"train": 40_000, "validation": 2000, "test": 2000}
_SHORT = 0.3  # share of functions to write as a single statement, where one exists
_TYPED = 0.25  # share with type hints
_NAMED = 0.3  # share whose name the question prescribes
_LIMITED = 0.25  # share whose number in the condition is an argument
_INDENT = " " * 4


@dataclasses.dataclass(frozen=True)
class Things:
    """Kind of list that a function iterates over.

    Attributes:
      type: Type of an item.
      names: Plural nouns for the list; without the "s" they name an item.
      conditions: Expressions by wording; {x} is an item, {n} and {d} are numbers, {c} is a letter.
    """

    type: str
    names: tuple[str, ...]
    conditions: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Operation:
    """Operation of a function, in which {xs} is the list, {x} an item, {if} the condition.

    Attributes:
      does: Description; {those} are the items that meet the condition.
      name: Name of the function.
      body: Statements of the function.
      statement: Equivalent single statement; empty if none exists.
      type: Return type; {t} is the type of an item.
      of: Item types that the operation supports.
    """

    does: str
    name: str
    body: str
    statement: str
    type: str
    of: tuple[str, ...] = ("int", "str")


_NUMBERS = Things(
    "int",
    tuple(
        "ages amounts costs distances durations fees heights incomes lengths levels numbers "
        "payments points prices results scores speeds temperatures values weights".split()
    ),
    {
        "that are greater than {n}": "{x} > {n}",
        "that are less than {n}": "{x} < {n}",
        "that are at least {n}": "{x} >= {n}",
        "that are at most {n}": "{x} <= {n}",
        "that are equal to {n}": "{x} == {n}",
        "that are not equal to {n}": "{x} != {n}",
        "that are between 0 and {n}": "0 <= {x} <= {n}",
        "that are even": "{x} % 2 == 0",
        "that are odd": "{x} % 2 == 1",
        "that are divisible by {d}": "{x} % {d} == 0",
        "that are positive": "{x} > 0",
        "that are negative": "{x} < 0",
        "that are not zero": "{x} != 0",
    },
)
_TEXTS = Things(
    "str",
    tuple(
        "answers authors cards colors comments flavors labels letters lines messages names notes "
        "orders parts paths questions sentences tags titles words".split()
    ),
    {
        "that are longer than {n} characters": "len({x}) > {n}",
        "that are shorter than {n} characters": "len({x}) < {n}",
        "that have exactly {n} characters": "len({x}) == {n}",
        "that begin with the letter {c}": "{x}.startswith('{c}')",
        "that end with the letter {c}": "{x}.endswith('{c}')",
        "that contain the letter {c}": "'{c}' in {x}",
        "that do not contain the letter {c}": "'{c}' not in {x}",
        "that are in upper case": "{x}.isupper()",
        "that are in lower case": "{x}.islower()",
        "that consist of digits": "{x}.isdigit()",
        "that are empty": "not {x}",
        "that are not empty": "{x}",
    },
)
_OPERATIONS = (
    Operation(
        "counts the {those}",
        "count_{xs}",
        """\
        count = 0
        for {x} in {xs}:
            if {if}:
                count += 1
        return count""",
        "return sum(1 for {x} in {xs} if {if})",
        "int",
    ),
    Operation(
        "returns the sum of the {those}",
        "sum_{xs}",
        """\
        total = 0
        for {x} in {xs}:
            if {if}:
                total += {x}
        return total""",
        "return sum({x} for {x} in {xs} if {if})",
        "int",
        ("int",),
    ),
    Operation(
        "returns a list of the {those}",
        "select_{xs}",
        """\
        selected = []
        for {x} in {xs}:
            if {if}:
                selected.append({x})
        return selected""",
        "return [{x} for {x} in {xs} if {if}]",
        "list[{t}]",
    ),
    Operation(
        "returns the first of the {those}",
        "find_{x}",
        """\
        for {x} in {xs}:
            if {if}:
                return {x}
        return None""",
        "return next(({x} for {x} in {xs} if {if}), None)",
        "{t} | None",
    ),
    Operation(
        "returns the positions of the {those}",
        "find_positions",
        """\
        positions = []
        for position, {x} in enumerate({xs}):
            if {if}:
                positions.append(position)
        return positions""",
        "return [position for position, {x} in enumerate({xs}) if {if}]",
        "list[int]",
    ),
    Operation(
        "returns the largest of the {those}",
        "find_largest_{x}",
        """\
        largest = None
        for {x} in {xs}:
            if {if}:
                if largest is None or {x} > largest:
                    largest = {x}
        return largest""",
        "return max(({x} for {x} in {xs} if {if}), default=None)",
        "{t} | None",
        ("int",),
    ),
    Operation(
        "returns the average of the {those}",
        "average_{x}",
        """\
        count = 0
        total = 0
        for {x} in {xs}:
            if {if}:
                count += 1
                total += {x}
        if count == 0:
            return None
        return total / count""",
        "",
        "float | None",
        ("int",),
    ),
    Operation(
        "returns the longest of the {those}",
        "find_longest_{x}",
        """\
        longest = ''
        for {x} in {xs}:
            if {if}:
                if len({x}) > len(longest):
                    longest = {x}
        return longest""",
        "",
        "str",
        ("str",),
    ),
    Operation(
        "prints the {those}",
        "print_{xs}",
        """\
        for {x} in {xs}:
            if {if}:
                print({x})""",
        "",
        "None",
    ),
    Operation(
        "returns how often each of the {those} occurs",
        "count_each_{x}",
        """\
        counts = {}
        for {x} in {xs}:
            if {if}:
                counts[{x}] = counts.get({x}, 0) + 1
        return counts""",
        "",
        "dict[{t}, int]",
    ),
    Operation(
        "returns whether there are {those}",
        "has_{xs}",
        """\
        for {x} in {xs}:
            if {if}:
                return True
        return False""",
        "return any({if} for {x} in {xs})",
        "bool",
    ),
    Operation(
        "removes the {those}",
        "remove_{xs}",
        """\
        remaining = []
        for {x} in {xs}:
            if {if}:
                continue
            remaining.append({x})
        return remaining""",
        "",
        "list[{t}]",
    ),
)
_NAMES = (
    "analyze apply_rule calculate check_all collect compute evaluate examine find_all get_result "
    "handle inspect_all main_step perform prepare process run_once scan_all solve work_out"
).split()
_LETTERS = "abcdefghiklmnoprstw"
_ASKS = ("Write", "Please write", "I need")


def draw(rng: random.Random) -> tuple[str, str]:
    """Draws a description and the function that it describes."""
    things = rng.choice((_NUMBERS, _TEXTS))
    operation = rng.choice([each for each in _OPERATIONS if things.type in each.of])
    names = rng.choice(things.names)
    wording, expression = rng.choice(list(things.conditions.items()))
    limited = rng.random() < _LIMITED
    number = "limit" if limited else str(rng.randint(1, 100))
    words = {"n": number, "d": str(rng.randint(2, 12)), "c": rng.choice(_LETTERS)}
    words |= {"xs": names, "x": names.removesuffix("s"), "t": things.type}
    words["if"] = fill(expression, words)
    shown = {**words, "n": f"`{number}`" if limited else number}
    does = fill(operation.does, {"those": f"{names} {fill(wording, shown)}"})

    arguments = {names: f"list[{things.type}]"}
    if limited and "{n}" in wording:
        arguments[number] = "int"
    prescribed = rng.choice(_NAMES) if rng.random() < _NAMED else ""
    typed = rng.random() < _TYPED
    short = operation.statement != "" and rng.random() < _SHORT
    returned = fill(operation.type, words) if typed else None
    head = _head(prescribed or fill(operation.name, words), arguments, returned)
    body = operation.statement if short else textwrap.dedent(operation.body)
    text = f'"""{does[0].upper()}{does[1:]}."""\n{fill(body, words)}'

    called = f" `{prescribed}`" if prescribed else ""
    wishes = ["type hints"] * typed + ["a single statement"] * short
    with_these = f", with {' and '.join(wishes)}" if wishes else ""
    question = f"{rng.choice(_ASKS)} a function{called} that {does}{with_these}."
    return question, f"{head}\n{textwrap.indent(text, _INDENT)}"


def _head(name: str, arguments: Mapping[str, str], returned: str | None) -> str:
    """Returns the `def` line, with type hints if the return type `returned` is not None."""
    if returned is None:
        return f"def {name}({', '.join(arguments)}):"
    listed = (f"{argument}: {kind}" for argument, kind in arguments.items())
    return f"def {name}({', '.join(listed)}) -> {returned}:"
