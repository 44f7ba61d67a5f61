"""Golden vectors, and the models of other libraries that some tests compare with."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dflash.checkpoints import checkpoint
from dflash.config import registry
from dflash.config.schema import DecodeConfig, TargetConfig
from dflash.drafters.base import Drafter
from dflash.drafters.dflash import DFlash
from dflash.inference.engine import Engine
from dflash.inference.request import Request, RequestOutput
from dflash.loading import models
from dflash.models.decoder import Decoder
from support import TESTS
from support.engines import decode_all
from support.models import make_cache, make_sharding

GOLDEN = TESTS / "golden"

GOLDEN_CASES = (
    "qwen3_b1", "qwen3_v12", "qwen3_v64", "qwen3moe_v20", "qwen3yarn_v14", "deepseek_v14",
)  # fmt: skip
# Cases of z-lab's package, whose drafters scale the target's embeddings and bound their logits.
ZLAB_CASES = ("dflash2_zlab_v96", "gemma3_zlab_v72", "muse_glimmer_v80", "minimax_m2_v64")
# Cases without arrays of single cycles.
FAMILY_CASES = (
    *("qwen2_v9", "gpt_oss_v9", "gemma3_v9", "qwen3_5_v9", "qwen3_next_v9"),
    "muse_assistant_v72",
)


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    """The vectors of a golden case; its README says what each means."""
    with np.load(GOLDEN / case / "golden.npz") as arrays:
        return dict(arrays)


@functools.cache
def golden_models(case: str) -> tuple[Decoder, DFlash]:
    """Target and drafter of a golden case, in float32."""
    target, directory = load_target(GOLDEN / case / "target"), GOLDEN / case / "draft"
    hf = checkpoint.read_config(directory)
    name, _ = models.find_class(hf, directory, registry.DRAFTERS)
    config = registry.load_schema(registry.DRAFTERS[name])(checkpoint=str(directory))
    return target, build_drafter(config, target.arch)


@functools.cache
def prefilled(case: str, name: str = "input_ids") -> tuple[jax.Array, jax.Array]:
    """The target's logits and features after each token of an array of a case, [1, T, ·]."""
    target, drafter = golden_models(case)
    ids = jnp.asarray(golden(case)[name], jnp.int32)[None]

    @jax.jit
    def prefill(cache):
        positions = jnp.arange(ids.shape[1])[None]
        output = target(ids, positions, cache, feature_layers=drafter.feature_layers)
        return target.unembed(output.hidden), output.features

    return prefill(make_cache(target, 1, ids.shape[1]))


def decode_prompts(
    case: str,
    target: Decoder,
    drafter: Drafter,
    *,
    num_tokens: int,
    num_requests: int = 1,
    **options,
) -> list[RequestOutput]:
    """Returns completions of a case's prompt; `options` are DecodeConfig's."""
    prompt = tuple(golden(case)["input_ids"].tolist())
    config = DecodeConfig(**options)
    engine = Engine(target, drafter, config, max_length=len(prompt) + num_tokens)
    return decode_all(engine, [Request(i, prompt, num_tokens) for i in range(num_requests)])


def check_decoding(case: str, target: Decoder, drafter: Drafter, **options) -> None:
    """Asserts that an engine gives the golden output in as many cycles, and decodes past it."""
    vectors = golden(case)
    expected = vectors["output_ids"][len(vectors["input_ids"]) :].tolist()
    lengths = vectors["acceptance_lengths"].tolist()
    for done in decode_prompts(case, target, drafter, num_tokens=len(expected) + 20, **options):
        assert list(done.output_ids[: len(expected)]) == expected
        assert list(done.acceptance_lengths[: len(lengths)]) == lengths


def load_target(directory: pathlib.Path, **options) -> Decoder:
    """The target of a checkpoint directory, of the registered family, in float32."""
    hf = checkpoint.read_config(directory)
    _, kind = models.find_class(hf, directory, registry.TARGETS)
    return load(kind, directory, **options)


def build_target(place, quantization: str | None = None, **mesh) -> Decoder:
    """The target of a checkpoint, built and loaded as commands do, in float32."""
    config = TargetConfig(checkpoint=str(place), quantization=quantization)
    source = models.find_target(config)
    model = models.build_target(config, source, dtype="float32", sharding=make_sharding(**mesh))
    models.load_weights(model, source)
    return model


def build_drafter(config, arch, *, loads: bool = True) -> Drafter:
    """The drafter of a config, built for a target's shape and loaded as commands do, in float32."""
    source = models.find_drafter(config)
    build = {"dtype": "float32", "sharding": make_sharding()}
    drafter = models.build_drafter(config, source, arch, **build)
    if loads:
        models.load_weights(drafter, source)
    return drafter


def whole_logits(model: Decoder, tokens=range(12)) -> np.ndarray:
    """The logits [T, V] after each token of one text, by a pass without a cache."""

    @jax.jit
    def run(rows):
        hidden, _ = model.forward(rows, jnp.arange(rows.shape[1])[None], jnp.ones_like(rows))
        return model.unembed(hidden)[0]

    return np.asarray(run(jnp.asarray(np.array(tokens))[None]))


class TableHeads:
    """A target's embedding and output head without the target."""

    def __init__(self, embedding, head):
        self.embedding, self.head = jnp.asarray(embedding), jnp.asarray(head)

    def embed(self, tokens):
        return self.embedding[tokens]

    def unembed(self, hidden):
        return jnp.einsum("...d,vd->...v", hidden, self.head, precision="highest")

    table_rows, head_products = embed, unembed


def load(kind, directory: pathlib.Path, **options):
    """A model of class `kind` in float32 from a checkpoint directory."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    options = {"dtype": jnp.float32, "sharding": make_sharding()} | options
    module = kind(kind.architecture_from_hf(config), **options)
    checkpoint.load(module, directory)
    return module


def import_transformers():
    """torch and transformers, or a skip that says how to get them."""
    reason = "compares with transformers; pip install 'dflash-jax[parity]'"
    torch = pytest.importorskip("torch", reason=reason)
    return torch, pytest.importorskip("transformers", reason=reason)
