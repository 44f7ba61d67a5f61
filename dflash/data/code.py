"""The data set `code`: complete a function of the standard library from its head and docstring."""

import ast
from collections.abc import Iterator

from dflash.data import stdlib
from dflash.data.example import Example, Split, pair

TASK = "code"
MAX_DOCSTRING_CHARACTERS = 600  # of a longer one only the first paragraph is given
MAX_PROMPT_CHARACTERS = 1200
MAX_RESPONSE_CHARACTERS = 1200  # about 400 tokens
LONG_CHARACTERS = 120  # two bodies of this length are not the same by chance
_FIRST_INDENT = " " * 4


def examples(split: Split) -> Iterator[Example]:
    """Yields the examples of a split, in the order of the modules' names.

    Training has functions without a docstring too, and nothing whose code is in another split.
    """
    seen = set()
    if split == "train":
        seen = {_content(held) for other in ("validation", "test") for held in _examples(other)}
    for found in _examples(split):
        content = _content(found)
        if content not in seen:
            seen.add(content)
            yield found


def _examples(split: Split) -> Iterator[Example]:
    for module in stdlib.modules(split):
        for definition in stdlib.definitions(module):
            if definition.is_class or not (definition.docstring or split == "train"):
                continue
            parts = _split_source(definition)
            if parts is None:
                continue
            head, body = parts
            prompt = f"Complete this function of the module `{module.name}`.\n\n{head}"
            if len(prompt) <= MAX_PROMPT_CHARACTERS and len(body) <= MAX_RESPONSE_CHARACTERS:
                yield pair(TASK, stdlib.source_of(module.name), prompt, body)


def _content(example: Example) -> tuple[str, ...]:
    """What makes two examples the same: a long body, or a head and a body, wherever they stand."""
    if len(example.response) >= LONG_CHARACTERS:
        return (example.response,)
    return example.prompt[0]["content"].partition("\n\n")[2], example.response


def _split_source(definition: stdlib.Definition) -> tuple[str, str] | None:
    """(prompt, answer) as source text; None where the function does not divide into them."""
    node, lines = definition.node, definition.module.lines
    documented = bool(definition.docstring)
    body = node.body[1:] if documented else node.body
    if not body or _is_stub(body):
        return None
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    head_end = node.body[0].end_lineno if documented else body[0].lineno - 1
    if head_end < node.lineno or body[0].lineno <= head_end:
        return None  # written on one line
    head, rest = list(lines[first - 1 : head_end]), lines[head_end : node.end_lineno]
    indent = head[0][: len(head[0]) - len(head[0].lstrip())]
    if documented and len(definition.docstring) > MAX_DOCSTRING_CHARACTERS:
        summary = stdlib.first_paragraph(definition.docstring).replace("\\", "\\\\")
        head = list(lines[first - 1 : node.body[0].lineno - 1])
        head.append(f'{indent}{_FIRST_INDENT}"""{summary}"""')
    wanted_indent = _FIRST_INDENT if definition.owner else ""
    if indent != wanted_indent:
        return None
    if definition.owner:
        head.insert(0, _class_line(definition.owner))
    head_text, body_text = ("\n".join(map(str.rstrip, part)).strip("\n") for part in (head, rest))
    return (head_text, body_text) if _is_python(f"{head_text}\n{body_text}") else None


def _class_line(owner: ast.ClassDef) -> str:
    bases = ", ".join(map(ast.unparse, [*owner.bases, *owner.keywords]))
    return f"class {owner.name}({bases}):" if bases else f"class {owner.name}:"


def _is_stub(body: list[ast.stmt]) -> bool:
    """Whether a body does nothing: `pass`, `...` or `raise NotImplementedError`."""
    if len(body) > 1:
        return False
    statement = body[0]
    if isinstance(statement, ast.Raise):
        return "NotImplementedError" in ast.unparse(statement)
    constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return constant or isinstance(statement, ast.Pass)


def _is_python(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True
