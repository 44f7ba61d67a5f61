"""The tiny family that tests share: targets, drafters, caches and meshes."""

import dataclasses
import functools
import types
import typing
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dflash.checkpoints import checkpoint
from dflash.config import registry, schema
from dflash.drafters.base import Drafter
from dflash.inference.logits.sampling import SamplingParams, SequenceSampler
from dflash.inference.request import RequestSampling
from dflash.layers.recurrent_state import RecurrentState
from dflash.models.decoder import Decoder
from dflash.models.dense import Qwen3
from dflash.parallel import parameters, sharding
from support import failure


def make_sharding(
    data: int = 1, fsdp: int = 1, tensor: int = 1, expert: int = 1
) -> sharding.Sharding:
    """A mesh over the first devices, one of them unless axis sizes say otherwise."""
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert}
    return sharding.make_sharding(sizes, schema.SHARDING_RULES)


def make_architecture(**changes) -> schema.TargetArchitecture:
    """A target of a few thousand weights."""
    values = {
        "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512,
    }  # fmt: skip
    return schema.TargetArchitecture(**(values | changes))


_LATENT = {
    "head_dim": 8, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 20,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 8,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}  # fmt: skip
_KINDS = ("sliding_attention", "sliding_attention", "full_attention")
_WINDOWS = {"sliding_window": 7, "layer_types": _KINDS}
_HYBRID = {
    "head_dim": 8, "num_hidden_layers": 2, "layer_types": ("full_attention", "linear_attention"),
    "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6,
}  # fmt: skip
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 2}
_GEMMA4 = _WINDOWS | {"global_head_dim": 24, "num_global_key_value_heads": 1}
# What the shape of a family has beside that of a dense decoder, or instead.
OWN_FIELDS = {
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_moe": _EXPERTS | {"norm_topk_prob": True},
    "gpt_oss": _LOCAL_EXPERTS | {"sliding_window": 5},
    "deepseek_v3": _LATENT,
    "kimi_k25": _LATENT,
    "minimax_m2": _LOCAL_EXPERTS | {"head_dim": 8, "partial_rotary_factor": 0.5},
    "muse_glimmer": _WINDOWS,
    "muse_glimmer_text": _WINDOWS,
    "gemma3": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
}


def family_architecture(
    family: str, base: schema.TargetArchitecture | None = None, **changes
) -> schema.TargetArchitecture:
    """The shape of a small target of a registered family, with the sizes of `base`."""
    entry = registry.TARGETS[family]
    kind = typing.get_type_hints(registry.load_schema(entry))["architecture"]
    (shape,) = (option for option in typing.get_args(kind) if dataclasses.is_dataclass(option))
    values = vars(base or make_architecture()) | OWN_FIELDS.get(family, {}) | changes
    return shape(**values)


ONE_DEVICE = (1, 1, 1)

# The member that tests decode with: few tokens, so that drafts hit now and then.
ARCHITECTURE = make_architecture(
    vocab_size=24, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=8,
    max_position_embeddings=256,
)  # fmt: skip

# A target for commands to run, as YAML. Without a checkpoint its tokens are bytes; one layer, since
# every command compiles all of its programs.
BYTE_TARGET = """{name: qwen3, checkpoint: random, architecture: {
  vocab_size: 256, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 256}}"""

# A Python API over such a target, and a drafter without weights.
_SMALL_LLM = (
    *("configs/random_tiny_dflash.yml", f"target={BYTE_TARGET}", "drafter.name=ngram"),
    *("target.architecture.tie_word_embeddings=false", "target.architecture.eos_token_id=[0]"),
    "target.architecture.vocab_size=128",  # Every token is a character.
    *("decode.max_new_tokens=24", "decode.batch_size=2", "decode.sync_every=2"),
    *("decode.prefill_chunk=32", "decode.partial_dispatches=false"),
)


@functools.cache
def small_llm():
    """Returns this API, whose programs all tests share."""
    import dflash

    return dflash.LLM(*_SMALL_LLM, "prompts.chat=true")


# What a drafter's architecture is told, where it has such a field.
TINY = {
    "num_hidden_layers": 1,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "target_layer_ids": (0, 1),
    "block_size": 16,
    "selector_hidden_size": 0,  # Drafting reads tables, which loading computes from networks.
}

# And what its tree is told.
TINY_TREE = {"budget": 6}

# What a drafter is told itself, where it has such a key.
SMALL = {"checkpoint": "random", "ngram_size": 3, "candidates": 2, "pool_size": 8}

# Tokens that the tiny target prefers: drafts of untrained drafters then hit now and then.
FAVORITES, EMPHASIS = 4, 3.0


def random_module(kind, shape, *, seed: int = 0, dtype=jnp.float32, placed=None, **options):
    """A target or a drafter of a shape with random weights, on one device unless told otherwise."""
    module = kind(shape, dtype=jnp.dtype(dtype), sharding=placed or make_sharding(), **options)
    parameters.initialize(module, jax.random.key(seed))
    return module


@functools.cache
def make_target(kind=Qwen3, *, dtype=jnp.float32, **changes):
    """A target with random weights on one device; shared, so never to be changed."""
    return random_module(kind, make_architecture(**changes), dtype=dtype)


@functools.cache
def target(
    mesh: tuple[int, int, int] = ONE_DEVICE, vocab_size: int = ARCHITECTURE.vocab_size
) -> Decoder:
    arch = dataclasses.replace(ARCHITECTURE, vocab_size=vocab_size)
    return with_favorites(random_module(Qwen3, arch, placed=make_sharding(*mesh)))


def with_favorites(model: Decoder) -> Decoder:
    """Lets a target prefer its first tokens; returns it."""
    kernel = model.lm_head.kernel
    factors = np.where(np.arange(model.arch.vocab_size) < FAVORITES, EMPHASIS, 1.0)
    kernel.set_value(kernel.get_value() * factors.astype(np.float32))
    return model


def drafter(
    name: str,
    *,
    block_size: int | None = None,
    mesh: tuple[int, int, int] = ONE_DEVICE,
    arch: schema.TargetArchitecture = ARCHITECTURE,
    tree: bool = False,
    short_pass: bool = False,
    sharding: sharding.Sharding | None = None,
) -> Drafter:
    """The registered drafter of this name with random weights, as small as its schema allows.

    Drafts trees where asked to, else what the strategy drafts by default. A strategy without blocks
    takes no notice of `block_size`; `sharding` stands in for that of `mesh`.
    """
    entry = registry.DRAFTERS[name]
    kind = registry.load(entry.implementation)
    model = kind.create(
        _drafter_config(registry.load_schema(entry), block_size, tree, short_pass), None, arch,
        dtype=jnp.dtype("float32"), sharding=sharding or make_sharding(*mesh),
        **({"family": Qwen3} if kind.drafts_with_model else {}),
    )  # fmt: skip
    parameters.initialize(model, jax.random.key(1))
    return model


def takes(name: str, key: str) -> bool:
    """Whether the config of a registered drafter has this key, such as block_size or tree."""
    fields = dataclasses.fields(registry.load(registry.DRAFTERS[name].schema))
    return key in {field.name for field in fields}


def _drafter_config(config_class, block_size, tree, short_pass):
    known = {field.name for field in dataclasses.fields(config_class)}
    options = {**SMALL, "short_pass": short_pass}
    if block_size is not None:
        options["block_size"] = block_size
    if "ngram_size" in known:  # A window of Jacobi iterations, and not of a context.
        options["window"] = 3
    groups = {"architecture": TINY, "tree": TINY_TREE} if tree else {"architecture": TINY}
    for group, values in groups.items():
        hint = typing.get_type_hints(config_class).get(group)
        if hint is not None:
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            kind = next(kind for kind in kinds if dataclasses.is_dataclass(kind))
            fields = {field.name for field in dataclasses.fields(kind)}
            options[group] = kind(**{key: values[key] for key in fields & set(values)})
    return config_class(**{key: value for key, value in options.items() if key in known})


def packed_rows(rows, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns segment ids and positions, int32 [B, T], of rows as lists of document lengths."""
    segments, positions = np.zeros((2, len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        numbers = np.repeat(np.arange(len(lengths)) + 1, lengths)
        segments[row, : len(numbers)] = numbers
        positions[row, : len(numbers)] = np.concatenate([np.arange(size) for size in lengths])
    return segments, positions


def make_sampling(temperatures: Sequence[float], seed: int = 0) -> SamplingParams:
    """Returns the parameters of sequences, numbered from 0."""
    each = [
        SamplingParams.of(RequestSampling(temperature=temperature, seed=seed, sequence=i))
        for i, temperature in enumerate(temperatures)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each).with_keys()


def greedy(batch: int) -> SequenceSampler:
    """A sampler that takes the largest logits of each of `batch` sequences."""
    nothing = jnp.asarray(np.zeros(batch, np.float32))
    keys, top_k = (jnp.asarray(np.zeros((batch, 2), np.uint32)), jnp.asarray(np.zeros(batch, int)))
    ones = jnp.asarray(np.ones(batch, np.float32))
    return SequenceSampler(SamplingParams(keys, nothing, top_k, ones, nothing))


def check_same_weights(one, other) -> None:
    """Asserts that two modules have the same arrays under the same paths."""
    pairs = zip(parameters.named_arrays(one), parameters.named_arrays(other), strict=True)
    for (path, mine), (_, theirs) in pairs:
        assert mine.get_value().dtype == theirs.get_value().dtype, path
        np.testing.assert_array_equal(mine.get_value(), theirs.get_value(), err_msg=path)


def failed_load(module, directory) -> str:
    """Returns the one-line message of a failed load, which leaves the module abstract."""
    message = failure(checkpoint.load, module, directory)
    leaves = [param.get_value() for _, param in parameters.named_parameters(module)]
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    return message


def make_cache(target, batch: int, max_length: int, *, page_size: int = 8, **options):
    """A cache of empty sequences, each of which owns scattered pages full of stale rows."""
    per_sequence, shares = -(-max_length // page_size), target.sharding.size("pages")
    owned = batch // shares * per_sequence  # pages of one share, but for its scratch page
    sizes = {"batch": batch, "pages_per_sequence": per_sequence, "page_size": page_size}
    abstract = target.new_cache(**sizes, num_pages=shares * (owned + 1), **options)

    def fill(leaf):
        number = 0 if isinstance(leaf, RecurrentState) else 100
        return jax.tree.map(lambda x: _full(x, number), leaf)

    stale = jax.tree.map(fill, abstract.layers, is_leaf=lambda x: isinstance(x, RecurrentState))
    rng = np.random.default_rng(0)
    table = np.stack([rng.permutation(owned) + 1 for _ in range(shares)])
    table = table.reshape(batch, per_sequence).astype(np.int32)
    table = jax.device_put(table, abstract.page_table.sharding)
    return dataclasses.replace(abstract, layers=stale, page_table=table)


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
    return jax.tree.map(lambda x: _full(x, 0), abstract)


def _full(like, number):
    """An array of one number, made on the host: on a device each shape would compile a program."""
    return jax.device_put(np.full(like.shape, number, like.dtype), like.sharding)
