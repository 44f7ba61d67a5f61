"""Training and decoding on file systems without directory renames and file locks."""

import errno
import fcntl
import os
import pathlib

import numpy as np
import pytest
from support import toy

from dflash.checkpoints import files as checkpoint_files
from dflash.data import corpus
from dflash.storage import files


@pytest.fixture
def poor(monkeypatch):
    """A file system with no more than files."""

    def refusing(function):
        def call(source, *rest, **options):
            if os.path.isdir(source):
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), source)
            return function(source, *rest, **options)

        return call

    def refuse(*unused):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(os, "rename", refusing(os.rename))
    monkeypatch.setattr(os, "replace", refusing(os.replace))
    monkeypatch.setattr(fcntl, "flock", refuse)


def test_what_is_not_asked(poor, tmp_path):
    assert not files.renames_directories(tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_run_in_legs_equals_one_run(poor, tmp_path):
    whole = toy.arrays(toy.Run(tmp_path / "whole", steps=8).go())
    toy.Run(tmp_path / "legs", steps=5, checkpoint_every=2).go()
    directory = tmp_path / "legs" / "checkpoints"
    # A kill during a save leaves a directory without the file that comes last.
    half = directory / "7"
    half.mkdir()
    (half / "state").write_text("half")
    rest = toy.Run(tmp_path / "legs", steps=8)
    toy.assert_identical(toy.arrays(rest.go()), whole)
    assert rest.started_at == 5
    assert not half.exists()
    assert rest.notes == []


def test_a_run_moves_to_such_a_file_system(tmp_path, request):
    toy.Run(tmp_path, steps=4, checkpoint_every=2).go()
    request.getfixturevalue("poor")
    rest = toy.Run(tmp_path, steps=6, checkpoint_every=2)
    rest.go()
    assert rest.started_at == 4


def export(destination: pathlib.Path, content: str) -> None:
    with checkpoint_files.staged(destination) as staged:
        (staged / "config.json").write_text("{}")
        (staged / "parts").mkdir()
        (staged / "parts" / "weights").write_text(content)


def test_a_checkpoint_is_whole_once_its_config_is_there(poor, tmp_path, monkeypatch):
    export(tmp_path / "hf", "one")
    assert (tmp_path / "hf" / "parts" / "weights").read_text() == "one"
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    written = []
    write = files.write_whole
    monkeypatch.setattr(
        files, "write_whole", lambda path, data: written.append(path.name) or write(path, data)
    )
    export(tmp_path / "other", "two")
    assert written == ["config.json"]


def test_corpora_are_stored(poor, tmp_path):
    documents = [np.arange(5, dtype=np.uint32), np.arange(3, dtype=np.uint32)]
    corpus.write(tmp_path / "encoded" / "one", documents)
    stored = corpus.open_stored(tmp_path / "encoded" / "one", "x", "y")
    assert stored.max_id == 4
    assert stored.document(1).tolist() == [0, 1, 2]
    assert [path.name for path in (tmp_path / "encoded").iterdir()] == ["one"]
