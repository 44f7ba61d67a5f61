"""The embedded tiny family: small enough to ship, trained well enough to be worth shipping."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
from support.golden import import_transformers, load

from dflash import decode
from dflash.checkpoints import checkpoint
from dflash.models.dense import Qwen3

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


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_bfloat16_and_where_the_config_looks(name):
    assert checkpoint.resolve(f"assets/{name}").samefile(ASSETS / name)
    assert checkpoint.stored_dtype(ASSETS / name) == jnp.bfloat16


@pytest.mark.parametrize("config", ["configs/tiny_dflash.yml", "configs/tiny_dflash2.yml"])
def test_the_demonstration_from_anywhere(config, tmp_path, monkeypatch, capsys):
    """What the README promises: three answers, drafted well, and the target's own."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        decode.main([config])
    out, err = capsys.readouterr()
    assert caught.value.code == 0, err
    *prompts, total = [line.split() for line in err.splitlines()[-4:]]
    assert [row[-1] for row in prompts] == ["yes"] * 3
    assert total[0] == "all"
    assert float(total[1]) > 3  # τ
    assert out.strip()


def test_transformers_reads_the_target():
    """The very files, through the reference implementation: the same logits."""
    torch, transformers = import_transformers()
    ids = np.arange(3, 43)[None]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        ASSETS / "tiny_target", dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(ids)).logits.numpy()
    target = load(Qwen3, ASSETS / "tiny_target")
    hidden, _ = target.forward(jnp.asarray(ids), jnp.arange(40)[None], jnp.ones((1, 40), jnp.int32))
    np.testing.assert_allclose(target.unembed(hidden), expected, atol=1e-3)
