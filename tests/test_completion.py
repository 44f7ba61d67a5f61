"""Tests of shell completion."""

import os
import shutil
import subprocess
import sys

import pytest

from dflash import completion
from dflash.cli.commands import COMMANDS

TINY = "dflash decode configs/tiny_dflash.yml "


@pytest.fixture
def offered(tmp_path, monkeypatch):
    """Returns the candidates for a line, in a directory with a config and a folder."""
    (tmp_path / "mine.yml").write_text("base: [tiny_dflash.yml]\ndrafter: {name: ngram}\n")
    (tmp_path / "notes.txt").touch()
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    return lambda line: completion.candidates(*completion.split(line))


def test_subcommands(offered):
    assert offered("dflash ") == sorted(f"{name} " for name in (*COMMANDS, "--help", "--version"))
    assert offered("dflash tr") == ["train ", "train_tokenizer "]
    assert offered("dflash nonesuch ") == []


def test_configs_are_the_shipped_ones_of_the_command_and_files_here(offered):
    found = offered("dflash decode ")
    assert {"configs/tiny_dflash.yml ", "mine.yml ", "runs/"} <= set(found)
    assert not [one for one in found if "train/" in one or "notes" in one]
    assert offered("dflash train configs/train/tiny_t") == ["configs/train/tiny_target.yml "]
    assert offered("dflash sweep configs/sweeps/q") == ["configs/sweeps/qwen3_4b_gsm8k.yml "]
    assert "configs/train/tiny_target.yml " in offered("dflash compile ")


def test_flags_and_their_values(offered):
    assert offered("dflash decode --") == [
        "--compilation_cache=", "--coordinator_address=", "--dry_run ", "--help ", "--nostream ",
        "--num_processes=", "--print_config ", "--process_id=", "--profile_dir=", "--shard=",
        "--stream ", "--workdir=",
    ]  # fmt: skip
    assert offered("dflash convert a b --to=") == ["--to=hf ", "--to=maxtext ", "--to=orbax "]
    assert offered("dflash convert a b --to o") == ["orbax "]
    assert offered(TINY + "--workdir=r") == ["--workdir=runs/"]
    assert offered(TINY + "--workdir ru") == ["runs/"]
    assert "decode." in offered(TINY + "--dry_run ")


def test_keys_go_part_by_part(offered):
    assert offered(TINY) == [
        "decode.", "drafter.", "dtype=", "mesh.", "prompts.", "sharding_rules.", "target.",
    ]  # fmt: skip
    assert offered(TINY + "decode.ma") == ["decode.max_length=", "decode.max_new_tokens="]
    assert offered(TINY + "sharding_rules.kv") == ["sharding_rules.kv_heads="]
    assert offered("dflash train configs/train/tiny_target.yml data.mixture.ma") == [
        "data.mixture.math500=", "data.mixture.math=",
    ]  # fmt: skip


def test_the_names_on_the_line_and_in_the_file_choose_the_keys(offered):
    assert "drafter.tree." in offered(TINY + "drafter.")
    assert "drafter.num_draft_tokens=" in offered(TINY + "drafter.name=eagle3 drafter.")
    assert offered("dflash decode mine.yml drafter.l") == ["drafter.longest_match="]
    strategies = "dflash benchmark configs/benchmark/tiny_strategies.yml strategies."
    assert "strategies.dflash_tree32." in offered(strategies)
    assert "strategies.ngram.longest_match=" in offered(strategies + "ngram.")


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (
            "decode.verify=",
            ["decode.verify=block ", "decode.verify=coupled ", "decode.verify=rejection "],
        ),
        ("decode.ignore_eos=t", ["decode.ignore_eos=true "]),
        ("drafter.block_size=", ["drafter.block_size=auto ", "drafter.block_size=null "]),
        ("drafter.name=e", ["drafter.name=eagle3 "]),
        ("prompts.dataset=gs", ["prompts.dataset=gsm8k "]),
        ("prompts.file=no", ["prompts.file=notes.txt "]),
        ("target.checkpoint=assets/tiny_t", ["target.checkpoint=assets/tiny_target "]),
        ("target.checkpoint=r", ["target.checkpoint=random ", "target.checkpoint=runs/"]),
        ("dtype=", ["dtype=bfloat16 ", "dtype=float32 "]),
        ("decode.seed=", []),
        ("no.such.key=", []),
    ],
)
def test_values(offered, word, expected):
    assert offered(TINY + word) == expected


def test_keys_within_a_sweep(offered):
    line = "dflash sweep configs/sweeps/block_size.yml sweep."
    assert offered(line) == ["sweep.product.", "sweep.run=", "sweep.zip."]
    assert offered(line + "run=") == [
        f"sweep.run={run} " for run in ("benchmark", "decode", "distill")
    ]
    assert offered(line + "product.decode.se") == ["sweep.product.decode.seed="]
    assert offered(line + "product.dtype=f") == ["sweep.product.dtype=float32 "]


@pytest.mark.parametrize(
    "line",
    [
        "dflash decode gone.yml decode.s",
        "dflash decode 'open quote",
        TINY + "decode.seed=[ decode.s",
        TINY + "=x decode.s",
        TINY + "~nobody/",
        "dflash decode ~nobody/",
        "",
        "dflash",
    ],
)
def test_what_is_wrong_on_the_line_is_no_error(offered, line):
    offered(line)


def test_paths_keep_their_tilde_and_hide_hidden_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / ".hidden").touch()
    assert completion.paths("~/") == ["~/data/"]
    assert sorted(completion.paths("~/.")) == ["~/.hidden ", "~/data/"]


def as_shells_do(shell, code, tmp_path):
    """Runs code after the script of a shell, where `dflash` is this one."""
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    command = tmp_path / "bin" / "dflash"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m dflash "$@"\n')
    command.chmod(0o755)
    search = os.pathsep.join([str(command.parent), os.environ["PATH"]])
    (tmp_path / "script").write_text(completion._SCRIPTS[shell])
    return subprocess.run(
        [shell, "-c", f". ./script\n{code}"],
        capture_output=True, text=True, cwd=tmp_path, check=True,
        env=os.environ | {"PATH": search, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout  # fmt: skip


def test_bash(tmp_path):
    """Bash only replaces the text after the last =, so the candidates omit the text before it."""
    code = f"""
    COMP_LINE='{TINY}decode.verify=c'
    COMP_POINT=${{#COMP_LINE}}
    _dflash
    printf '[%s]' "${{COMPREPLY[@]}}"
    """
    assert as_shells_do("bash", code, tmp_path) == "[coupled ]"


def test_fish(tmp_path):
    """The shell fish adds the space after a candidate."""
    code = f"complete -C '{TINY}decode.verify=c'"
    assert as_shells_do("fish", code, tmp_path).split() == ["decode.verify=coupled"]
