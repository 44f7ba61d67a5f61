"""Checks the prose of Python files (docstrings, comments, messages) and of Markdown pages.

    python tools/check_prose.py [--summary] [PATH ...]

Prints `file:line: problem` for each problem and exits with status 1 if there is any, or with 2 if a
path is no Python file, page or directory. Without paths it checks the package. `--summary` prints
the number of problems of each package instead.
"""

import argparse
import ast
import collections
import inspect
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

_ROOT = pathlib.Path(__file__).parents[1]
_SUFFIXES = (".py", ".md")

# Openings of a noun clause or of a prepositional phrase, which leave the subject out.
_BAD_OPENINGS = frozenset(
    """What Whether Of Those How Where When See Why Which That Whose Who As With For It Its Also
    Both Said There Nothing Likewise From By In On Up Until Over Without Not""".split()
)
# Verbs that could be taken for plural nouns; they count as verbs unless a preposition follows.
_AMBIGUOUS = frozenset(
    """addresses blocks breaks caches copies counts cuts ends forces forecasts forks groups
    guards heads hooks indents indexes keys labels limits links lists locks logs loops
    maps marks masks measures models names nests orders packs pads pages parts patches
    plans plots points pools prompts proxies queries questions races records requests
    rests results rolls rows samples scales scatters scores sets shapes shares shards
    shifts signals slices slots sources spans splits states steps stops streams sums
    sweeps tags tests tiles times tokens traces trees types uses values views walks
    weights windows words works""".split()
)
# Words in -s that are no verbs.
_NOUNS = frozenset(
    """args arguments arrays axes batches bars bits bytes cells choices columns commands chunks
    cycles devices dtypes entries examples facts features figures gradients headers ids
    keywords lanes layers lengths lines logits messages milliseconds numbers operations
    options outputs pairs paths positions problems processes products prompts scalars
    scratches seconds sentences sequences series sizes strings tensors texts this tokens
    us vectors words always less its is was as thus yes plus""".split()
)
_PREPOSITION = re.compile(
    r"(of|in|that|for|with|from|at|on|by|per|which|between|over|and|or|under|are|is|to)\b"
)
_SENTENCES = re.compile(r"(?<!e\.g)(?<!i\.e)(?<! vs)(?<! al)(?<!\bNo)[.!?] +[A-Z`]")
_SECTIONS = re.compile(r"(Args|Arguments|Returns|Yields|Attributes|Raises):$")
_DTYPE = r"(bool|u?int\d+|b?float\d+|(numpy|jax|jnp|np)\.\w+)\b"
_ENTRY = re.compile(r"(\*{0,2}\w[\w.*]*(?:, \*{0,2}\w[\w.*]*| … \w+)*)(?: \([^)]*\))?: (.*)")
_GOOD_ENTRY = re.compile(rf"""[A-ZΑ-Ωτ0-9`'"“(\[{{<≤≥±\-]|{_DTYPE}|\w+ ({_DTYPE}|\[)""")
# References to a neighboring entry, which a reader of a single entry cannot resolve.
_BARE_ENTRY = re.compile(
    r"(of )?(both|the same|as (it is|they are)|\w)\.?$|.*\b(likewise|theirs|see there)\b"
    r"|.*\bof both([.,;]|$)",
    re.IGNORECASE,
)
# Openings of a heading that is a noun clause: "What is not finite ends the run".
_BAD_HEADING = re.compile(r"(What|Whether|Which|Those|Of|That|Whose|Who)\b")
_HEADING = re.compile(r"(#+) +(.*)")
# Turns of phrase that style.md replaces by the field's words or by a plain statement.
_HOUSE_WORDS = re.compile(
    r"""\b(hangs?\ on(?!\ to)|whoever|whomever|dearer|dearest|nobody(\ \w+)?\ asked|nobody\ asks
    |(is|are|was|were)\ told\b|nothing\ asked\ for|own\ affair
    |amid|hitherto|thereof|in\ vain|to\ the\ bit|is\ none\ of
    |refused\ (drafts?|rows?|tokens?)|(drafts?|tokens?)\ (is|are|was|were)\ refused
    |is\ the\ caller's|as\ full\ citizens|the\ file\ says|speak(s|ing)?\ of\ it)\b""",
    re.IGNORECASE | re.VERBOSE,
)


class Problem(NamedTuple):
    """Problem in the prose of a file.

    Attributes:
      path: File.
      line: Line number, from 1.
      text: Description of the problem.
    """

    path: pathlib.Path
    line: int
    text: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.text}"


def _is_verb(word: str, after: str) -> bool:
    """Returns whether a summary's first word is a verb in the third person.

    Args:
      word: First word, without punctuation.
      after: Rest of the summary.
    """
    word = word.lower()
    if not word.endswith("s") or (word in _NOUNS and word not in _AMBIGUOUS):
        return False
    return not _PREPOSITION.match(after) if word in _AMBIGUOUS else word.isalpha()


def _summary_problems(summary: str, *, needs_verb: bool) -> Iterator[str]:
    """Yields the problems of a docstring's first line."""
    if not summary:
        yield "the docstring starts with an empty line"
        return
    if not (summary[0].isupper() or summary[0] in "`τ"):
        yield f"the summary starts with {summary.split()[0]!r}, not with a capital letter"
    if not summary.endswith("."):
        yield "the summary line does not end with a period"
    if _SENTENCES.search(summary):
        yield "the summary line has more than one sentence"
    first, _, after = summary.partition(" ")
    word = first.strip(",.:;")
    if word in _BAD_OPENINGS:
        yield f"the summary starts with {word!r}, which leaves its subject out"
    elif needs_verb:
        if word.endswith("ly"):  # an adverb: "Lazily reads"
            word, _, after = after.partition(" ")
        if not _is_verb(word.strip(",.:;"), after):
            yield f"the summary starts with {word!r}, not with a verb such as 'Returns'"


def _entry_problem(name: str, text: str) -> str | None:
    """Returns the problem of an entry's description, or None."""
    if _BARE_ENTRY.match(text):
        return f"{name}: {text!r} does not stand alone"
    if text and not _GOOD_ENTRY.match(text):
        return f"{name}: {text.split()[0]!r} does not start with a capital letter"
    return None


def _entry_problems(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields (index of the line, problem) of the entries of a docstring's sections."""
    section, margin, is_first = None, 0, False
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        if not line.startswith(" "):
            found = _SECTIONS.match(line)
            section, margin, is_first = found and found[1], 0, True
            continue
        if section is None:
            continue
        indent = len(line) - len(line.lstrip())
        margin = margin or indent
        text, entry = line.strip(), _ENTRY.match(line.strip())
        problem = None
        if indent == margin and entry:
            problem = _entry_problem(entry[1], entry[2])
        elif is_first and section in ("Returns", "Yields"):
            problem = _entry_problem(section, text)
        is_first = False
        if problem:
            yield i, problem


def _decorators(node: ast.AST) -> set[str]:
    """Returns the last parts of the names of a definition's decorators."""
    found = getattr(node, "decorator_list", [])
    return {ast.unparse(d).split("(")[0].rpartition(".")[2] for d in found}


def _docstring_problems(path: pathlib.Path, tree: ast.Module) -> Iterator[Problem]:
    """Yields the problems of all docstrings of a module."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, *functions)):
            continue
        docstring = ast.get_docstring(node, clean=False)
        if docstring is None:
            continue
        start = node.body[0].lineno
        lines = inspect.cleandoc(docstring).splitlines() or [""]
        needs_verb = (
            isinstance(node, functions)
            and not node.name.startswith("test_")
            and not _decorators(node) & {"property", "cached_property", "setter", "fixture"}
        )
        for text in _summary_problems(lines[0], needs_verb=needs_verb):
            yield Problem(path, start, text)
        for i, text in _entry_problems(lines):
            yield Problem(path, start + i, text)


def _word_problems(path: pathlib.Path) -> Iterator[Problem]:
    """Yields the house words in the comments and strings of a file."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
                for i, line in enumerate(token.string.splitlines()):
                    for found in _HOUSE_WORDS.finditer(line):
                        text = f"{found[0]!r} is not in the field's vocabulary"
                        yield Problem(path, token.start[0] + i, text)


def _prose_lines(page: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, line) of a page's prose.

    Left out are code blocks, inline code, comments, and the front matter of a model card.
    """
    lines = page.splitlines()
    first = lines.index("---", 1) + 1 if lines[:1] == ["---"] and "---" in lines[1:] else 0
    in_code = False
    for i, line in enumerate(lines[first:], first + 1):
        if line.startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith(("    ", "<!--", ":::")):
            yield i, re.sub(r"`[^`]*`", "``", line)


def _page_problems(path: pathlib.Path) -> Iterator[Problem]:
    """Yields the problems of a Markdown page: title, opening sentence, headings and words."""
    lines = [(i, line) for i, line in _prose_lines(path.read_text(encoding="utf-8"))]
    filled = [(i, line) for i, line in lines if line.strip()]
    if not filled or not filled[0][1].startswith("# "):
        yield Problem(path, 1, "the page does not start with a title, '# …'")
    elif len(filled) == 1 or not re.match(r"[A-Z`*]", filled[1][1]):
        yield Problem(path, filled[0][0], "no sentence follows the title")
    elif path.parent.name == "results":
        start = filled[1][0]
        end = next((i for i, line in lines if i > start and not line.strip()), start + 1)
        opening = " ".join(line for i, line in lines if start <= i < end)
        if not re.search(r"\d", opening):
            yield Problem(path, start, "the first paragraph of a results page has no figure")
    for i, line in lines:
        heading = _HEADING.match(line)
        if heading and _BAD_HEADING.match(heading[2]):
            yield Problem(path, i, f"the heading {heading[2]!r} is a noun clause")
        for found in _HOUSE_WORDS.finditer(line):
            yield Problem(path, i, f"{found[0]!r} is not in the field's vocabulary")


def problems(path: pathlib.Path) -> list[Problem]:
    """Returns the problems of a Python file or page, in the order of its lines."""
    if path.suffix == ".md":
        return sorted(_page_problems(path))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sorted([*_docstring_problems(path, tree), *_word_problems(path)])


def files(paths: list[pathlib.Path]) -> Iterator[pathlib.Path]:
    """Yields the Python files and pages at or below paths.

    Raises:
      ValueError: A path is neither a directory nor a Python file or page.
    """
    for path in paths:
        if path.is_dir():
            yield from sorted([*path.rglob("*.py"), *path.rglob("*.md")])
        elif path.is_file() and path.suffix in _SUFFIXES:
            yield path
        else:
            raise ValueError(f"{path}: expected a directory, or a file ending in .py or .md")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=pathlib.Path, default=[_ROOT / "dflash"])
    parser.add_argument("--summary", action="store_true", help="print counts per package")
    options = parser.parse_args(arguments)
    try:
        found = [problem for path in files(options.paths) for problem in problems(path)]
    except ValueError as error:
        parser.error(str(error))
    if options.summary:
        counts = collections.Counter(str(problem.path.parent) for problem in found)
        for package, count in sorted(counts.items()):
            print(f"{count:5d}  {package}")
        print(f"{len(found):5d}  in all")
    else:
        for problem in found:
            print(problem)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
