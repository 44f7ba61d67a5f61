import dataclasses
import os
import subprocess
import sys
import textwrap
import types

import pytest
from absl import flags
from support import exit_status

from dflash import errors, train
from dflash.cli import processes as together
from dflash.cli import subcommand as cli
from dflash.config import loader, schema

SUBCOMMAND = cli.Subcommand(
    "decode", "Decodes prompts.", schema=schema.DecodeRun, examples=("dflash decode c.yml",),
    shared=(*(flag for flag in cli.RUN_FLAGS if flag != "compilation_cache"), "stream"),
)  # fmt: skip
CONFIG = "target: {checkpoint: random, name: qwen3}\nbase: [models/qwen3_4b.yml]\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs an entry point; returns (exit status, stdout, stderr, commands that reached it)."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text(CONFIG)

    def run_with(*argv, main=lambda command: None, define_flags=lambda values: None):
        commands = []

        def record(command):
            commands.append(command)
            return main(command)

        given = dataclasses.replace(SUBCOMMAND, define_flags=define_flags), record
        status = exit_status(lambda arguments: cli.run(*given, arguments), *argv)
        return status, *capsys.readouterr(), commands

    return run_with


def fail(error):
    def main(command):
        raise error

    return main


def test_flags_may_stand_anywhere(run):
    status, _, _, commands = run(
        "--workdir=w", "c.yml", "--dry_run", "decode.seed=3", "--process_id", "1", "mesh.tensor=2",
        "--num_processes=2", "--coordinator_address", "host:1", "--profile_dir=p", "--nostream",
    )  # fmt: skip
    config = loader.load("c.yml", ["decode.seed=3", "mesh.tensor=2"])
    given = {"config_path": "c.yml", "overrides": ("decode.seed=3", "mesh.tensor=2")}
    flags = {"workdir": "w", "dry_run": True, "profile_dir": "p", "stream": False}
    assert (status, commands) == (0, [cli.Command(config=config, **given, **flags)])


def test_flags_are_optional_and_do_not_linger(run):
    run("c.yml", "--workdir=w", "--dry_run", "--nostream")
    command = run("c.yml")[3][0]
    assert (command.workdir, command.profile_dir) == (None, None)
    assert (command.dry_run, command.stream) == (False, True)


def test_an_entry_point_has_flags_of_its_own(run):
    def define(values):
        flags.DEFINE_integer("index", None, "Which one.", flag_values=values)

    assert run("c.yml", define_flags=define)[3][0].flags == {"index": None}
    assert run("c.yml", "--index=3", define_flags=define)[3][0].flags == {"index": 3}
    assert "\n  --index               Which one.\n" in run("--help", define_flags=define)[1]
    assert run("c.yml", "--index=3")[2].startswith("error: unknown flag --index; ")


def test_print_config_prints_what_loads_again(run, tmp_path):
    status, out, err, commands = run("c.yml", "decode.seed=3", "--print_config")
    assert (status, err, commands) == (0, "", [])
    (tmp_path / "again.yml").write_text(out)
    assert loader.load("again.yml") == loader.load("c.yml", ["decode.seed=3"])


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_flag(run, flag):
    status, out, err, commands = run(flag)
    assert (status, err, commands) == (0, "", [])
    assert out.startswith("Decodes prompts.\n\nusage: dflash decode CONFIG [key=value")
    assert "\nexamples:\n  dflash decode c.yml\n" in out
    assert max(map(len, out.splitlines())) <= 80
    for name in (
        "workdir", "dry_run", "print_config", "profile_dir", "coordinator_address",
        "num_processes", "process_id", "[no]stream", "help",
    ):  # fmt: skip
        assert f"\n  --{name} " in out


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (["--dry-run", "--noflow", "c.yml"], [
            "unknown flag --dry-run; did you mean '--dry_run'?",
            "unknown flag --noflow; expected one of --coordinator_address, --dry_run, --help, "
            "--num_processes, --print_config, --process_id, --profile_dir, --stream, --workdir",
        ]),
        (["c.yml", "other.yml", "decode.sead=1"], [
            "command line: 'other.yml': expected key=value",
            "command line: decode.sead: unknown key; did you mean 'decode.seed'?",
        ]),
        (["c.yml", "--", "--workdir=x"], [
            "command line: --workdir: unknown key; expected one of target, drafter, decode, "
            "prompts, mesh, sharding_rules, dtype",
        ]),
    ],
)  # fmt: skip
def test_wrong_usage_is_one_line_each(run, argv, lines):
    status, out, err, commands = run(*argv)
    assert (status, out, commands) == (2, "", [])
    assert err == "".join(f"error: {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("error", "status", "stderr"),
    [
        (errors.ConfigError("one", "two"), 2, "error: one\nerror: two\n"),
        (errors.InputError("p.jsonl:3: no prompt"), 2, "error: p.jsonl:3: no prompt\n"),
        (errors.CheckpointError("truncated"), 2, "error: truncated\n"),
        (errors.WorkdirError("denied"), 1, "error: denied\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_errors_leave_with_their_own_status(run, error, status, stderr):
    assert run("c.yml", main=fail(error))[:3] == (status, "", stderr)


def test_a_defect_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yml").write_text(CONFIG)
    with pytest.raises(ZeroDivisionError):
        cli.run(SUBCOMMAND, lambda command: 1 // 0, ["c.yml"])


def test_the_status_of_main_is_the_exit_status(run):
    assert run("c.yml", main=lambda command: 3)[0] == 3


def in_process(code, tmp_path):
    added = {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": ""}
    environment = os.environ | added
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], cwd=tmp_path, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("work", "first_line"),
    [
        ("for number in range(100000): print(number)", "0"),
        # Python writes its buffered output at exit, when the reader has closed the pipe.
        ("print('ready', flush=True); wait(); print('late')", "ready"),
    ],
)
def test_a_reader_that_leaves_early_is_no_error(tmp_path, work, first_line):
    (tmp_path / "c.yml").write_text(CONFIG)
    code = f"""
    import os
    from dflash.cli import subcommand as cli
    from dflash.config.schema import DecodeRun

    def wait():
        while not os.path.exists("closed"):
            pass

    def main(command):
        {work}

    cli.run(cli.Subcommand("x", "", schema=DecodeRun), main, ["c.yml"])
    """
    process = in_process(code, tmp_path)
    assert process.stdout.readline() == f"{first_line}\n"
    process.stdout.close()
    (tmp_path / "closed").touch()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(timeout=300) == 141


@pytest.fixture
def one_of_two(monkeypatch):
    """Makes `--process_id` count without another process."""
    compared = []

    def join(given, work):
        compare = types.SimpleNamespace(process=given[2], check_same=compared.append)
        return work(compare)

    monkeypatch.setattr(together, "run", join)
    return compared


def test_of_several_processes_the_first_alone_needs_a_place_to_write(run, one_of_two):
    processes = ("c.yml", "--workdir=c.yml/w", "--num_processes=2", "--coordinator_address=h:1")
    assert run(*processes, "--process_id=1")[0] == 0
    assert [{*facts} & {"jax", "decode.seed", "devices of a process"} for facts in one_of_two] == [
        {"jax", "decode.seed"},
        {"devices of a process"},
    ]
    assert run(*processes, "--process_id=0")[:3:2] == (
        1,
        "error: c.yml/w: cannot be written: Not a directory\n",
    )


@pytest.mark.parametrize(
    "given",
    [
        {"workdir": "foo://b/w"}, {"compilation_cache": "foo://b/w"}, "data.files=[foo://b/w]",
        "target.checkpoint=foo://b/w", "tokenizer=foo://b/w", {"profile_dir": "gs://b/w"},
        "data.data_dir=gs://b/w", "data.raw_dir=gs://b/w",
    ],
)  # fmt: skip
def test_a_url_is_no_directory(tmp_path, given):
    """Buckets of unknown schemes, or in place of a disk, must not become local directories."""
    config = tmp_path / "c.yml"
    more = ("task: target", "train: {steps: 1}", f"data: {{files: [{config}]}}")
    config.write_text(CONFIG + "\n".join(more))
    flags = given if isinstance(given, dict) else {}
    overrides = () if flags else (given,)
    refused = "foo://b/w: unknown kind of path|gs://b/w: must be on a file system"
    with pytest.raises(errors.ConfigError, match=refused):
        cli.parse(train.SUBCOMMAND, config, *overrides, **flags)
