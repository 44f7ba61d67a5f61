"""References, directories and config.json; reading and writing the layouts has its own tests."""

import json
import sys

import pytest
from support import failure

from dflash import errors
from dflash.checkpoints import checkpoint, files


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def test_hub_passes_name_and_revision_and_asks_for_no_pickles(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'dflash-jax[hf]'")
    asked = {}

    def download(repository, **options):
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert checkpoint.resolve("hf:org/name@v1.0") == tmp_path
    assert (asked["repository"], asked["revision"]) == ("org/name", "v1.0")
    assert "*.safetensors" in asked["allow_patterns"]
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(asked["allow_patterns"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GatedRepoError",
         "gated; accept its terms at huggingface.co/org/name, then hf auth login"),
        ("RepositoryNotFoundError",
         "not on the Hugging Face hub, or private; check the name, or hf auth login"),
        ("RevisionNotFoundError", "no revision 'v1'"),
        ("OfflineModeIsEnabled", "not in the local cache and the hub cannot be reached; download "
         "it while online, or give a directory"),
        ("FileMetadataError", "cannot be downloaded: first line"),
    ],
)  # fmt: skip
def test_hub_failures(monkeypatch, name, message):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'dflash-jax[hf]'")
    kind = getattr(pytest.importorskip("huggingface_hub.errors"), name)

    def download(*_, **__):
        # Some of these insist on an HTTP response, which their own __init__ takes apart.
        error = kind.__new__(kind)
        Exception.__init__(error, "first line\nsecond line")
        raise error

    monkeypatch.setattr(kind, "__str__", lambda self: "first line\nsecond line")
    monkeypatch.setattr(hub, "snapshot_download", download)
    assert failure(checkpoint.resolve, "hf:org/name@v1") == f"hf:org/name@v1: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{\n 'a': 1}",
         "not valid JSON (line 2: Expecting property name enclosed in double quotes)"),
        (b"[1]", "expected a JSON object"),
        (b"[" * 100_000, "not valid JSON (nested too deeply)"),
        (b'{"a":' * 100_000, "not valid JSON (nested too deeply)"),
        (b'{"a": ' + b"9" * 5_000 + b"}", "not valid JSON (a number is too long)"),
        (b'{"a": "\xff"}', "not UTF-8: byte 0xff at offset 7"),
    ],
    ids=["quotes", "list", "brackets", "braces", "digits", "UTF-8"],
)  # fmt: skip
def test_config_is_unusable(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert failure(checkpoint.read_config, tmp_path) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
        ({"eos_token_id": 5}, {}, (5,)),
        ({"eos_token_id": None}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [7, 8]}, (7, 8)),
        (None, {"eos_token_id": 0}, (0,)),
        ({}, {}, ()),
    ],
)
def test_eos_ids(tmp_path, generation, config, expected):
    if generation is not None:
        write(tmp_path / "generation_config.json", generation)
    write(tmp_path / "config.json", config)
    assert checkpoint.eos_token_ids(tmp_path) == expected


@pytest.mark.parametrize(
    ("value", "place", "shown"),
    [
        ("</s>", "[0]", "'</s>'"),
        ([1, None], "[1]", "null"),
        (-1, "[0]", "-1"),
        (True, "[0]", "true"),
        ({"a": 1}, "[0]", "a mapping"),
        (2**40, "[0]", str(2**40)),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_eos_ids_must_be_ids(tmp_path, name, value, place, shown):
    write(tmp_path / name, {"eos_token_id": value})
    assert failure(checkpoint.eos_token_ids, tmp_path) == (
        f"{tmp_path / name}: eos_token_id{place}: "
        f"expected an integer {'in [0, 2147483647]' if value == 2**40 else '>= 0'}, got {shown}"
    )


def test_staged_directory_replaces_an_empty_one_and_leftovers(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.partial").mkdir()
    write(tmp_path / ".out.partial" / "stale", "")
    with files.staged(tmp_path / "out") as staged:
        write(staged / "a", "1")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "a"]


def test_failure_leaves_nothing(tmp_path):
    def run():
        with files.staged(tmp_path / "out") as staged:
            write(staged / "a", "1")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    def run():
        with files.staged(tmp_path / "out"):
            raise OSError(28, "No space left on device")

    said = failure(run, kind=errors.WorkdirError)
    assert said == f"{tmp_path / 'out'}: cannot be written: No space left on device"
    assert list(tmp_path.iterdir()) == []


def test_progress_shows_on_a_terminal_only_and_loses_nothing(monkeypatch, capsys):
    monkeypatch.setattr(files, "PROGRESS_DELAY_SECONDS", -1)
    items = [("a", 1), ("b", 2)]
    assert list(files.track(items, 3, "reading")) == ["a", "b"]
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(files.track(items, 3, "reading")) == ["a", "b"]
