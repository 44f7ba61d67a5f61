"""Data set `code`: small changes to functions of the standard library, and functions to write.

The changes rename or add an argument, remove the docstring and the like; other questions ask for a
class with given fields. Each has one right answer, which repeats most of the prompt, so that even a
small model can find it. `functions` has the functions to write.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence

from dflash.data.example import Example, Split, pair, stable_hash
from experiments.tiny_family import functions, numbered, stdlib

TASK = "code"
MIN_CHARACTERS, MAX_CHARACTERS = 60, 480  # per function; about 20 to 160 tokens
MAX_FIELDS = 6
NEW_NAMES = (
    "amount area count data entry field first index item key label last length level limit line "
    "message name node number obj offset other part path place point position previous record "
    "result second size source start step text title total unit user value width word"
).split()
NEW_FUNCTIONS = (
    "adjust apply arrange assemble build_all calculate carry_out check_all collect derive "
    "evaluate_it find_all handle inspect_it make perform prepare process provide run_once scan_all "
    "settle setup_all solve transform treat update_all work_out"
).split()
NEW_ARGUMENTS = (
    "verbose=False",
    "strict=True",
    "limit=10",
    "label=None",
    "timeout=None",
    "fallback=0",
    "separator=', '",
    "check=True",
    "depth=1",
    "reverse=False",
    "prefix=''",
    "quiet=True",
    "base=10",
)
_INDENT = " " * 4
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
Task = tuple[str, str]  # question and answer


def examples(split: Split) -> Iterator[Example]:
    """Yields the examples of a split: changes in the order of the modules, functions to write."""
    yield from changes(split)
    yield from numbered.examples(TASK, split, functions.draw, functions.COUNT)


def changes(split: Split) -> Iterator[Example]:
    """Yields changes to functions of the standard library, and classes to write.

    The train split omits functions and classes that also occur in another split.
    """
    seen = set()
    if split == "train":
        held_out = (name for name in ("validation", "test") for name in _subjects(name))
        seen = {subject for _, subject in held_out}
    for source, subject in _subjects(split):
        if subject not in seen:
            seen.add(subject)
            ask = _class_tasks if subject.startswith("class ") else _function_tasks
            for question, answer in ask(subject):
                yield pair(TASK, source, question, answer)


def _subjects(split: Split) -> Iterator[tuple[str, str]]:
    """Yields (source, text), where the text is a function or a head "class Name(fields)"."""
    for module in stdlib.modules(split):
        source = stdlib.source_of(module.name)
        for definition in stdlib.definitions(module):
            if definition.is_class:
                continue
            text = _text(definition)
            if MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS and _is_simple(definition.node):
                yield source, text
            head = _head(definition)
            if head:
                yield source, head


def _text(definition: stdlib.Definition) -> str:
    """Returns the source of a function with its decorators, without indentation."""
    node, lines = definition.node, definition.module.lines
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return textwrap.dedent("\n".join(map(str.rstrip, lines[first - 1 : node.end_lineno])))


def _head(definition: stdlib.Definition) -> str:
    """Returns "class Name(fields)" made of the arguments of `__init__` or of a function."""
    node = definition.node
    owner = definition.owner.name if definition.owner else node.name.title().replace("_", "")
    if not _has_plain_arguments(node) or (definition.owner and node.name != "__init__"):
        return ""
    names = [argument.arg for argument in node.args.args if argument.arg != "self"]
    if not 2 <= len(names) <= MAX_FIELDS or not owner.isidentifier() or "cls" in names:
        return ""
    defaults = [None] * (len(names) - len(node.args.defaults)) + node.args.defaults
    fields = [
        name if default is None else f"{name}={ast.unparse(default)}"
        for name, default in zip(names, defaults, strict=False)
    ]
    return f"class {owner}({', '.join(fields)})"


def _is_simple(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a function contains no other function, class or lambda."""
    scopes = sum(isinstance(child, _SCOPES) for child in ast.walk(node))
    return isinstance(node, ast.FunctionDef) and scopes == 1


def _parse(text: str) -> ast.stmt | None:
    """Parses a text of one statement; returns None if it is not one."""
    try:
        (node,) = ast.parse(text).body
    except (SyntaxError, ValueError):
        return None
    return node


def _class_tasks(head: str) -> Iterator[Task]:
    name, _, fields = head.removeprefix("class ").removesuffix(")").partition("(")
    arguments = ast.parse(f"def f({fields}): ...").body[0].args.args
    lines = [f"{_INDENT * 2}self.{each.arg} = {each.arg}" for each in arguments]
    listed = ", ".join(f"`{field}`" for field in fields.split(", "))
    question = _phrase(
        head,
        f"Write a class `{name}` with the fields {listed}.",
        f"Write the class `{name}`, whose objects have the fields {listed}.",
    )
    yield question, "\n".join([f"class {name}:", f"{_INDENT}def __init__(self, {fields}):", *lines])


def _function_tasks(text: str) -> Iterator[Task]:
    node = _parse(text)
    if node is None:
        return  # a multi-line string in it is indented less
    tasks = (
        _renamed_argument(node, text),
        _renamed_function(node, text),
        _without_docstring(node, text),
        _with_docstring(node, text),
        _with_argument(node, text),
        _as_method(node, text),
    )
    for task in tasks:
        if task is not None:
            question, shown, answer = task
            if _parse(answer) is not None:
                yield f"{question}\n\n{shown}", answer


def _renamed_argument(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    names = [argument.arg for argument in node.args.args if argument.arg not in ("self", "cls")]
    # Skip names that comments, strings or keyword arguments also mention.
    fit = [name for name in names if _uses(node, name) == _mentions(text, name)]
    new = _unused(NEW_NAMES, text)
    if not fit or new is None:
        return None
    old = fit[stable_hash(text) % len(fit)]
    question = _phrase(
        text,
        f"Rename the argument `{old}` of this function to `{new}`.",
        f"In this function, call the argument `{new}` instead of `{old}`.",
    )
    return question, text, re.sub(rf"\b{old}\b", new, text)


def _renamed_function(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    new = _unused(NEW_FUNCTIONS, text)
    if _mentions(text, node.name) != 1 or new is None:
        return None
    question = _phrase(
        text, f"Rename this function to `{new}`.", f"Call this function `{new}` instead."
    )
    return question, text, re.sub(rf"\b{node.name}\b", new, text)


def _without_docstring(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    bare = _bare(node, text)
    if bare is None:
        return None
    question = _phrase(
        text,
        "Remove the docstring of this function.",
        "Write this function without its docstring.",
    )
    return question, text, bare


def _with_docstring(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    bare, docstring = _bare(node, text), ast.get_docstring(node)
    line = f'{_INDENT}"""{docstring}"""'
    if bare is None or text.splitlines()[node.body[0].lineno - 1] != line:
        return None
    if len(bare.splitlines()) + 1 != len(text.splitlines()):
        return None  # a blank line follows the docstring
    question = _phrase(
        text,
        f"Add this docstring to the function: {docstring}",
        f"Give this function the docstring: {docstring}",
    )
    return question, bare, text


def _with_argument(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    fit = [new for new in NEW_ARGUMENTS if not _mentions(text, new.partition("=")[0])]
    lines = text.splitlines()
    header = lines[node.lineno - 1]
    if not _has_plain_arguments(node) or not header.isascii() or not header.endswith("):"):
        return None
    new = fit[stable_hash(text) % len(fit)]
    lines[node.lineno - 1] = f"{header[:-2]}{', ' if node.args.args else ''}{new}):"
    question = _phrase(
        text,
        f"Add the argument `{new}` to this function, after the others.",
        f"Give this function a further argument at the end, `{new}`.",
    )
    return question, text, "\n".join(lines)


def _as_method(node: ast.FunctionDef, text: str) -> tuple[str, str, str] | None:
    names = [argument.arg for argument in node.args.args]
    header = f"def {node.name}("
    if node.decorator_list or not text.startswith(header) or {"self", "cls"} & {*names}:
        return None
    owner = NEW_NAMES[stable_hash(text) % len(NEW_NAMES)].title()
    tail = text.removeprefix(header)
    bound = f"{header}self{', ' if not tail.startswith(')') else ''}{tail}"
    question = _phrase(
        text,
        f"Make this function a method of the class `{owner}`.",
        f"Turn this function into a method of a class `{owner}`.",
    )
    return question, text, f"class {owner}:\n{textwrap.indent(bound, _INDENT)}"


def _bare(node: ast.FunctionDef, text: str) -> str | None:
    """Removes the docstring of a function; returns None if no statement would remain."""
    if not ast.get_docstring(node) or len(node.body) < 2:
        return None
    docstring, lines = node.body[0], text.splitlines()
    if docstring.lineno == node.lineno or node.body[1].lineno == docstring.end_lineno:
        return None
    body = lines[docstring.end_lineno :]
    while not body[0].strip():
        body = body[1:]
    return "\n".join([*lines[: docstring.lineno - 1], *body])


def _has_plain_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    arguments = node.args
    annotated = node.returns or any(argument.annotation for argument in arguments.args)
    return not (
        arguments.vararg
        or arguments.kwarg
        or arguments.kwonlyargs
        or arguments.posonlyargs
        or annotated
    )


def _uses(node: ast.FunctionDef, name: str) -> int:
    """Counts the uses of a name as a variable or an argument."""
    return sum(
        (isinstance(child, ast.Name) and child.id == name)
        or (isinstance(child, ast.arg) and child.arg == name)
        for child in ast.walk(node)
    )


def _mentions(text: str, name: str) -> int:
    return len(re.findall(rf"\b{re.escape(name)}\b", text))


def _unused(names: Sequence[str], text: str) -> str | None:
    """Chooses a name that a text does not mention, by a hash of the text."""
    fit = [name for name in names if not _mentions(text, name)]
    return fit[stable_hash(text) % len(fit)] if fit else None


def _phrase(key: str, *phrasings: str) -> str:
    """Chooses one of several phrasings by a hash of the subject of the question."""
    return phrasings[stable_hash(f"phrase {key}") % len(phrasings)]
