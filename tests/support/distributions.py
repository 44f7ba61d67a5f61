"""Distributions as pip leaves them: a folder of metadata on sys.path, and modules beside it."""

import pathlib
import sys
from collections.abc import Mapping

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    directory: pathlib.Path,
    entry_points: str,
    modules: Mapping[str, str],
    *,
    name: str = "made-up",
) -> None:
    """Installs a distribution for the length of a test.

    Args:
      directory: where; of this distribution alone.
      entry_points: content of its entry_points.txt.
      modules: their source by name.
      name: of the distribution; its version is 0.1.
    """
    metadata = directory / f"{name.replace('-', '_')}-0.1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(entry_points)
    for module, source in modules.items():
        (directory / f"{module}.py").write_text(source)
        monkeypatch.delitem(sys.modules, module, raising=False)  # of an earlier test
    monkeypatch.syspath_prepend(directory)
