"""The native layout: round trips over meshes and dtypes, and damage."""

import json
import os
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from support import TESTS, run_python
from support.models import failed_load, make_architecture, make_sharding, make_target

from dflash.checkpoints import checkpoint, orbax_io
from dflash.models.dense import Qwen3
from dflash.parallel import parameters

MISFIT = "these weights do not belong to this config.json"


@pytest.fixture(scope="module")
def source():
    return make_target(num_hidden_layers=1)


@pytest.fixture
def saved(tmp_path, source):
    directory = tmp_path / "saved"
    count = checkpoint.save(source, directory, Qwen3.config_to_hf(source.arch), layout="orbax")
    assert count == len(list(parameters.named_parameters(source)))
    return directory


def abstract(*, dtype=jnp.float32, mesh=None, **changes):
    sharding = make_sharding(**(mesh or {}))
    arch = make_architecture(**{"num_hidden_layers": 1} | changes)
    return Qwen3(arch, dtype=dtype, sharding=sharding)


def assert_same(module, source, dtype=np.float32):
    expected = dict(parameters.named_parameters(source))
    for path, param in parameters.named_parameters(module):
        value = np.asarray(expected[path].get_value()).astype(dtype)
        assert np.asarray(param.get_value()).tobytes() == value.tobytes(), path


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_reads_directly_sharded(saved, source, dtype, mesh, monkeypatch):
    monkeypatch.setattr(orbax_io, "_GROUP_BYTES", 20_000)  # several groups
    module = abstract(dtype=dtype, mesh=mesh)
    declared = {path: p.get_value().sharding for path, p in parameters.named_parameters(module)}
    checkpoint.load(module, saved)
    assert_same(module, source, dtype)
    for path, param in parameters.named_parameters(module):
        assert param.get_value().sharding.is_equivalent_to(declared[path], param.get_value().ndim)


def test_writes_from_a_mesh(tmp_path, saved, source):
    sharded = abstract(mesh={"data": 2, "fsdp": 2, "tensor": 2})
    checkpoint.load(sharded, saved)
    checkpoint.save(sharded, tmp_path / "out", {}, layout="orbax")
    module = abstract()
    checkpoint.load(module, tmp_path / "out")
    assert_same(module, source)


def test_layout_on_disk(tmp_path, source):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    config = Qwen3.config_to_hf(source.arch)
    checkpoint.save(source, tmp_path / "out", config, layout="orbax", companions=tmp_path / "in")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["config.json", "params", "tokenizer.json"]
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == json.loads(json.dumps(config)) | {"torch_dtype": "float32"}


def test_missing_tensors(saved):
    module = abstract(num_hidden_layers=2)
    assert failed_load(module, saved) == (
        f"{saved}/params: 11 of 25 tensors missing: 'layers.1.input_layernorm.scale', "
        f"'layers.1.mlp.down_proj.kernel', 'layers.1.mlp.gate_proj.kernel' and 8 more; {MISFIT}"
    )


@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_damaged_description(saved, damage):
    path = saved / "params" / "_METADATA"
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20])
    assert failed_load(abstract(), saved) == (
        f"{saved}/params: not a readable Orbax checkpoint; copy or convert the checkpoint again"
    )


LOAD = """
import pathlib, sys
from support.golden import load
from dflash import errors
from dflash.models.dense import Qwen3
try:
    load(Qwen3, pathlib.Path(sys.argv[1]))
except errors.CheckpointError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("manifest.ocdbt", "not a readable Orbax checkpoint"),
        ("ocdbt.process_0/d/*", "damaged, while reading 'embed_tokens.embedding', "),
    ],
)
def test_damaged_data_is_one_line_and_nothing_else(saved, tmp_path, pattern, message):
    """Runs in a separate process, since Orbax logs failures later, from other threads."""
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    files = list((copy / "params").glob(pattern))
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:20])
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = run_python(LOAD, copy, check=True, env=os.environ | {"PYTHONPATH": path})
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"{copy}/params: {message}")
    assert line.endswith("; copy or convert the checkpoint again")
    assert done.stderr == ""
