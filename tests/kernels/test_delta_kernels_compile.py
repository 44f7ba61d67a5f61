"""Tests that gated DeltaNet's kernels compile for TPUs, at published shapes."""

import math
import re

import jax.numpy as jnp
import pytest
from support.tpu_compiler import CHIPS, compile_for

from dflash.kernels.delta_block import Block, Heads, commit_block, verify_block

pytestmark = pytest.mark.tpu_compiler

BF16, F32, INT32 = jnp.bfloat16, jnp.float32, jnp.int32
V5P = CHIPS[1]
WIDTH, TAPS = 128, 4
SHAPES = {"4b": (16, 32), "27b over four": (4, 12), "397b": (16, 64)}
CASES = [
    *[(chip, "4b", 16, False) for chip in CHIPS],
    (V5P, "27b over four", 16, False),
    (V5P, "397b", 8, False),
    (V5P, "4b", 1, False),
    (V5P, "4b", 33, True),
    (V5P, "27b over four", 64, True),
]


def memory_of(name, batch):
    key_heads, value_heads = SHAPES[name]
    channels = (2 * key_heads + value_heads) * WIDTH
    memory = (batch, value_heads, WIDTH, WIDTH), F32
    return channels, memory, ((batch, TAPS - 1, channels), BF16)


@pytest.mark.parametrize(("chip", "name", "rows", "tree"), CASES)
def test_verification(chip, name, rows, tree):
    batch = 2
    channels, memory, before = memory_of(name, batch)
    heads = SHAPES[name][1]
    shapes = [
        ((batch, rows, channels + heads * WIDTH), BF16),
        *[((batch, rows, heads), F32)] * 2,
        ((channels, TAPS), BF16),
        ((WIDTH,), F32),
        memory,
        before,
        *([((batch, rows, rows), jnp.bool_)] if tree else []),
    ]
    compile_for(chip, lambda *x: verify_block(Heads(*x[:5]), *x[5:], eps=1e-6), shapes)


@pytest.mark.parametrize(("chip", "name", "rows", "tree"), CASES)
def test_a_commit_updates_the_state_in_place(chip, name, rows, tree):
    batch = 16
    channels, memory, before = memory_of(name, batch)
    key_heads, heads = SHAPES[name]
    shapes = [
        memory,
        before,
        ((batch, rows, key_heads * WIDTH), F32),
        ((batch, rows, heads * WIDTH), F32),
        ((batch, rows, heads), F32),
        ((batch, rows, channels + heads * WIDTH), BF16),
        ((batch,), INT32),
        *([((batch, rows), INT32)] if tree else []),
    ]
    compiled = compile_for(chip, _commit, shapes, donate=(0, 1))
    assert compiled.memory_analysis().alias_size_in_bytes >= 4 * math.prod(memory[0])
    state = "f32[" + ",".join(map(str, memory[0])) + "]"
    assert state in compiled.as_text()
    copies = [line for line in compiled.as_text().splitlines() if re.search(r" copy\S*\(", line)]
    assert not any(state in line for line in copies)


def _commit(memory, before, keys, updates, log_decay, *others):
    return commit_block(memory, before, Block(keys, updates, log_decay), *others)
