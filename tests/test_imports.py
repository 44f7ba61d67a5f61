"""Tests of the structure: who may import whom, and what an import may do.

Imports go one way: errors, storage, config → {parallel, text} → runs → {kernels,
checkpoints} → {layers, data} → {models, drafters} → inference → {offline, serving, training} →
measure → compiler → distillation → entry points. A package may import whatever stands left of it,
and itself; packages in braces never import each other. Modules named `config.py` or `*_config.py`
in drafters, models and checkpoints count as config. dflash/__init__.py stands leftmost; what it
hands out on demand, it imports for type checkers alone.
"""

import ast
import functools
import importlib
import itertools
import json
import pathlib
import re
from collections.abc import Mapping

import pytest
import support

import dflash
from dflash.config import registry

ROOT = "dflash"
PACKAGE = pathlib.Path(dflash.__file__).parent
LEVELS = (
    {"", "version", "errors", "storage", "config", "assets"},  # "" is dflash/__init__.py
    {"parallel", "text"},
    {"runs"},
    {"kernels", "checkpoints"},
    {"layers", "data"},
    {"models", "drafters"},
    {"inference"},
    {"loading"},
    {"offline", "serving", "training"},
    {"measure"},
    {"compiler"},
    {"distillation"},
    {"sampling"},
    {"cli", "llm"},
    # entry points
    {
        *("__main__", "benchmark", "chat", "compile", "convert", "decode", "distill"),
        *("check", "doctor", "rl", "serve", "sweep", "train"),
    },
)
# Comparisons with words that only look like a strategy's or target's name: (module, word).
NAMESAKES = {("dflash.checkpoints.hf_config", "llama3")}  # a rope type of Hugging Face's
# Dataclasses of one strategy, one target family or one file format. They are read with a config, so
# they stand beside the code that they configure, but on the level of `config`.
# Modules that derive from the classes of an optional package, and so import it.
ADAPTERS = {"dflash.rl.rollout"}
CONFIG_MODULE = re.compile(r"dflash\.(drafters|models|checkpoints)\.(\w+\.)?(\w+_)?config")
LEVEL_OF = {name: level for level, names in enumerate(LEVELS) for name in names}
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def unit_of(module: str) -> str:
    """Returns the unit of LEVELS that a dotted name belongs to.

    It is the package or top module below dflash, except for the modules that CONFIG_MODULE matches:
    they belong to `config`.
    """
    return "config" if CONFIG_MODULE.fullmatch(module) else [*module.split("."), ""][1]


def _is_for_type_checkers(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", None) == "TYPE_CHECKING"


@functools.lru_cache(maxsize=1)
def nodes_of(source: str, *, is_root: bool = False) -> tuple[ast.AST, ...]:
    """Returns all nodes of a module; of the package itself, without those for type checkers."""
    tree = ast.parse(source)
    if is_root:
        tree.body = [node for node in tree.body if not _is_for_type_checkers(node)]
    return tuple(ast.walk(tree))


@functools.cache
def imported_modules(module: str, source: str, *, is_package: bool = False) -> set[str]:
    """Returns the dotted names under dflash that `source` imports anywhere, functions included."""
    found = set()
    for node in nodes_of(source, is_root=module == ROOT):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: None if is_package else -1]
                above = above[: len(above) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                # Names of the root package are its constants, unless they are units of LEVELS.
                is_module = full in MODULES or (base == ROOT and alias.name in LEVEL_OF)
                found.add(full if is_module else base)
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return {name for name in found if name == "dflash" or name.startswith("dflash.")}


@functools.cache
def modules_loaded_by_name(source: str) -> set[str]:
    """Returns the modules that `source` imports through the strings of the registry.

    A module that uses the `implementation` or the schema of a registry mapping may load those of
    all its entries; `load` of a plain mapping may load all of its references.
    """
    used = {node.attr for node in nodes_of(source) if isinstance(node, ast.Attribute)}
    used |= {"schema"} & {use.removeprefix("load_") for use in used}
    references: set[str] = set()
    for name in ("TARGETS", "DRAFTERS", "RUNS"):
        for field in ("implementation", "schema"):
            if {name, field} <= used:
                entries = getattr(registry, name).values()
                references.update(getattr(entry, field) for entry in entries)
    if re.search(r"load\(registry\.DATASETS\[", source):
        references.update(registry.DATASETS.values())
    if {"CONFIGS", "load"} <= used:
        references.update(itertools.chain(*registry.CONFIGS.values()))
    return {reference.partition(":")[0] for reference in references}


def import_circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Returns each group of modules that import one another, directly or through others."""
    reached = {module: _reachable(module, imports) for module in imports}
    groups = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in imports
    }
    return sorted(sorted(group) for group in groups if group)


def _reachable(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    new = list(imports[module])
    while new:
        name = new.pop()
        if name not in found:
            found.add(name)
            new += imports.get(name, ())
    return found


def layering_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Returns each import of `source` that goes the wrong way."""
    here = unit_of(module)
    problems = []
    imports = imported_modules(module, source, is_package=is_package)
    for imported in sorted(imports | modules_loaded_by_name(source)):
        there = unit_of(imported)
        if there not in LEVEL_OF:
            problems.append(f"{module} imports {imported}, which has no place in LEVELS")
        elif there != here and LEVEL_OF[there] >= max(LEVEL_OF[here], 1):
            problems.append(f"{module} imports {imported}")
    return problems


def strategy_forks(source: str, *, module: str = "") -> list[str]:
    """Returns each comparison of something with the name of a strategy or target."""
    names = {*registry.DRAFTERS, *registry.TARGETS}
    names -= {word for where, word in NAMESAKES if where == module}
    quoted = set(re.findall(r"""["'](\w+)["']""", source))  # Parsing takes seconds in all.
    found = []
    for node in nodes_of(source) if quoted.intersection(names) else ():
        constants = []
        if isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                several = isinstance(operand, ast.Tuple | ast.List | ast.Set)
                constants += operand.elts if several else [operand]
        elif isinstance(node, ast.MatchValue):
            constants = [node.value]
        for constant in constants:
            if isinstance(constant, ast.Constant) and constant.value in names:
                found.append(f"line {constant.lineno}: {constant.value!r}")
    return found


def test_layering():
    homeless = [module for module in MODULES if unit_of(module) not in LEVEL_OF]
    assert homeless == [], "give them a place in LEVELS"
    problems = []
    for module, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        problems += layering_violations(module, source, is_package=path.name == "__init__.py")
    assert problems == []


def test_the_package_imports_no_experiment():
    pattern = re.compile(r"^\s*(from|import) experiments\b", re.MULTILINE)
    assert [path for path in PACKAGE.rglob("*.py") if pattern.search(path.read_text())] == []


def test_no_import_circles():
    """Counts imports inside functions and those through the registry; not `from dflash import X`.

    The package itself hands out its API on demand, which commands do not use.
    """
    imports = {}
    for module, path in MODULES.items():
        source = path.read_text(encoding="utf-8")
        is_package = path.name == "__init__.py"
        names = imported_modules(module, source, is_package=is_package)
        imports[module] = (names | modules_loaded_by_name(source)) - {module, ROOT}
    assert import_circles(imports) == []


def test_import_circles_are_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"a", "e"}}
    assert import_circles(imports) == [["b", "c"], ["e"]]


def test_imports_by_name_are_found():
    source = "registry.load(registry.TARGETS[name].implementation)"
    assert "dflash.models.dense" in modules_loaded_by_name(source)
    assert modules_loaded_by_name("registry.TARGETS") == set()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("dflash.kernels.x", "import dflash.layers.mlp"),
        ("dflash.kernels.x", "from dflash import layers"),
        ("dflash.kernels.x", "def f():\n    from dflash.layers import mlp"),
        ("dflash.kernels.x", "from ..layers import mlp"),
        ("dflash.kernels.x", "from .. import layers"),
        ("dflash.kernels.x", "import importlib\nimportlib.import_module('dflash.layers.mlp')"),
        ("dflash.models.dense", "from dflash.drafters import none"),
        ("dflash.drafters.none", "from dflash.models import dense"),
        ("dflash.config.loader", "from dflash.parallel import sharding"),
        ("dflash.inference.engine", "from dflash import cli"),
        ("dflash.cli", "from dflash import decode"),
        ("dflash.train", "from dflash import decode"),
        ("dflash.decode", "import dflash.nonesuch.x"),
        ("dflash.drafters.mine_config", "from dflash.drafters import base"),
        ("dflash.models.mine_config", "from dflash.parallel import sharding"),
    ],
)
def test_wrong_ways_are_found(module, source):
    assert len(layering_violations(module, source)) == 1


def test_no_forks_on_names_outside_the_registry():
    forks = {
        module: found
        for module, path in MODULES.items()
        if module != "dflash.config.registry"
        and (found := strategy_forks(path.read_text(encoding="utf-8"), module=module))
    }
    assert forks == {}


@pytest.mark.parametrize(
    "source",
    [
        "if config.drafter.name == 'dflash': pass",
        "x = 'none' != name",
        "x = name in ('qwen3', 'other')",
        "match name:\n    case 'llama3':\n        pass",
        "match name:\n    case 'a' | 'llama3':\n        pass",
    ],
)
def test_forks_are_found(source):
    assert len(strategy_forks(source)) == 1


def run_python(code: str):
    """Runs `code` in a process of its own, and returns what it printed, as JSON."""
    done = support.run_python(code, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_reading_a_config_imports_no_array_library():
    """So that a bad config fails in milliseconds."""
    modules = [name for name in MODULES if LEVEL_OF.get(unit_of(name)) == 0]
    modules.append("dflash.cli.subcommand")
    loaded = run_python(
        f"""
        import importlib, json, sys
        for name in {modules}:
            importlib.import_module(name)
        print(json.dumps(sorted({{name.partition(".")[0] for name in sys.modules}})))
        """
    )
    assert "dflash" in loaded
    heavy = {"jax", "jaxlib", "flax", "orbax", "tensorflow", "tensorflow_datasets", "torch"}
    assert heavy.intersection(loaded) == set()


def test_imports_have_no_side_effects():
    """No flags, no settings, no environment, no devices; and nothing slow or optional."""
    report = run_python(
        f"""
        import importlib, json, logging, os, sys
        import flax.nnx, jax, orbax.checkpoint
        from absl import flags
        from jax._src import xla_bridge

        def state():
            config = {{key: repr(value) for key, value in jax.config.values.items()}}
            return dict(os.environ), config, repr(logging.getLogger().handlers), list(sys.path)

        before = state()
        for name in {[name for name in MODULES if name not in ADAPTERS]}:
            importlib.import_module(name)
        optional = ("torch", "transformers", "huggingface_hub", "tensorflow", "opentelemetry")
        optional += ("matplotlib",)  # Takes seconds.
        print(json.dumps({{
            "flags": [m for m in flags.FLAGS.flags_by_module_dict() if m.startswith("dflash")],
            "changed": [pair for pair in zip(before, state()) if pair[0] != pair[1]],
            "devices": xla_bridge.backends_are_initialized(),
            "optional": [name for name in optional if name in sys.modules],
        }}))
        """
    )
    assert report == {"flags": [], "changed": [], "devices": False, "optional": []}


ENTRIES = [*registry.DRAFTERS.values(), *registry.TARGETS.values(), *registry.RUNS.values()]
REFERENCES = {*(entry.implementation for entry in ENTRIES), *(entry.schema for entry in ENTRIES)}


@pytest.mark.parametrize("reference", sorted(REFERENCES | {*registry.DATASETS.values()}))
def test_the_registry_points_at_what_is_there(reference):
    assert registry.load(reference).__module__.startswith("dflash.")
    assert importlib.import_module(reference.partition(":")[0]).__name__ in MODULES
