"""The `dflash` command: which subcommands there are, and that help is right and instant."""

import importlib
import shlex
import subprocess
import sys

import pytest
from support import run_python

from dflash import __main__ as program
from dflash.cli import subcommand as cli
from dflash.cli.commands import COMMANDS
from dflash.config import loader
from dflash.version import __version__

NAMES = list(COMMANDS)


def subcommand(name) -> cli.Subcommand:
    return importlib.import_module(COMMANDS[name][0]).SUBCOMMAND


def run(capsys, *argv):
    try:
        status = program.main(argv)
    except SystemExit as caught:
        status = caught.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_subcommand(capsys, argv):
    status, out, err = run(capsys, *argv)
    assert (status, err) == (0, "")
    assert all(f"\n  {name} " in out and COMMANDS[name][1] in out for name in NAMES)
    assert max(map(len, out.splitlines())) <= 80


def test_help_imports_nothing_heavy():
    code = """
    import sys
    before = set(sys.modules)
    from dflash.__main__ import main
    main(["--help"])
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    print(new - {"dflash", *sys.stdlib_module_names}, "dflash.config" in sys.modules)
    """
    done = run_python(code, check=True)
    assert done.stdout.splitlines()[-1] == "set() False"


def test_without_a_command_there_is_help_on_stderr(capsys):
    status, out, err = run(capsys)
    assert (status, out) == (2, "")
    assert err == f"{program.help_text()}\n"


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"dflash {__version__}\n", "")


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["decod"], "decod: no such command; did you mean 'decode'?"),
        (["train_tokenizer", "w"], "train_tokenizer: was removed; use experiments/tiny_family of "
         "the repository (see docs/results/tried_and_removed.md)"),
        (["quux"], f"quux: no such command; expected one of {', '.join(NAMES)}"),
        (["configs/tiny_dflash.yml", "decode.seed=1"],
         "configs/tiny_dflash.yml: a config, where a command is expected; did you mean "
         "'dflash decode configs/tiny_dflash.yml decode.seed=1'?"),
    ],
)  # fmt: skip
def test_an_unknown_command_is_one_line(capsys, argv, line):
    assert run(capsys, *argv) == (2, "", f"error: {line}\n")


@pytest.mark.parametrize("name", NAMES)
def test_every_subcommand_has_help_of_its_own(capsys, name):
    status, out, err = run(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert run(capsys, "help", name) == (0, out, "")
    spec = subcommand(name)
    assert spec.name == name
    assert f"\nusage: dflash {name} " in out
    assert max(map(len, out.splitlines())) <= 80
    flags = [flag for flag in spec.flag_values() if len(flag) > 1]
    assert all(f"\n  --{flag} " in out or f"\n  --[no]{flag} " in out for flag in flags)
    assert out.index("\nexamples:\n") < out.index("\nexit status: 0: done; ")


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_command_lines_that_parse(name, monkeypatch, tmp_path):
    """Examples with a config load it with their overrides, across comments and continued lines."""
    monkeypatch.chdir(tmp_path)
    spec = subcommand(name)
    for line in "\n".join(spec.examples).replace("\\\n", " ").splitlines():
        words = shlex.split(line.replace("<(", "").replace(")", ""), comments=True)
        at = words.index("dflash")
        assert words[at + 1] == name
        values = spec.flag_values()
        positional = cli._parse(spec, values, [word for word in words[at + 2 :] if word[0] != ">"])
        if spec.takes_config:
            path, *overrides = positional + spec.overrides(values)
            load = spec.load or (lambda *given: loader.load(*given, spec.schema))
            load(path, overrides)
        else:
            assert len(positional) >= len(spec.arguments)


def test_it_is_the_same_by_every_name(tmp_path):
    """`python -m dflash decode` is `python -m dflash.decode`."""
    said = [
        subprocess.run(
            [sys.executable, "-m", *start, "gone.yml"],
            capture_output=True, text=True, cwd=tmp_path, check=False,
        )
        for start in (["dflash", "decode"], ["dflash.decode"])
    ]  # fmt: skip
    assert [done.returncode for done in said] == [2, 2]
    assert [done.stderr for done in said] == ["error: gone.yml: no such file\n"] * 2
