"""Modules, classes and functions of the standard library of Python, read from source.

No module is imported or run. All modules of a package are in the same split, and so are a module
and the pure-Python fallback of its C implementation (`decimal` and `_pydecimal`).
"""

import ast
import dataclasses
import pathlib
import sysconfig
from collections.abc import Iterator

from dflash.data.example import Split, split_of

# Tests, tables, and packages that a distribution may omit or add.
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
_SALT = "m/"  # gives each held-out split 4 to 8 % of the documented functions


@dataclasses.dataclass(frozen=True)
class Module:
    """Module of the standard library.

    Attributes:
      name: Dotted name.
      lines: Lines of the source.
      tree: Syntax tree.
    """

    name: str
    lines: tuple[str, ...]
    tree: ast.Module

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.name.split("."))


@dataclasses.dataclass(frozen=True)
class Definition:
    """Function or class at the top level of a module, or method of such a class.

    Attributes:
      module: Module that contains the definition.
      node: Syntax tree of the definition.
      owner: Class that contains the method; None at the top level.
    """

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    owner: ast.ClassDef | None

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    @property
    def name(self) -> str:
        """Name within the module, such as "TextWrapper.wrap"."""
        return f"{self.owner.name}.{self.node.name}" if self.owner else self.node.name

    @property
    def is_public(self) -> bool:
        names = self.name.split(".")
        return self.module.is_public and not any(name.startswith("_") for name in names)

    @property
    def docstring(self) -> str:
        """Docstring without indentation; empty if there is none."""
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
    """Returns the unit that is assigned to a split: the top-level package without `_py` or `_`."""
    name = module.partition(".")[0]
    for prefix in _TWIN_PREFIXES:
        name = name.removeprefix(prefix) or name
    return name


def definitions(module: Module) -> Iterator[Definition]:
    """Yields the functions and classes of a module, and the methods of its classes."""
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            yield Definition(module, node, None)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield Definition(module, inner, node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Definition(module, node, None)


def first_paragraph(text: str) -> str:
    """Returns the text up to the first blank line, joined into one line."""
    return " ".join(text.partition("\n\n")[0].split())
