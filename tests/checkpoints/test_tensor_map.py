"""Tests of parameters that are not stored one for one: rows of a tensor, stacks of tensors."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from support.models import make_sharding

from dflash.checkpoints import checkpoint, safetensors_io, tensor_map
from dflash.checkpoints.tensor_map import Stack, TensorRows
from dflash.parallel import parameters
from dflash.storage import files

HEADS, KEY, VALUE, WIDTH, INNER, EXPERTS = 3, 2, 4, 8, 6, 4
BOTH = "kv_b.weight"


def expert_name(expert):
    return f"experts.{expert}.gate_up.weight"


class Mapped(nnx.Module):
    """Keys and values that alternate by head in one tensor; gate and up fused within experts."""

    def __init__(self, **mesh):
        build = {"dtype": jnp.float32, "sharding": make_sharding(**mesh), "stddev": 1.0}
        self.keys = nnx.Dict(kernel=parameters.declare((WIDTH, HEADS * KEY), (None, None), **build))
        self.values = nnx.Dict(
            kernel=parameters.declare((WIDTH, HEADS * VALUE), (None, None), **build)
        )
        shape, names = (EXPERTS, WIDTH, INNER), ("expert", "embed", "mlp")
        self.gate = nnx.Dict(kernel=parameters.declare(shape, names, **build))
        self.up = nnx.Dict(kernel=parameters.declare(shape, names, **build))
        self.bias = parameters.declare((EXPERTS, 2), ("expert", None), **build)
        self.scalar = parameters.declare((), (), **build)

    @staticmethod
    def checkpoint_name(path):
        name, *_ = path.split(".")
        if name in ("gate", "up"):
            begin = 0 if name == "gate" else INNER
            return Stack(
                tuple(
                    TensorRows(expert_name(expert), begin, begin + INNER, of=2 * INNER)
                    for expert in range(EXPERTS)
                )
            )
        if name == "bias":
            return Stack(tuple(f"bias.{expert}" for expert in range(EXPERTS)))
        if name == "scalar":
            return name
        begin, count = (0, KEY) if name == "keys" else (KEY, VALUE)
        return TensorRows(BOTH, begin, begin + count, of=KEY + VALUE, groups=HEADS)


def make_tensors():
    rng = np.random.default_rng(0)
    shapes = {BOTH: (HEADS * (KEY + VALUE), WIDTH), "scalar": ()}
    for expert in range(EXPERTS):
        shapes |= {expert_name(expert): (2 * INNER, WIDTH), f"bias.{expert}": (2,)}
    return {
        name: np.asarray(rng.standard_normal(shape), np.float32) for name, shape in shapes.items()
    }


def expected(tensors):
    heads = tensors[BOTH].reshape(HEADS, KEY + VALUE, WIDTH)
    experts = np.stack([tensors[expert_name(expert)].T for expert in range(EXPERTS)])
    return {
        "keys.kernel": heads[:, :KEY].reshape(-1, WIDTH).T,
        "values.kernel": heads[:, KEY:].reshape(-1, WIDTH).T,
        "gate.kernel": experts[:, :, :INNER],
        "up.kernel": experts[:, :, INNER:],
        "bias": np.stack([tensors[f"bias.{expert}"] for expert in range(EXPERTS)]),
        "scalar": tensors["scalar"],
    }


@pytest.fixture
def stored(tmp_path):
    """A checkpoint of one file."""
    directory = tmp_path / "in"
    directory.mkdir()
    save_file(make_tensors(), directory / "model.safetensors")
    return directory


MESHES = [{}, {"expert": 4, "tensor": 2}, {"fsdp": 4, "expert": 2}]


@pytest.mark.parametrize("mesh", MESHES)
def test_reads_what_each_device_holds(stored, mesh):
    module = Mapped(**mesh)
    checkpoint.load(module, stored)
    wanted = expected(make_tensors())
    for path, param in parameters.named_parameters(module):
        np.testing.assert_array_equal(param.get_value(), wanted.pop(path), err_msg=path)
    assert not wanted


def test_reads_in_pieces_and_maps_each_for_itself(stored, monkeypatch):
    mapped = []
    original = files.view

    def record(file, begin, end):
        if begin:  # The header is read from the beginning of the file.
            mapped.append(end - begin)
        return original(file, begin, end)

    monkeypatch.setattr(files, "view", record)
    monkeypatch.setattr(safetensors_io, "_PIECE_BYTES", 5 * WIDTH * 4)
    module = Mapped()
    checkpoint.load(module, stored)
    wanted = expected(make_tensors())
    for path, param in parameters.named_parameters(module):
        np.testing.assert_array_equal(param.get_value(), wanted[path], err_msg=path)
    # Rows of 32 bytes, at most 5 of them at a time; the weights are read once.
    assert max(mapped) == 5 * WIDTH * 4
    assert sum(mapped) == sum(value.nbytes for value in wanted.values())


@pytest.mark.parametrize("mesh", MESHES)
def test_writes_what_it_read(stored, tmp_path, mesh):
    module = Mapped(**mesh)
    checkpoint.load(module, stored)
    tensors = make_tensors()
    assert checkpoint.save(module, tmp_path / "out", {}) == len(tensors)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("source", "shape", "message"),
    [
        (Stack(("a", "b")), (3, 2), "2 parts for a first dimension of 3"),
        (TensorRows("a", 0, 2, of=4), (3, 2), "does not make 3 rows"),
        (TensorRows("a", 0, 2, of=4, groups=2), (2, 2), "does not make 2 rows"),
    ],
)
def test_a_source_that_does_not_fill_its_parameter(source, shape, message):
    with pytest.raises(ValueError, match=message):
        tensor_map.pieces(source, "a", shape)


class Named:
    """A map from paths to sources, where a module is wanted."""

    def __init__(self, sources):
        self.checkpoint_name = sources.__getitem__


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"a": TensorRows("x", 0, 2, of=4)}, "are not divided up"),
        ({"a": TensorRows("x", 2, 4, of=4)}, "are not divided up"),
        (
            {"a": TensorRows("x", 0, 2, of=4), "b": TensorRows("x", 1, 3, of=4)},
            "are not divided up",
        ),
        ({"a": "x", "b": "x"}, "are not divided up"),
        ({"a": TensorRows("x", 0, 2, of=4), "b": TensorRows("x", 2, 4, of=5)}, "several shapes"),
    ],
)
def test_a_tensor_that_is_not_divided_up(sources, message):
    with pytest.raises(ValueError, match=message):
        tensor_map.by_tensor(Named(sources), [(path, (2, 3)) for path in sources])
