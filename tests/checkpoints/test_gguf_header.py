"""Headers of GGUF files: as the `gguf` package reads them, and damaged in every way."""

import os
import struct

import gguf
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import support
from support import gguf_files

from dflash import errors
from dflash.checkpoints.gguf import file_header, hf_tensors, model_directory

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "ab"]


def write(file):
    """A file of some kilobytes, with values of every kind that models have."""
    values = gguf_files.llama_values(32, 2) | {
        "general.license": "mit", "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.scores": [float(-i) for i in range(len(TOKENS))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
    }  # fmt: skip
    shapes = {"output_norm.weight": 32, "blk.0.attn_q.weight": (32, 32)}
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors["token_embd.weight"] = np.zeros((len(TOKENS), 32), np.float32)
    kinds = {"token_embd.weight": gguf.GGMLQuantizationType.Q8_0}
    gguf_files.write_parts(file, values, tensors, kinds)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "valid.gguf"
    write(file)
    return file


def failure(file):
    message = support.failure(file_header.read_header, file)
    assert message.startswith(f"{file}: ")
    return message.removeprefix(f"{file}: ")


def test_the_header_is_that_of_the_package(valid):
    header = file_header.read_header(valid)
    reader = gguf.GGUFReader(str(valid))
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata == {key: field.contents() for key, field in fields.items()}
    assert list(header.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        entry = header.tensors[tensor.name]
        assert entry.kind == tensor.tensor_type.name
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert (entry.begin, entry.end - entry.begin) == (tensor.data_offset, tensor.n_bytes)


def read_all(file):
    """What a command does with a file before it reads weights, and then every tensor."""
    directory = model_directory.open_file(file)
    for tensor in hf_tensors.read_tensors(directory).values():
        tensor.read(tuple(slice(0, size) for size in tensor.shape))


def test_the_valid_file_is_read(valid):
    read_all(valid)


@hypothesis.settings(max_examples=120)
@hypothesis.given(data=st.data())
def test_a_mutated_file_is_read_or_refused_in_one_line(valid, data):
    content = bytearray(valid.read_bytes())
    header = 9000  # the bytes up to here decide how the rest is read
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header))
        width = data.draw(st.sampled_from([1, 4, 8]))
        value = data.draw(
            st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
        )
        content[at : at + width] = value.to_bytes(8, "little")[:width]
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    file = valid.with_name("mutated.gguf")
    file.write_bytes(content)
    file_header._read_header.cache_clear()
    problem = ""
    try:
        read_all(file)
    except errors.CheckpointError as error:
        problem = str(error)
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file: it begins with b'GGML', not b'GGUF'"),
        (4, struct.pack("<I", 1), "GGUF version 1 is not supported, only little-endian files"),
        (4, struct.pack(">I", 3), "big-endian is not supported, only little-endian files"),
        (8, struct.pack("<Q", 2**63), "truncated or corrupt"),
        (16, struct.pack("<Q", 2**63), "truncated or corrupt"),
        (24, struct.pack("<Q", 2**64 - 1), "truncated or corrupt"),
    ],
)
def test_wrong_beginnings(valid, tmp_path, at, value, message):
    content = bytearray(valid.read_bytes())
    content[at : at + len(value)] = value
    (tmp_path / "x.gguf").write_bytes(content)
    assert message in failure(tmp_path / "x.gguf")


def tensor_info(name, *shape, kind=0, offset=0):
    encoded = name.encode()
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(encoded)) + encoded + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor_info("a", 2**40, 2**40)], "truncated: 65,600 bytes, but tensor 'a' ends at "),
        ([tensor_info("a", 2**63, 2**63, 2**63, 2**63)], "truncated: 65,600 bytes"),
        ([tensor_info("a")], "corrupt (tensor 'a' is F32 of shape [])"),
        ([tensor_info("a", 0)], "corrupt (tensor 'a' is F32 of shape [0])"),
        ([tensor_info("a", 33, kind=8)], "corrupt (tensor 'a' is Q8_0 of shape [33])"),
        ([tensor_info("a", 8, kind=99)], "tensor 'a' has type 99, which is not supported"),
        ([tensor_info("a", 8, kind=24)], "tensor 'a' has type I8, which is not supported"),
        ([tensor_info("a", 8, offset=32)], "corrupt (tensor 'a' begins at 96, not at 64)"),
        ([tensor_info("a", 8), tensor_info("a", 8, offset=32)], "corrupt (two tensors 'a')"),
    ],
)
def test_impossible_tensors(tmp_path, tensors, message):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 0) + b"".join(tensors)
    (tmp_path / "x.gguf").write_bytes(head.ljust(65_600, b"\0"))
    assert failure(tmp_path / "x.gguf").startswith(message)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (struct.pack("<IQ", 8, 2**25), "truncated or corrupt: "),
        (struct.pack("<IIQ", 9, 0, 2**60), "truncated or corrupt: "),
        (struct.pack("<IIQ", 9, 8, 2**60), "truncated or corrupt: "),
        (struct.pack("<IIQQ", 9, 8, 1, 2**60), "truncated or corrupt: "),
        (struct.pack("<IQ", 8, 2**25).ljust(2**26), "a string or an array of 33,554,432 values"),
        (struct.pack("<IIQ", 9, 9, 1), "an array of arrays"),
        (struct.pack("<I", 13), "13 is not a valid GGUFValueType"),
    ],
)
def test_impossible_values(tmp_path, value, message):
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + value
    (tmp_path / "x.gguf").write_bytes(head)
    assert message in failure(tmp_path / "x.gguf")


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.gguf")
    assert failure(tmp_path / "x.gguf") == "not a regular file"


def test_a_file_in_a_bucket_is_refused():
    assert failure("gs://bucket/x.gguf") == "GGUF files are read from a disk; copy it to one"
