"""The embedded tiny family: small enough to ship, trained well enough to be worth shipping."""

import pathlib

import pytest
from support import outcome

from dflash import decode

ASSETS = pathlib.Path(decode.__file__).parent / "assets"
MODELS = sorted(path.parent.name for path in ASSETS.glob("*/config.json"))
MAX_BYTES = 90 * 2**20


def test_all_of_it_is_small():
    assert sum(path.stat().st_size for path in ASSETS.rglob("*") if path.is_file()) <= MAX_BYTES


def test_licence_and_provenance_are_stated():
    text = (ASSETS / "README.md").read_text(encoding="utf-8")
    assert "Apache-2.0" in text
    for name in MODELS:
        assert name in text


@pytest.mark.parametrize("config", ["configs/tiny_dflash.yml", "configs/tiny_dflash2.yml"])
def test_the_demonstration_from_anywhere(config, tmp_path, monkeypatch, capsys):
    """What the README promises: three answers, drafted well, and the target's own."""
    monkeypatch.chdir(tmp_path)
    status, out, err = outcome(capsys, decode.main, config)
    assert status == 0, err
    rows = [line.split() for line in err.splitlines() if not line.startswith("?: not trustworthy")]
    *prompts, total = rows[-4:]
    assert [row[-1] for row in prompts] == ["yes"] * 3
    assert total[0] == "all"
    assert float(total[1]) > 3  # τ
    assert out.strip()
