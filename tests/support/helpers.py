"""Small models, meshes and golden vectors that several tests share."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.checkpoints import checkpoint
from dflash.config import schema
from dflash.drafters.dflash.drafter import DFlash
from dflash.models.qwen3 import Qwen3
from dflash.parallel import parameters, sharding
from support import TESTS

GOLDEN = TESTS / "golden"
GOLDEN_CASES = ("qwen3_b1", "qwen3_v12", "qwen3_v64")
# A target for commands to run, as YAML. Without a checkpoint its tokens are bytes; one layer, since
# every command compiles all of its programs.
BYTE_TARGET = """{name: qwen3, checkpoint: random, architecture: {
  vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 256}}"""


def make_sharding(**axis_sizes: int) -> sharding.Sharding:
    """A mesh over the first devices, one of them unless axis sizes say otherwise."""
    sizes = dict.fromkeys(sharding.MESH_AXES, 1) | axis_sizes
    return sharding.make_sharding(sizes, schema.SHARDING_RULES)


def make_architecture(**changes) -> schema.TargetArchitecture:
    """A target of a few thousand weights."""
    values = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    return schema.TargetArchitecture(**(values | changes))


@functools.cache
def make_target(kind=Qwen3, *, dtype=jnp.float32, **changes):
    """A target with random weights on one device; shared, so never to be changed."""
    target = kind(make_architecture(**changes), dtype=dtype, sharding=make_sharding())
    parameters.initialize(target, jax.random.key(0))
    return target


def move(module, abstract):
    """Fills an abstract module on another mesh with the weights of `module`."""
    places = {path: p.get_value().sharding for path, p in parameters.named_arrays(abstract)}
    values = {
        path: jax.device_put(np.asarray(p.get_value()), places[path])
        for path, p in parameters.named_arrays(module)
    }
    parameters.assign(abstract, values)
    return abstract


def zeros(abstract):
    """Fills an abstract tree with zeros, each placed as it says."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), abstract)


def make_cache(target, batch: int, max_length: int, *, page_size: int = 8):
    """A paged cache in which every sequence owns scattered pages full of stale rows."""
    per_sequence, shares = -(-max_length // page_size), target.sharding.size("pages")
    owned = batch // shares * per_sequence  # pages of one share, but for its scratch page
    abstract = target.new_cache(
        batch=batch,
        pages_per_sequence=per_sequence,
        num_pages=shares * (owned + 1),
        page_size=page_size,
    )
    stale = jax.tree.map(
        lambda x: jnp.full(x.shape, 100, x.dtype, device=x.sharding),
        (abstract.keys, abstract.values),
    )
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(owned) + 1 for _ in range(shares)])
    table = table.reshape(batch, per_sequence).astype(np.int32)
    return type(abstract)(*stale, jax.device_put(table, abstract.page_table.sharding))


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    """The vectors of a golden case; its README says what each means."""
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return dict(arrays)


@functools.cache
def golden_models(case: str) -> tuple[Qwen3, DFlash]:
    """Target and drafter of a golden case, in float32."""
    return load(Qwen3, GOLDEN / case / "target"), load(DFlash, GOLDEN / case / "draft")


class TableHeads:
    """A target's embedding and output head without the target."""

    def __init__(self, embedding, head):
        self.embedding, self.head = jnp.asarray(embedding), jnp.asarray(head)

    def embed(self, tokens):
        return self.embedding[tokens]

    def unembed(self, hidden):
        return jnp.einsum("...d,vd->...v", hidden, self.head, precision="highest")


def load(kind, directory: pathlib.Path, **options):
    """A model of class `kind` in float32 from a checkpoint directory."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    options = {"dtype": jnp.float32, "sharding": make_sharding()} | options
    module = kind(kind.architecture_from_hf(config), **options)
    checkpoint.load(module, directory)
    return module


def import_transformers():
    """torch and transformers, or a skip that says how to get them."""
    reason = "compares with transformers; pip install 'dflash[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    return torch, pytest.importorskip("transformers", reason=reason)
