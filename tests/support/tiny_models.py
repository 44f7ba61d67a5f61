"""Tiny targets, drafters and engines, and the token sequences that they must produce."""

import copy
import dataclasses
import functools
import types
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash import registry
from dflash.config import schema
from dflash.drafters.base import Drafter
from dflash.drafters.none import NoDrafter
from dflash.inference import scheduler
from dflash.inference.engine import Engine
from dflash.models.decoder import Decoder
from dflash.models.qwen3 import Qwen3
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding, make_sharding

ONE_DEVICE = (1, 1, 1)

ARCHITECTURE = schema.TargetArchitecture(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    max_position_embeddings=256,
)
# What a drafter's architecture is told, where it has such a field.
TINY = {"num_hidden_layers": 1, "target_layer_ids": (0, 1), "block_size": 16}
# And what its tree is told.
TINY_TREE = {"budget": 6}
# What a drafter is told itself, where it has such a key.
SMALL = {"checkpoint": "random", "window": 3, "ngram_size": 3, "candidates": 2, "pool_size": 8}
# Tokens that the tiny target prefers: drafts of untrained drafters then hit now and then.
FAVOURITES, EMPHASIS = 4, 3.0


def sharding(data: int, fsdp: int, tensor: int) -> Sharding:
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    return make_sharding(sizes, schema.SHARDING_RULES)


@functools.cache
def target(
    mesh: tuple[int, int, int] = ONE_DEVICE, vocab_size: int = ARCHITECTURE.vocab_size
) -> Decoder:
    arch = dataclasses.replace(ARCHITECTURE, vocab_size=vocab_size)
    model = Qwen3(arch, dtype=jnp.float32, sharding=sharding(*mesh))
    parameters.initialize(model, jax.random.key(0))
    emphasis = np.where(np.arange(vocab_size) < FAVOURITES, EMPHASIS, 1.0).astype(np.float32)
    kernel = model.lm_head.kernel
    kernel.set_value(kernel.get_value() * emphasis)
    return model


def drafter(
    name: str,
    *,
    block_size: int | None = None,
    mesh: tuple[int, int, int] = ONE_DEVICE,
    arch: schema.TargetArchitecture = ARCHITECTURE,
    tree: bool = False,
) -> Drafter:
    """The registered drafter of this name with random weights, as small as its schema allows.

    Drafts trees where asked to, else what the strategy drafts by default.
    """
    entry = registry.DRAFTERS[name]
    model = registry.load(entry.implementation).create(
        _drafter_config(registry.load(entry.schema), block_size, tree),
        None,
        arch,
        dtype=jnp.dtype("float32"),
        sharding=sharding(*mesh),
    )
    parameters.initialize(model, jax.random.key(1))
    return model


def takes(name: str, key: str) -> bool:
    """Whether the config of a registered drafter has this key, such as block_size or tree."""
    fields = dataclasses.fields(registry.load(registry.DRAFTERS[name].schema))
    return key in {field.name for field in fields}


def _drafter_config(config_class, block_size, tree):
    known = {field.name for field in dataclasses.fields(config_class)}
    options = dict(SMALL)
    if block_size is not None:
        options["block_size"] = block_size
    groups = {"architecture": TINY, "tree": TINY_TREE} if tree else {"architecture": TINY}
    for group, values in groups.items():
        hint = typing.get_type_hints(config_class).get(group)
        if hint is not None:
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            kind = next(kind for kind in kinds if dataclasses.is_dataclass(kind))
            fields = {field.name for field in dataclasses.fields(kind)}
            options[group] = kind(**{key: values[key] for key in fields & set(values)})
    return config_class(**{key: value for key, value in options.items() if key in known})


def engine(
    model: Drafter | None = None,
    *,
    mesh: tuple[int, int, int] = ONE_DEVICE,
    max_length: int = 64,
    stop_ids: Sequence[int] = (),
    on: Decoder | None = None,
    **options,
) -> Engine:
    """An engine over the tiny target; `options` are DecodeConfig's. Nothing is compiled yet."""
    config = schema.DecodeConfig(**{"page_size": 16, "prefill_chunk": 16} | options)
    model = NoDrafter() if model is None else model
    return Engine(on or target(mesh), model, config, max_length=max_length, stop_ids=stop_ids)


def resampled(base: Engine, **sampling) -> Engine:
    """`base` with other sampling options; both share all programs."""
    twin = copy.copy(base)
    twin._config = dataclasses.replace(base._config, **sampling)
    return twin


def redrafted(base: Engine, model: Drafter) -> Engine:
    """`base` with other weights in its drafter; both share all programs."""
    twin = copy.copy(base)
    twin._drafter_params = Engine(
        base._abstract_target, model, base._config, max_length=base.layout.max_length
    )._drafter_params
    return twin


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of these lengths, whose first tokens tell them apart while there are enough."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i, length in enumerate(lengths):
        rest = rng.integers(0, ARCHITECTURE.vocab_size, length - 1).tolist()
        prompts.append((i % ARCHITECTURE.vocab_size, *rest))
    return prompts


def decode(
    run: Engine,
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int] | int,
    first_index: int = 0,
) -> list[scheduler.Completion]:
    """Completions of all prompts, in their order.

    Args:
      limits: max_new_tokens, of each prompt or of all.
      first_index: of the first request; another one means other noise.
    """
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    requests = [
        scheduler.Request(first_index + i, tuple(prompt), limit)
        for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
    ]
    events = scheduler.decode(run, requests)
    done = [event for event in events if isinstance(event, scheduler.Completion)]
    done.sort(key=lambda completion: completion.index)
    assert [one.index for one in done] == [request.index for request in requests]
    return done


@functools.cache
def _plain_engine() -> Engine:
    return engine(batch_size=8, sync_every=8, max_length=96)


@functools.cache
def _plain_outputs(prompts, num_tokens, first_index, **sampling):
    run = resampled(_plain_engine(), **sampling)
    return [one.output_ids for one in decode(run, prompts, num_tokens, first_index)]


def check_plain_outputs(
    run: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int], stop_ids: Sequence[int]
) -> None:
    """Asserts that an engine's outputs are those of plain decoding, greedy and drawn."""
    for temperature in (0.0, 0.8):
        how = {"temperature": temperature, "seed": 4}
        done = decode(resampled(run, **how), prompts, limits)
        wanted = expected(prompts, limits, stop_ids=stop_ids, **how)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted


def expected(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    first_index: int = 0,
    stop_ids: Sequence[int] = (),
    **sampling,
) -> list[tuple[tuple[int, ...], str]]:
    """Output ids and finish reasons as plain decoding has them, cut at limits and stop tokens."""
    results = []
    whole = _plain_outputs(tuple(prompts), 32, first_index, **sampling)
    for ids, limit in zip(whole, limits, strict=True):
        ids = ids[:limit]
        stops = [i for i, token in enumerate(ids) if token in stop_ids]
        ids = ids[: stops[0] + 1] if stops else ids
        results.append((ids, "stop" if stops else "length"))
    return results
