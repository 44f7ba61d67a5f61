"""`dflash convert`: round trips of targets and drafters, and what it says."""

import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from support import outcome
from support.golden import GOLDEN, GOLDEN_CASES
from support.models import make_target

from dflash import convert
from dflash.checkpoints import checkpoint
from dflash.models.dense import Llama3, Qwen3

USAGE = f"usage: {convert.SUBCOMMAND.usage}; see --help"


def run(capsys, *argv) -> tuple[int, str, str]:
    return outcome(capsys, convert.main, *argv)


def tensors_of(directory):
    return {
        name: (value.dtype, value.shape, value.tobytes())
        for name, value in load_file(directory / "model.safetensors").items()
    }


FAMILIES = {"qwen3moe_v20": "qwen3_moe", "deepseek_v14": "deepseek_v3"}  # of golden targets


@pytest.mark.parametrize(
    ("case", "kind", "name"),
    [
        *((case, "target", FAMILIES.get(case, "qwen3")) for case in GOLDEN_CASES),
        *((case, "draft", "dflash") for case in GOLDEN_CASES),
        ("eagle3_llama_v40", "draft", "eagle3"),  # with tables: integers and flags
        ("eagle3_flags_v24/parallel", "draft", "eagle3"),  # in the layout of speculators
    ],
)
def test_there_and_back_is_bit_identical(tmp_path, capsys, case, kind, name):
    source = GOLDEN / case / kind
    status, out, err = run(capsys, source, tmp_path / "orbax", "--to=orbax")
    assert (status, err) == (0, "")
    # Orbax has all experts of a layer, or keys and values, as arrays of their own.
    count = r"\d+" if case in FAMILIES else len(tensors_of(source))
    assert re.fullmatch(
        rf"{tmp_path}/orbax: {name}, {count} tensors, \S+ GB, float32, orbax layout, "
        r"written in \d+\.\d s\n",
        out,
    )
    assert checkpoint.layout(tmp_path / "orbax") == "orbax"
    assert run(capsys, tmp_path / "orbax", tmp_path / "hf", "--to", "hf")[0] == 0
    assert tensors_of(tmp_path / "hf") == tensors_of(source)
    assert checkpoint.read_config(tmp_path / "hf") == checkpoint.read_config(source)


def test_companions_come_along(tmp_path, capsys):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "qwen3_b1" / "target", source)
    (source / "tokenizer.json").write_text("tokens")
    (source / "pytorch_model.bin").write_text("pickle")
    run(capsys, source, tmp_path / "orbax", "--to=orbax")
    run(capsys, tmp_path / "orbax", tmp_path / "hf", "--to=hf")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == "tokens"


@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_another_dtype(tmp_path, capsys, to):
    source = GOLDEN / "qwen3_b1" / "draft"
    status, out, _ = run(capsys, source, tmp_path / "out", f"--to={to}", "--dtype=bfloat16")
    assert status == 0
    assert ", bfloat16, " in out
    assert checkpoint.stored_dtype(tmp_path / "out") == jnp.bfloat16
    assert checkpoint.read_config(tmp_path / "out")["dtype"] == "bfloat16"
    if to == "hf":
        original = load_file(source / "model.safetensors")
        for name, value in load_file(tmp_path / "out" / "model.safetensors").items():
            np.testing.assert_array_equal(value, original[name].astype(jnp.bfloat16))
    # Without --dtype, the stored one is kept.
    assert run(capsys, tmp_path / "out", tmp_path / "again", "--to=orbax")[0] == 0
    assert checkpoint.stored_dtype(tmp_path / "again") == jnp.bfloat16


def test_destination_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    destination = tmp_path / "file" / "out"
    message = f"error: {destination}: cannot be written: Not a directory\n"
    assert run(capsys, GOLDEN / "qwen3_b1" / "target", destination, "--to=hf") == (1, "", message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a"], f"expected SOURCE and DESTINATION, not 1 argument; {USAGE}"),
        (["a", "b.gguf", "--to=hf"], f"--to: b.gguf is a GGUF file; {USAGE}"),
        (["a", "b", "--to=hf", "--tokenizer=c"], f"--tokenizer is for GGUF files; {USAGE}"),
        (["a", "gs://b/c.gguf"], f"gs://b/c.gguf: GGUF files are written to a disk; {USAGE}"),
        (["a", "b", "--to=onnx"], "flag --to=onnx: value should be one of <orbax|hf|maxtext>"),
    ],
)
def test_wrong_usage(capsys, argv, message):
    status, out, err = run(capsys, *argv)
    assert (status, out, err) == (2, "", f"error: {message}\n")


def test_an_occupied_destination_is_refused_before_the_source_is_read(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("")
    status, _, err = run(capsys, tmp_path / "no such source", tmp_path / "out", "--to=hf")
    assert status == 2
    assert err.startswith(f"error: {tmp_path / 'out'}: already exists")


@pytest.mark.parametrize("layers", ["--scan_layers", "--noscan_layers"])
@pytest.mark.parametrize("kind", [Qwen3, Llama3])
def test_maxtext_and_back(kind, layers, tmp_path, capsys):
    """The tree itself is compared in tests/checkpoints/test_maxtext_io.py."""
    model = make_target(kind)
    config = kind.config_to_hf(model.arch)
    checkpoint.save(model, tmp_path / "hf", config)
    assert run(capsys, tmp_path / "hf", tmp_path / "mt", "--to=maxtext", layers)[0] == 0
    (tmp_path / "mt/config.json").unlink()
    code, _, err = run(capsys, tmp_path / "mt", tmp_path / "back", "--to=hf")
    assert code == 2
    assert "MaxText stores neither config.json nor tokenizer; give --like=DIRECTORY" in err
    like = f"--like={tmp_path / 'hf'}"
    code, out, _ = run(capsys, tmp_path / "mt", tmp_path / "back", "--to=hf", like)
    assert code == 0
    assert "float32, hf layout" in out
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-6)
    code, _, err = run(capsys, tmp_path / "hf", tmp_path / "no", "--to=orbax", like)
    assert code == 2
    assert "leave --like out" in err
