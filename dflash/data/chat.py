"""The data set `chat`: questions about the standard library, answered from its docstrings.

Some questions bring the documentation along, so that the answer can be read off it; the others ask
for what their names and signatures suggest.
"""

import ast
import re
from collections.abc import Iterator

from dflash.data import stdlib
from dflash.data.example import Example, Split, pair, stable_hash

TASK = "chat"
MIN_ANSWER_CHARACTERS = 15
MAX_ANSWER_CHARACTERS = 600
MAX_DOCUMENTATION_CHARACTERS = 900
MAX_METHODS = 15
MIN_ARGUMENTS = 2  # to be worth a question
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_RETURNS = re.compile(r"^(?:It )?(?:[Rr]eturns?) (.+)$", re.DOTALL)
# Verbs that docstrings begin with, and how a question takes them up.
_VERBS = dict.fromkeys(
    "accept add append apply assign attach bind build call cancel change clear close compare "
    "compile compute connect convert copy count create decode define delete determine disable "
    "display enable encode escape execute extract fetch fill filter find flush format generate "
    "get handle initialize insert install invoke iterate join launch list load lock log look make "
    "merge move open parse pop prepare print process push put query raise read receive register "
    "release remove rename repeat replace report reset resolve restore run save scan schedule "
    "search send serialize set show shut skip sort split start stop store strip subtract suspend "
    "terminate test translate truncate try turn unregister update use validate wait wrap "
    "write".split()
)
_VERBS = {verb: verb for verb in _VERBS} | {"return": "get", "returns": "get"}


def examples(split: Split) -> Iterator[Example]:
    """Yields the examples of a split, in the order of the modules' names.

    No question occurs twice, and training has nothing whose docstring begins with the paragraph
    that one of another split begins with.
    """
    excluded: set[str] = set()
    if split == "train":
        held_out = (module for other in ("validation", "test") for module in _modules(other))
        excluded = {text for module in held_out for text in _summaries(module)}
    seen = set()
    for module in _modules(split):
        source = stdlib.source_of(module.name)
        for question, answer in _questions(module, excluded):
            if question not in seen:
                seen.add(question)
                yield pair(TASK, source, question, answer)


def _modules(split: Split) -> Iterator[stdlib.Module]:
    return (module for module in stdlib.modules(split) if module.is_public)


def _summaries(module: stdlib.Module) -> Iterator[str]:
    for definition in stdlib.definitions(module):
        if definition.docstring:
            yield stdlib.first_paragraph(definition.docstring)


def _questions(module: stdlib.Module, excluded: set[str]) -> Iterator[tuple[str, str]]:
    yield from _module_questions(module)
    for definition in stdlib.definitions(module):
        if not definition.is_public or _is_property(definition):
            continue
        if stdlib.first_paragraph(definition.docstring) not in excluded:
            ask = _class_questions if definition.is_class else _function_questions
            yield from ask(definition)


def _module_questions(module: stdlib.Module) -> Iterator[tuple[str, str]]:
    documentation = ast.get_docstring(module.tree) or ""
    answer = _prose(documentation)
    if answer:
        yield (
            _phrase(
                module.name,
                f"What is the module `{module.name}` for?",
                f"Tell me about the Python module `{module.name}`.",
            ),
            answer,
        )
        yield from _reading(f"module `{module.name}`", documentation)


def _class_questions(definition: stdlib.Definition) -> Iterator[tuple[str, str]]:
    name = f"{definition.module.name}.{definition.name}"
    answer = _prose(definition.docstring)
    if answer:
        yield (
            _phrase(
                name,
                f"What is the class `{name}` for?",
                f"What does the class `{name}` do?",
            ),
            answer,
        )
        yield from _reading(f"class `{name}`", definition.docstring)
    methods = [
        node
        for node in definition.node.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    ]
    if 1 < len(methods) <= MAX_METHODS:
        heads = "\n".join(f"    def {node.name}({ast.unparse(node.args)}): ..." for node in methods)
        listed = "\n".join(f"- `{node.name}`" for node in methods)
        yield (
            f"Which methods does this class have?\n\nclass {definition.name}:\n{heads}",
            f"The class `{definition.name}` has {len(methods)} methods:\n{listed}",
        )


def _function_questions(definition: stdlib.Definition) -> Iterator[tuple[str, str]]:
    name = f"{definition.module.name}.{definition.name}"
    call = f"{name}({_arguments(definition)})"
    listed = _argument_lines(definition)
    if len(listed) >= MIN_ARGUMENTS:
        question = _phrase(
            name,
            f"Which arguments does `{call}` take?",
            f"What are the arguments of `{call}`?",
        )
        lines = "\n".join(f"- {line}" for line in listed)
        yield question, f"`{definition.node.name}` takes {len(listed)} arguments:\n{lines}"
    answer = _prose(definition.docstring)
    if not answer:
        return
    yield _phrase(name, f"What does `{call}` do?", f"Explain `{call}`."), answer
    yield from _reading(f"function `{name}`", definition.docstring)
    sentence = _sentences(answer)[0]
    verb, _, rest = sentence.partition(" ")
    if verb.lower() in _VERBS and rest:
        task = f"{_VERBS[verb.lower()]} {rest}".rstrip(".")
        yield f"How do I {task}?", _usage(definition, call)


def _is_property(definition: stdlib.Definition) -> bool:
    decorators = [ast.unparse(node) for node in definition.node.decorator_list]
    return any(name.endswith(("property", ".setter", ".deleter")) for name in decorators)


def _usage(definition: stdlib.Definition, call: str) -> str:
    module = definition.module.name
    if definition.owner:
        return (
            f"Use the method `{definition.node.name}` of the class "
            f"`{module}.{definition.owner.name}`:\n\n{call}"
        )
    return (
        f"Use the function `{definition.name}` of the module `{module}`:\n\n"
        f"import {module}\n\nresult = {call}"
    )


def _reading(what: str, documentation: str) -> Iterator[tuple[str, str]]:
    """Questions that bring the documentation along."""
    if len(documentation) > MAX_DOCUMENTATION_CHARACTERS:
        return
    sentences = _sentences(" ".join(documentation.split()))
    first = _prose(sentences[0])
    if first and len(sentences) > 1:
        question = _phrase(
            documentation,
            f"Summarize the documentation of the {what} in one sentence.",
            f"This is the documentation of the {what}. Say in one sentence what it is about.",
        )
        yield f"{question}\n\n{documentation}", first
    for sentence in sentences:
        match = _RETURNS.match(sentence)
        if match and _prose(sentence):
            question = f"According to its documentation, what does the {what} return?"
            yield f"{question}\n\n{documentation}", f"It returns {match[1]}"
            return


def _arguments(definition: stdlib.Definition) -> str:
    """The arguments as a caller sees them, without `self`."""
    text = ast.unparse(definition.node.args)
    if _is_bound(definition):
        first, _, rest = text.partition(", ")
        return rest.removeprefix("/, ") if first in ("self", "cls") else text
    return text


def _is_bound(definition: stdlib.Definition) -> bool:
    decorators = {ast.unparse(node) for node in definition.node.decorator_list}
    return definition.owner is not None and "staticmethod" not in decorators


def _argument_lines(definition: stdlib.Definition) -> list[str]:
    """What a caller may give, each with its default."""
    given = definition.node.args
    positional = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(positional) - len(given.defaults)) + given.defaults
    lines = [
        f"`{argument.arg}`{_default(default)}"
        for argument, default in zip(positional, defaults, strict=True)
    ]
    if _is_bound(definition) and positional and positional[0].arg in ("self", "cls"):
        lines = lines[1:]
    if given.vararg:
        lines.append(f"`*{given.vararg.arg}`, any number of further ones")
    lines += [
        f"`{argument.arg}`, by keyword only{_default(default)}"
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        lines.append(f"`**{given.kwarg.arg}`, any further keywords")
    return lines


def _default(default: ast.expr | None) -> str:
    return "" if default is None else f", by default `{ast.unparse(default)}`"


def _prose(documentation: str) -> str:
    """The first paragraph as an answer; empty where it is none, such as a signature or a table."""
    text = stdlib.first_paragraph(documentation)
    if not MIN_ANSWER_CHARACTERS <= len(text) <= MAX_ANSWER_CHARACTERS:
        return ""
    words = text.split()
    if ">>>" in text or "->" in text or len(words) < 3 or not text[0].isalpha():
        return ""
    if "(" in words[0] or text.endswith(":"):
        return ""
    text = text[0].upper() + text[1:]
    return text if text[-1] in ".!?" else f"{text}."


def _sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text)


def _phrase(key: str, *phrasings: str) -> str:
    """One of several phrasings, by a hash of what the question is about."""
    return phrasings[stable_hash(key) % len(phrasings)]
