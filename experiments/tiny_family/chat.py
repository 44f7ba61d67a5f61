"""Data set `chat`: questions about a text in the prompt, and letters to write.

The prompts contain documentation and signatures of the standard library, or facts about invented
people and things; see `facts` and `letters`.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from dflash.data.example import Example, Split, pair, stable_hash
from experiments.tiny_family import facts, letters, numbered, stdlib

TASK = "chat"
MIN_ANSWER_CHARACTERS = 15
MAX_ANSWER_CHARACTERS = 400
MAX_DOCUMENTATION_CHARACTERS = 600
MAX_METHODS = 12
MIN_ARGUMENTS, MAX_ARGUMENTS = 2, 8  # for questions about arguments
NUM_CHOICES = 4  # number of functions to choose from
MAX_CHOICE_CHARACTERS = 90  # of the description of a choice
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"(])")
_RETURNS = re.compile(r"^(?:It )?(?:[Rr]eturns?) (.+)$", re.DOTALL)


def examples(split: Split) -> Iterator[Example]:
    """Yields the examples of a split: the library in the order of its modules, facts, letters."""
    yield from library_examples(split)
    yield from facts.examples(TASK, split)
    yield from numbered.examples(TASK, split, letters.draw, letters.COUNT)


def library_examples(split: Split) -> Iterator[Example]:
    """Yields the examples about the standard library.

    No question occurs twice. The train split omits every definition whose docstring shares its
    first paragraph with a definition of another split.
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
    yield from _module_questions(module, excluded)
    for definition in stdlib.definitions(module):
        if not definition.is_public or _is_property(definition):
            continue
        if stdlib.first_paragraph(definition.docstring) not in excluded:
            ask = _class_questions if definition.is_class else _function_questions
            yield from ask(definition)


def _module_questions(module: stdlib.Module, excluded: set[str]) -> Iterator[tuple[str, str]]:
    documentation = ast.get_docstring(module.tree) or ""
    if stdlib.first_paragraph(documentation) not in excluded:
        yield from _reading(f"module `{module.name}`", documentation)
    choices: dict[str, str] = {}  # names by description
    for definition in stdlib.definitions(module):
        does = _sentences(_prose(definition.docstring) or " ")[0]
        known = stdlib.first_paragraph(definition.docstring) in excluded
        if does.strip() and not known and len(does) <= MAX_CHOICE_CHARACTERS:
            choices[does] = definition.name
    pairs = [(name, does) for does, name in choices.items()]
    for start in range(0, len(pairs) - NUM_CHOICES + 1, NUM_CHOICES):
        yield _choosing(module.name, pairs[start : start + NUM_CHOICES])


def _choosing(module: str, choices: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Asks which of several definitions fits a description."""
    name, does = choices[stable_hash(repr(choices)) % len(choices)]
    listed = "\n".join(f"- `{name}`: {does}" for name, does in choices)
    description = does.rstrip(".")
    return (
        f"These are parts of the module `{module}`:\n\n{listed}\n\n"
        f"Which of them fits this description? {description}",
        f"It is `{name}` of the module `{module}`: {does}",
    )


def _class_questions(definition: stdlib.Definition) -> Iterator[tuple[str, str]]:
    name = f"{definition.module.name}.{definition.name}"
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
    if MIN_ARGUMENTS <= len(listed) <= MAX_ARGUMENTS:
        question = _phrase(
            name,
            f"Which arguments does `{call}` take?",
            f"What are the arguments of `{call}`?",
        )
        lines = "\n".join(f"- {line}" for line in listed)
        yield question, f"`{definition.node.name}` takes {len(listed)} arguments:\n{lines}"
    yield from _reading(f"function `{name}`", definition.docstring)


def _is_property(definition: stdlib.Definition) -> bool:
    decorators = [ast.unparse(node) for node in definition.node.decorator_list]
    return any(name.endswith(("property", ".setter", ".deleter")) for name in decorators)


def _reading(what: str, documentation: str) -> Iterator[tuple[str, str]]:
    """Yields questions about a documentation that the prompt contains."""
    if not documentation or len(documentation) > MAX_DOCUMENTATION_CHARACTERS:
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
    """Returns the argument list as a caller sees it, without `self`."""
    text = ast.unparse(definition.node.args)
    if _is_bound(definition):
        first, _, others = text.partition(", ")
        return others.removeprefix("/, ") if first in ("self", "cls") else text
    return text


def _is_bound(definition: stdlib.Definition) -> bool:
    decorators = {ast.unparse(node) for node in definition.node.decorator_list}
    return definition.owner is not None and "staticmethod" not in decorators


def _argument_lines(definition: stdlib.Definition) -> list[str]:
    """Describes the arguments that a caller may pass, with their defaults."""
    arguments = definition.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    lines = [
        f"`{argument.arg}`{_default(default)}"
        for argument, default in zip(positional, defaults, strict=True)
    ]
    if _is_bound(definition) and positional and positional[0].arg in ("self", "cls"):
        lines = lines[1:]
    if arguments.vararg:
        lines.append(f"`*{arguments.vararg.arg}`, any number of further ones")
    lines += [
        f"`{argument.arg}`, by keyword only{_default(default)}"
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        lines.append(f"`**{arguments.kwarg.arg}`, any further keywords")
    return lines


def _default(default: ast.expr | None) -> str:
    return "" if default is None else f", by default `{ast.unparse(default)}`"


def _prose(documentation: str) -> str:
    """Returns the first paragraph as a sentence; empty if it is a signature, a table or similar."""
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
    """Chooses one of several phrasings by a hash of the subject of the question."""
    return phrasings[stable_hash(key) % len(phrasings)]
