"""The commands of README.md and docs/ work as they are printed.

A block of shell commands is run, command by command, in an empty directory that the page's blocks
share. A comment before the block says otherwise:

    <!-- test: decode.max_new_tokens=8 -->      run, with these arguments added to each command
    <!-- test: on a tiny target -->             run, with models and steps of a size for tests
    <!-- needs: 9 GB of downloads -->           not run; its configs, keys and flags are checked

Pages show the form of a command in indented blocks, which are not collected.
"""

import importlib
import inspect
import json
import pathlib
import re
import shlex

import pytest
from support import scripts
from support.reduced_recipes import REDUCED, TARGET, TRAINING

from dflash.cli.commands import COMMANDS

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>test|needs): (?P<detail>[^\n]+?) -->\n)?```sh\n(?P<lines>.*?)```", re.DOTALL
)
# What .ci/run does, or what makes no sense within a test.
ELSEWHERE = (
    *("pip", "pytest", "mkdocs", "source", "gcloud", "ssh", "mkdir", "cp", "export", "curl"),
    "llama-server",
)

SMALL = "on a tiny target"
ON_A_TINY_TARGET = {
    "dflash.decode": (
        *TARGET,
        "decode.batch_size=8",
        "decode.max_new_tokens=8",
        "dtype=float32",
    ),
    "dflash.train": (*TARGET, *TRAINING, *REDUCED["qwen3_4b_dflash"], "mesh.fsdp=1"),
}


def commands_of(page: pathlib.Path):
    """Yields (mark, detail, arguments) of each command of a page, in order."""
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        for line in block["lines"].replace("\\\n", " ").splitlines():
            for part in line.split(" && "):
                arguments = shlex.split(part, comments=True)
                if arguments:
                    yield block["mark"], block["detail"], arguments


def dflash_command(arguments: list[str]) -> tuple[str, list[str]] | None:
    """(entry point, its arguments) of a command line; None for a script, or one of ELSEWHERE."""
    if arguments[:2] == ["python", "-m"]:
        arguments = arguments[2:]
    program, *rest = arguments
    if program == "python" and (ROOT / rest[0]).is_file():
        return None
    if program == "dflash":
        return f"dflash.{rest[0]}", rest[1:]
    if program.startswith("dflash."):
        return program, rest
    assert program in ELSEWHERE, f"no rule for {shlex.join(arguments)}"
    return None


def status_of(module: str, arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(module).main(arguments)
    return caught.value.code or 0


def added_arguments(module: str, mark: str | None, detail: str | None) -> list[str]:
    if mark == "needs":
        return ["--print_config"]
    words = shlex.split((detail or "").removeprefix(SMALL))
    return [*ON_A_TINY_TARGET[module], *words] if (detail or "").startswith(SMALL) else words


def takes_a_config(module: str) -> bool:
    return module != "dflash.convert"


PAGES_WITH_COMMANDS = [page for page in PAGES if any(commands_of(page))]


@pytest.mark.parametrize(
    "page", PAGES_WITH_COMMANDS, ids=[str(page.relative_to(ROOT)) for page in PAGES_WITH_COMMANDS]
)
def test_the_commands_of_a_page_work(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    # Pages call the user's own prompts so.
    questions = [json.dumps({"prompt": f"Count from {n} to {n + 9}."}) for n in range(24)]
    pathlib.Path("questions.jsonl").write_text("\n".join(questions))
    for mark, detail, arguments in commands_of(page):
        command = dflash_command(arguments)
        if command is None:
            continue
        module, given = command
        if mark == "needs" and not takes_a_config(module):
            continue
        added = added_arguments(module, mark, detail)
        status = status_of(module, [*given, *added])
        assert status == 0, f"{shlex.join([*arguments, *added])}\n{capfd.readouterr().err[-2000:]}"


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
    """Returns the anchor that the site gives a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


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
