"""The Hugging Face layout: reading sharded, casting, damage, writing."""

import json
import pathlib
import tempfile
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.models import failed_load, make_sharding

from dflash import errors
from dflash.checkpoints import checkpoint, safetensors_io
from dflash.layers.linear import Embedding, Linear, RMSNorm
from dflash.parallel import parameters

VOCAB, WIDTH, MLP = 24, 16, 32
MISFIT = "these weights do not belong to this config.json"
AGAIN = "copy or download the file again"


class Toy(nnx.Module):
    """One parameter of each kind."""

    ignored_checkpoint_names = ("lm_head.weight",)
    ignored_checkpoint_suffixes = (".scratch",)

    def __init__(self, *, dtype=jnp.float32, **mesh):
        build = {"dtype": dtype, "sharding": make_sharding(**mesh)}
        self.embed = Embedding(VOCAB, WIDTH, **build)
        self.up = Linear(WIDTH, MLP, ("embed", "mlp"), **build)
        self.norm = RMSNorm(WIDTH, 1e-6, **build)

    @staticmethod
    def checkpoint_name(path):
        return f"model.{path.rpartition('.')[0]}.weight"


EMBED, UP, NORM = "model.embed.weight", "model.up.weight", "model.norm.weight"


def make_tensors(dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = {EMBED: (VOCAB, WIDTH), UP: (MLP, WIDTH), NORM: (WIDTH,)}
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def write_shards(directory, tensors):
    """Writes one file per tensor, and their index."""
    weight_map = {}
    for number, (name, value) in enumerate(tensors.items(), start=1):
        weight_map[name] = f"model-{number:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: value}, directory / weight_map[name])
    write_index(directory, weight_map)
    return weight_map


def write_index(directory, weight_map):
    (directory / safetensors_io.INDEX).write_text(json.dumps({"weight_map": weight_map}))


def values_of(module):
    return {
        path: np.asarray(param.get_value()) for path, param in parameters.named_parameters(module)
    }


def assert_holds(module, tensors):
    """Asserts that every parameter equals its tensor, bit for bit, in the module's dtype."""
    for path, value in values_of(module).items():
        expected = tensors[module.checkpoint_name(path)].astype(value.dtype)
        expected = expected.T if path.endswith(".kernel") else expected
        assert value.tobytes() == expected.tobytes(), path


def failure(directory):
    return failed_load(Toy(), directory)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("stored", [np.float32, jnp.bfloat16, np.float16])
@pytest.mark.parametrize("mesh", [{}, {"tensor": 8}, {"data": 2, "fsdp": 2, "tensor": 2}])
def test_reads_every_dtype_onto_every_mesh(tmp_path, dtype, stored, mesh):
    tensors = make_tensors(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    module = Toy(dtype=dtype, **mesh)
    declared = {path: p.get_value().sharding for path, p in parameters.named_parameters(module)}
    checkpoint.load(module, tmp_path)
    assert_holds(module, tensors)
    for path, param in parameters.named_parameters(module):
        assert param.get_value().sharding == declared[path]


def test_each_device_reads_its_own_part(tmp_path, monkeypatch):
    save_file(make_tensors(), tmp_path / "model.safetensors")
    shapes = []
    original = safetensors_io._aligned_empty

    def record(shape, dtype):
        shapes.append(shape)
        return original(shape, dtype)

    monkeypatch.setattr(safetensors_io, "_aligned_empty", record)
    checkpoint.load(Toy(tensor=4, data=2), tmp_path)
    # Copies for the other half of the data axis are not read again.
    assert sorted(shapes) == sorted(
        [(VOCAB // 4, WIDTH)] * 4 + [(WIDTH, MLP // 4)] * 4 + [(WIDTH,)]
    )


def test_a_single_file_takes_precedence_over_an_index(tmp_path):
    """As in transformers: the index was left over when the single file was written."""
    old, new = make_tensors(), {name: value + 1 for name, value in make_tensors().items()}
    write_shards(tmp_path, old)
    save_file(new, tmp_path / safetensors_io.WEIGHTS)
    toy = Toy()
    safetensors_io.load(toy, tmp_path)
    np.testing.assert_array_equal(values_of(toy)["norm.scale"], new[NORM])


class Tied(Toy):
    checkpoint_copies = types.MappingProxyType({"lm_head.weight": EMBED})


def test_a_copy_of_a_tied_weight_must_equal_it(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, "_PIECE_BYTES", 100)  # Several chunks.
    tensors = make_tensors()
    save_file(tensors | {"lm_head.weight": tensors[EMBED]}, tmp_path / safetensors_io.WEIGHTS)
    safetensors_io.load(Tied(), tmp_path)
    other = tensors[EMBED].copy()
    other[-1, -1] += 1
    for head in (other, tensors[EMBED][:-1], tensors[EMBED].astype(np.float16)):
        save_file(tensors | {"lm_head.weight": head}, tmp_path / safetensors_io.WEIGHTS)
        with pytest.raises(errors.CheckpointError, match="set tie_word_embeddings to false"):
            safetensors_io.load(Tied(), tmp_path)


def test_known_extras_are_ignored(tmp_path):
    extra = np.zeros(3, np.float32)
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight", "model.up.scratch"]
    tensors = make_tensors()
    save_file(tensors | dict.fromkeys(names, extra), tmp_path / "model.safetensors")
    module = Toy()
    checkpoint.load(module, tmp_path)
    assert_holds(module, tensors)


def test_missing_tensors_are_listed(tmp_path):
    save_file({NORM: make_tensors()[NORM]}, tmp_path / "model.safetensors")
    assert failure(tmp_path) == (
        f"{tmp_path}/model.safetensors: 2 of 3 tensors missing: '{EMBED}', '{UP}'; {MISFIT}"
    )


def test_wrong_shape(tmp_path):
    tensors = make_tensors()
    tensors[UP] = tensors[UP].T.copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert failure(tmp_path) == (
        f"{tmp_path}/model.safetensors: tensor '{UP}' has shape [16, 32], expected [32, 16]; "
        f"{MISFIT}"
    )


def test_missing_shard(tmp_path):
    weight_map = write_shards(tmp_path, make_tensors())
    (tmp_path / weight_map[UP]).unlink()
    assert failure(tmp_path) == (
        f"{tmp_path}/{weight_map[UP]}: missing; model.safetensors.index.json says it holds '{UP}'"
    )


def test_index_names_the_wrong_shard(tmp_path):
    weight_map = write_shards(tmp_path, make_tensors())
    write_index(tmp_path, weight_map | {UP: weight_map[NORM]})
    assert failure(tmp_path) == (
        f"{tmp_path}/{weight_map[NORM]}: lacks '{UP}', "
        "which model.safetensors.index.json says it holds"
    )


def test_index_does_not_lead_out_of_the_directory(tmp_path):
    write_index(tmp_path, {UP: "../x.safetensors"})
    assert failure(tmp_path) == (
        f"{tmp_path}/model.safetensors.index.json: '../x.safetensors' is not the name of a file "
        "beside it"
    )


@pytest.mark.parametrize("shard", [None, 5, ["a"], {"a": "b"}])
def test_index_of_other_things_than_names(tmp_path, shard):
    write_index(tmp_path, {UP: shard})
    assert failure(tmp_path) == (
        f"{tmp_path}/model.safetensors.index.json: weight_map: '{UP}': "
        f"expected the name of a file, got {shard!r}"
    )


def test_truncated_file_names_the_tensor(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file(make_tensors(), file)
    content = file.read_bytes()
    file.write_bytes(content[: -MLP * WIDTH * 4 - 1])
    # The library writes tensors of one dtype in the order of their names: embed, norm, up.
    cut, end = len(content) - MLP * WIDTH * 4 - 1, len(content) - MLP * WIDTH * 4
    assert failure(tmp_path) == (
        f"{file}: truncated: {cut:,} bytes, but tensor '{NORM}' ends at {end:,}; {AGAIN}"
    )


@pytest.mark.parametrize("content", [b"", b"\x10\0\0", b"\xff" * 64, b"\x40\0\0\0\0\0\0\0{}"])
def test_file_too_short_for_its_header(tmp_path, content):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    assert failure(tmp_path) == (
        f"{file}: truncated or corrupt: {len(content)} bytes do not hold its header; {AGAIN}"
    )


HEADERS = [
    *(b"not json", b"[1]", b'{"a":1}', b'{"a":{"dtype":"F32"}}', b"[" * 100_000),
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,0]}}',
    b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[-4,0]}}',
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_corrupt_header(tmp_path, header):
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    assert failure(tmp_path) == f"{file}: corrupt header; {AGAIN}"


@settings(max_examples=60)
@given(
    st.sampled_from(["dtype", "shape", "data_offsets"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=4,
    ),
)
def test_any_header_is_read_or_refused_in_a_line(field, value):
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]} | {field: value}
    header = json.dumps({UP: entry}).encode()
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory) / "model.safetensors"
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
        assert directory in failure(pathlib.Path(directory))


def test_stored_dtype(tmp_path):
    for stored in (np.float32, jnp.bfloat16, np.float16):
        save_file(make_tensors(stored), tmp_path / "model.safetensors")
        assert checkpoint.stored_dtype(tmp_path) == stored
    mixed = make_tensors(jnp.bfloat16)
    mixed[NORM] = mixed[NORM].astype(np.float16)
    save_file(mixed, tmp_path / "model.safetensors")
    assert checkpoint.stored_dtype(tmp_path) == np.float32


def loaded_toy(directory, tensors, **options):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    module = Toy(**options)
    checkpoint.load(module, directory)
    return module


@pytest.mark.parametrize("mesh", [{}, {"data": 2, "fsdp": 2, "tensor": 2}])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_writes_what_it_read(tmp_path, mesh, dtype):
    tensors = make_tensors(dtype)
    module = loaded_toy(tmp_path / "in", tensors, dtype=dtype, **mesh)
    assert checkpoint.save(module, tmp_path / "out", {"a": 1}) == 3
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: value.tobytes() for name, value in written.items()} == {
        name: value.tobytes() for name, value in tensors.items()
    }
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"a": 1, "torch_dtype": jnp.dtype(dtype).name}


def test_splits_into_shards(tmp_path):
    tensors = make_tensors()
    module = loaded_toy(tmp_path / "in", tensors)
    checkpoint.save(module, tmp_path / "out", {}, max_shard_bytes=VOCAB * WIDTH * 4 + WIDTH * 4)
    index = json.loads((tmp_path / "out" / safetensors_io.INDEX).read_text())
    assert index["metadata"] == {"total_size": sum(value.nbytes for value in tensors.values())}
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    again = Toy()
    checkpoint.load(again, tmp_path / "out")
    assert_holds(again, tensors)
