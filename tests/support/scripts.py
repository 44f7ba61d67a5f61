"""Python files outside the package, such as tools and examples, as modules."""

import importlib.util
import pathlib
import sys
from types import ModuleType

_ROOT = pathlib.Path(__file__).parents[2]


def load(path: str) -> ModuleType:
    """The module of a file, given its path from the root of the repository."""
    file = _ROOT / path
    spec = importlib.util.spec_from_file_location(f"script_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up.
    spec.loader.exec_module(module)
    return module
