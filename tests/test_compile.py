"""Tests of the compile command, end to end on a tiny model."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dflash import errors
from dflash.compiler import costs, hlo, topology
from dflash.config import loader, tpu_schema
from dflash.layers.linear import Embedding

SCHEMAS = (tpu_schema.CompileDecode, tpu_schema.CompileTrain)
TINY = (
    "configs/random_tiny_dflash.yml", "dtype=bfloat16", "target.architecture.num_hidden_layers=2",
    "drafter.architecture.num_hidden_layers=1", "drafter.architecture.num_target_features=1",
    "decode.max_length=256", "tpu.topology=v5e:2x2", "mesh.tensor=4",
)  # fmt: skip


def run(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    return subprocess.run(
        [sys.executable, "-m", "dflash.compile", *arguments], capture_output=True, text=True,
        env=environment, timeout=900, check=False,
    )  # fmt: skip


@pytest.mark.tpu_compiler
def test_a_tiny_model_is_compiled_and_reported(tmp_path):
    done = run(*TINY, "--workdir", str(tmp_path), "tpu.max_cycle_ms=0.0001")
    assert done.returncode == 3, done.stderr
    assert "over budget: tpu.max_cycle_ms: 0." in done.stderr
    # Each program is announced before it is compiled.
    assert "compiling · 0 % · cycle: batch 1" in done.stderr
    assert "compiler estimates: nothing here was measured on a chip" in done.stdout
    found = json.loads((tmp_path / "compile.json").read_text())
    assert found["fits"]
    assert found["complete"]
    assert (found["chips"], found["mesh"]["tensor"]) == (4, 4)
    cycle = found["programs"]["cycle"]
    # Each layer has two all-reduces and each unembedding has one, of at most 16 rows.
    assert set(cycle["collectives"]) <= {"all-reduce", "all-gather"}
    assert sum(size for _, size in cycle["collectives"].values()) < 20 * 16 * 512 * 4
    for name in ("target attention", "target mlp", "unembed", "drafter"):
        part = cycle["components"][name]
        assert 0 < part["ideal_ms"] < part["roofline_ms"] + part["cycles_ms"], name
    # The matmuls multiply 16 rows by a quarter of the weights.
    mlp = 2 * 2 * 16 * 3 * 512 * 1536 / 4
    assert cycle["components"]["target mlp"]["flops"] == pytest.approx(mlp, rel=0.01)
    weights = found["memory_bytes"]["target weights"]
    assert weights == pytest.approx(2 * (2 * 3.15e6 + 4096 * 512) / 4, rel=0.02)
    assert loader.load(tmp_path / "config.yml", schema=SCHEMAS).tpu.topology == "v5e:2x2"


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "tpu.topology: required, such as v5p:2x2x1"),
        ("v5z:2x2", "tpu.topology: v5z:2x2: unknown chip 'v5z'; did you mean"),
        ("v5e", "tpu.topology: v5e: expected chip:AxB or AxBxC"),
        ("v5p:3x5x1", "tpu.topology: v5p:3x5x1: no such topology"),
    ],
)
def test_unknown_topologies_are_rejected(name, message):
    with pytest.raises(errors.ConfigError, match=message):
        topology.find(name)


@pytest.mark.tpu_compiler
def test_the_mesh_covers_the_topology():
    machine = topology.find("v5p:2x2x1", slices=2)
    assert (machine.num_chips, machine.chip.devices) == (8, 1)
    rules = tpu_schema.CompileDecode().sharding_rules
    sizes = {"data": 2, "fsdp": 1, "tensor": 4}
    mesh = topology.make_sharding(machine, sizes, rules).mesh
    for row, index in zip(mesh.devices, range(2), strict=True):
        assert {device.slice_index for device in row.flat} == {index}
    with pytest.raises(errors.ConfigError, match=r"= 4 devices, but 2 × v5p:2x2x1 has 8"):
        topology.make_sharding(machine, sizes | {"data": 1}, rules)
    with pytest.raises(errors.ConfigError, match=r"mesh.data: 1 does not divide over 2 slices"):
        topology.make_sharding(machine, {"data": 1, "fsdp": 1, "tensor": 8}, rules)


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("data", "batch"), [(1, 1), (4, 4), (4, 1)])
def test_a_single_row_uses_the_matrix_unit(data, batch):
    rules = tpu_schema.CompileDecode().sharding_rules
    sizes = {"data": data, "fsdp": 1, "tensor": 1}
    machine = topology.find("v5p:2x2x1" if data > 1 else "v5p:1x1x1")
    sharding = topology.make_sharding(machine, sizes, rules)
    head = Embedding(1024, 256, dtype=jnp.bfloat16, sharding=sharding)
    graph, params = nnx.split(head)
    place = "batch" if batch == data else None
    hidden = sharding.abstract((batch, 1, 256), (place, None, None), jnp.bfloat16)
    compiled = jax.jit(lambda p, x: nnx.merge(graph, p).attend(x)).lower(params, hidden).compile()
    operations = costs.operations(
        hlo.parse(compiled.as_text()), trips=lambda _: None, branch=lambda _: None
    )
    # The row is padded to two rows.
    assert sum(one.flops for one in operations) == 2 * 2 * 256 * 1024
    assert jax.tree.leaves(compiled.out_info)[0].shape == (batch, 1, 1024)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("configs/qwen3_4b_dflash.yml", tpu_schema.CompileDecode),
        ("configs/random_tiny_dflash.yml", tpu_schema.CompileDecode),
        ("configs/train/qwen3_4b_dflash.yml", tpu_schema.CompileTrain),
        ("configs/train/qwen3_4b_eagle3.yml", tpu_schema.CompileTrain),
    ],
)
def test_the_file_decides_what_is_compiled(path, kind):
    config = loader.load(path, ["tpu.topology=v5p:2x2x1"], SCHEMAS)
    assert type(config) is kind
    assert config.tpu.topology == "v5p:2x2x1"
