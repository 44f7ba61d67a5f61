"""The pages say what is so, and their commands work as they are printed.

tests/shown_commands.txt lists every command of README.md, docs/ and `--help`, and how it is tested.
"""

import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import unicodedata
from collections.abc import Iterator

import pytest
from support import TESTS, scripts, shown_commands
from support.reduced_recipes import REDUCED, TARGET, TRAINING

from dflash.cli import declaration
from dflash.cli.commands import COMMANDS

ROOT = TESTS.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TABLE = TESTS / "shown_commands.txt"
# A block of shell commands, a command in an indented block, or what installs extras.
TABLE_ROW = re.compile(r"^\|.*$", re.MULTILINE)
SHOWN = re.compile(
    r"^```sh\n(?P<block>.*?)^```|^    +(?P<line>dflash (?![^\n]*\[-)[^\n]*)$|"
    r"pip\s+install\s+'(?:\.|dflash-jax)\[(?P<extras>[a-z,]+)\]'",
    re.DOTALL | re.MULTILINE,
)
SMALL = {
    "decode": (*TARGET, "decode.batch_size=8", "decode.max_new_tokens=8", "dtype=float32"),
    "train": (*TARGET, *TRAINING, *REDUCED["qwen3_4b_dflash"], "mesh.fsdp=1"),
}


def shown_on(text: str) -> Iterator[tuple[str, str]]:
    """Yields ("extras", names) and ("command", command line) of a page, in order."""
    for match in SHOWN.finditer(TABLE_ROW.sub("", text).replace("\\\n", " ")):
        if match["extras"]:
            yield "extras", match["extras"]
        for line in (match["block"] or match["line"] or "").splitlines():
            for part in line.split(" && "):
                words = shlex.split(part, comments=True)
                if words[:2] == ["pip", "install"]:
                    yield from (("extras", names) for names in re.findall(r"\[(.*)\]", words[2]))
                elif words[:1] == ["dflash"]:
                    yield "command", shlex.join(words)


def help_of(name: str) -> str:
    """Returns what `dflash NAME --help` shows, its examples as an indented block."""
    spec = importlib.import_module(COMMANDS[name][0]).SUBCOMMAND
    return declaration.help_text(spec, spec.flag_values())


def commands_shown() -> Iterator[tuple[str, frozenset[str], str]]:
    """Yields (page, extras that it has named so far, command)."""
    texts = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
    texts |= {
        f"{name} --help": re.sub(r"^  ", "    ", help_of(name), flags=re.M) for name in COMMANDS
    }
    for page, text in texts.items():
        extras = frozenset()
        for kind, shown in shown_on(text):
            if kind == "extras":
                extras |= set(shown.split(","))
            else:
                yield page, extras, shown


def treatments() -> dict[str, tuple[str, list[str]]]:
    """Returns the table: (run, slow or not; added arguments) by command."""
    table, heading = {}, ("", [])
    for line in TABLE.read_text().splitlines():
        if line.startswith("    "):
            table[line.strip()] = heading
        elif line and line[0] != "#":
            way, _, rest = line.partition(" ")
            assert way in ("run", "slow", "not:")
            heading = way, shlex.split(rest)
    return table


TREATMENTS = treatments()


def form_of(command: str, *, slow: bool) -> tuple[str, list[str]] | None:
    """Returns the module and the arguments that test a command; None if nothing can."""
    name, *arguments = shlex.split(command)[1:]
    way, added = TREATMENTS.get(command, ("not:", []))
    module = COMMANDS[name][0]
    if way == "run" or (way == "slow" and slow):
        sizes = [word for each in added for word in (SMALL[name] if each == "small" else [each])]
        return module, [*arguments, *sizes]
    form = any(word.isupper() for word in arguments) or arguments[0] == "mine.yml"
    if form or "repeat" in command or not importlib.import_module(module).SUBCOMMAND.takes_config:
        return None
    return module, [*arguments, "--print_config"]


def pages_by_extras(*, slow: bool) -> dict[str, dict[str, list]]:
    """Returns the tested commands of each page, by the extras that it has named before them.

    A command that several pages show is tested once, unless a later page names fewer extras.
    """
    environments: dict[str, dict[str, list]] = {}
    tested = []
    for page, extras, command in commands_shown():
        if page.endswith("--help") and TREATMENTS.get(command, ("",))[0] != "run" and not slow:
            continue  # tests/cli/test_commands.py loads the configs of these examples.
        form = form_of(command, slow=slow)
        if form and "--print_config" in form[1]:
            extras = frozenset()  # Configs are read without any, in one process.
        if form and not any(form == other and fewer <= extras for other, fewer in tested):
            tested.append((form, extras))
            name = ",".join(sorted(extras)) or "none"
            environments.setdefault(name, {}).setdefault(page, []).append(form)
    return environments


ENVIRONMENTS = [
    pytest.param(name, pages, id=f"{name}-{'slow' if slow else 'quick'}")
    for slow in (False, True)
    for name, pages in pages_by_extras(slow=slow).items()
]


def test_the_table_lists_the_commands_of_the_pages():
    assert {command for _, _, command in commands_shown()} == set(TREATMENTS)


@pytest.mark.parametrize(("extras", "pages"), ENVIRONMENTS)
def test_the_commands_of_pages_work(extras, pages, tmp_path):
    """The blocks of a page share a directory, and have the extras that it has named before them."""
    commands = []
    for number, forms in enumerate(pages.values()):
        directory = tmp_path / str(number)
        directory.mkdir()
        # Pages call the user's own prompts so.
        questions = [json.dumps({"prompt": f"Count from {n} to {n + 9}."}) for n in range(24)]
        for name in ("questions", "q", "p"):
            (directory / f"{name}.jsonl").write_text("\n".join(questions))
        commands += [(str(directory), *form) for form in forms]
    names = [] if extras == "none" else extras.split(",")
    job = {"hidden": shown_commands.hidden_modules(names), "commands": commands}
    (tmp_path / "job.json").write_text(json.dumps(job))
    child = [sys.executable, "-P", shown_commands.__file__, tmp_path / "job.json"]
    done = subprocess.run(child, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert re.search(rf"\b{re.escape(name)}$", navigation, re.MULTILINE), f"{name} is missing"


def test_the_reference_is_that_of_the_declarations():
    """`python tools/write_keys.py` writes it; every command is there, every key has a meaning."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert page == scripts.load("tools/write_keys.py").page()
    assert set(COMMANDS) <= set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
    keys = page.partition("\n## Keys\n")[2]
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) \|", keys, re.MULTILINE)
    assert len(rows) > 120
    bare = re.compile(r"(One of .*|At \w+ \S+|\S+ to \S+|A number, or .*)?")
    assert [key for key, meaning in rows if bare.fullmatch(meaning)] == []


def test_lines_of_code_fit_the_page():
    """The site shows about a hundred characters of a code block."""
    for page in PAGES:
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
        for block in (text for kind, text in blocks if kind != "mermaid"):
            long = [line for line in block.splitlines() if len(line) > 100]
            assert long == [], page.name


def anchor_of(heading: str) -> str:
    """Returns the anchor that the site gives a heading; letters beyond ASCII, as τ, are dropped."""
    ascii_only = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", ascii_only).strip().lower())


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
            found = page.parent / target if target else page
            assert found.exists(), f"{page.relative_to(ROOT)} links to {target}"
            if anchor and found.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
                assert anchor in map(anchor_of, headings), f"{page.name}: {target}#{anchor}"


def documented_functions():
    """Yields every function and method whose signature docs/api.md shows."""
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for path in re.findall(r"^::: (\S+)$", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        documented = getattr(importlib.import_module(module), name)
        inside = vars(documented).values() if inspect.isclass(documented) else [documented]
        yield from filter(inspect.isfunction, inside)


def test_documented_arguments_are_those_of_the_signature():
    """The site's builder rejects an entry for several arguments together."""
    checked = 0
    for function in documented_functions():
        section = re.search(
            r"\n +Args:\n(.*?)(?:\n +[A-Z]\w+:\n|$)", function.__doc__ or "", re.DOTALL
        )
        lines = section[1].splitlines() if section else []
        depth = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
        for line in lines:
            if re.match(rf" {{{depth}}}\S", line):
                name = line.partition(":")[0].strip().lstrip("*")
                assert name in inspect.signature(function).parameters, (function, line)
                checked += 1
    assert checked > 10
