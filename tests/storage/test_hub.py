"""Commits of the hub's checkpoints, with the hub's own cache on disk and without network access."""

import pytest

from dflash import errors
from dflash.config import loader
from dflash.config.schema import DecodeRun
from dflash.runs.directory import RunDirectory
from dflash.storage import hub

FIRST, SECOND = "1a2b" * 10, "3c4d" * 10
REFERENCE = "hf:org/name"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns a function that lets the branch main of org/name name a commit of the cache."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="pip install '.[hf]'")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "commits", {})
    repository = tmp_path / "models--org--name"

    def upload(commit):
        for directory in (repository / "refs", repository / "snapshots" / commit):
            directory.mkdir(parents=True, exist_ok=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs" / "main").write_text(commit)

    return upload


def config(reference):
    return loader.load(None, [f"target.checkpoint={reference}", "drafter.name=ngram"], DecodeRun)


def open_directory(path, reference):
    return RunDirectory(path, config(reference), is_used=lambda directory: True)


def test_the_commit_is_printed_once_and_again_after_an_upload(cache, capsys):
    cache(FIRST)
    assert [hub.download(REFERENCE).name for _ in range(2)] == [FIRST, FIRST]
    assert capsys.readouterr().err == f"{REFERENCE}: commit {FIRST}\n"
    cache(SECOND)
    assert hub.download(REFERENCE).name == SECOND
    assert capsys.readouterr().err == f"{REFERENCE}: commit {SECOND}\n"
    assert hub.download(f"{REFERENCE}@{FIRST}").name == FIRST
    assert capsys.readouterr().err == ""


def test_a_run_directory_names_the_commit_and_refuses_another_one(cache, tmp_path):
    cache(FIRST)
    hub.download(REFERENCE)
    run = tmp_path / "run"
    RunDirectory(run, config(REFERENCE), is_used=lambda directory: False).close()
    assert f"checkpoint: {REFERENCE}@{FIRST}" in (run / "config.yml").read_text()
    open_directory(run, REFERENCE).close()
    cache(SECOND)
    hub.download(REFERENCE)
    with pytest.raises(errors.WorkdirError, match=f'@{FIRST}" there, "{REFERENCE}@{SECOND}" here'):
        open_directory(run, REFERENCE)
    open_directory(run, f"{REFERENCE}@{FIRST}").close()


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("hf:a/b", f"hf:a/b@{FIRST}", True),  # an earlier version stored no commit
        ("hf:a/b@v1", f"hf:a/b@{FIRST}", True),
        (f"hf:a/b@{SECOND}", f"hf:a/b@{FIRST}", False),
        ("hf:a/b@v1", "hf:a/b@v2", False),
        ("hf:a/c", f"hf:a/b@{FIRST}", False),
        ("a/b", f"a/b@{FIRST}", False),
        (None, f"hf:a/b@{FIRST}", False),
    ],
)
def test_references_that_name_the_same(first, second, same):
    assert hub.name_the_same(first, second) == hub.name_the_same(second, first) == same
