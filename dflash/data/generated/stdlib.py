"""Reads Python's standard library: its modules, classes and functions, by their source alone.

Nothing is imported or run. What belongs together stays in one split: a package with all its
modules, and a module with its C-accelerated twin's fallback (`_pydecimal` goes with `decimal`).
"""

import ast
import dataclasses
import pathlib
import sysconfig
from collections.abc import Iterator

from dflash.data.example import Split, split_of

# Tests, tables, and what a distribution may leave out or add.
_SKIPPED = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idle_test",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_TWIN_PREFIXES = ("_py", "_")
_SALT = "m/"  # with it, each held-out split has 4 to 8 % of the documented functions


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of the library.

    Attributes:
      name: dotted.
      lines: of its source.
      tree: its syntax.
    """

    name: str
    lines: tuple[str, ...]
    tree: ast.Module

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))


@dataclasses.dataclass(frozen=True)
class Definition:
    """A function, or a class, at the top of a module or inside a class there.

    Attributes:
      module: the module that contains it.
      node: its syntax.
      owner: the class that contains it, or None.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: ast.ClassDef | None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def name(self) -> str:
        """Its name within the module, such as "TextWrapper.wrap"."""
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    @property
    def is_public(self) -> bool:
        names = self.name.split(".")
        return self.module.is_public and not any(name.startswith("_") for name in names)

    @property
    def docstring(self) -> str:
        """Its docstring with the indentation taken out; empty where there is none."""
        return (ast.get_docstring(self.node) or "").strip()


def modules(split: Split) -> Iterator[Module]:
    """Yields the modules of a split, in the order of their names."""
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if _SKIPPED.intersection(parts) or split_of(_SALT + source_of(parts[0])) != split:
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue  # a few files are templates, or in another encoding
        name = ".".join(part for part in parts if part != "__init__")
        yield Module(name, tuple(text.splitlines()), tree)


def source_of(module: str) -> str:
    """What splits are made by: the top package's name, without the marks of a twin."""
    name = module.partition(".")[0]
    for prefix in _TWIN_PREFIXES:
        name = name.removeprefix(prefix) or name
    return name


def definitions(module: Module) -> Iterator[Definition]:
    """Yields a module's functions and classes, and the functions of its classes."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            yield Definition(module, node, None)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Definition(module, inner, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Definition(module, node, None)


def first_paragraph(text: str) -> str:
    """The text up to its first blank line, in one line."""
    return " ".join(text.partition("\n\n")[0].split())
