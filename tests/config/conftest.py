"""Config files that the tests of the loader write."""

import textwrap

import pytest
from support.config_files import MINIMAL


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files into an empty working directory."""
    monkeypatch.chdir(tmp_path)

    def write_file(name, text=MINIMAL):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write_file
