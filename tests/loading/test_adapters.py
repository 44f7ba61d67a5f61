"""Tests of LoRA adapters: reading, merging, and choosing one by sequence."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import models
from support.adapters import adapted, merged, write_adapter
from support.engines import engine, make_requests, random_prompts
from support.models import drafter, make_sharding, make_target, target
from support.parity import make_pair

from dflash import errors
from dflash.checkpoints import lora
from dflash.config import registry
from dflash.inference.request import RequestOutput
from dflash.inference.scheduler import Scheduler
from dflash.layers.linear import can_join
from dflash.loading import adapters, quantization
from dflash.offline import decoding
from dflash.parallel import parameters


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two adapters of the target that engines decode with: of all maps, and of some."""
    place, base = tmp_path_factory.mktemp("adapters"), target()
    some = {"modules": ("q_proj", "down_proj"), "rank": 3, "seed": 1, "use_rslora": True}
    return [write_adapter(place / "a", base), write_adapter(place / "b", base, **some)]


def logits(model, tokens, **options):
    """Logits of whole sequences, by the cached forward pass."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    cache = models.make_cache(model, len(tokens), 32)
    return np.asarray(_logits(*nnx.split(model), tokens, positions, cache, options))


@functools.partial(jax.jit, static_argnums=0)
def _logits(graph, params, tokens, positions, cache, options):
    model, count = nnx.merge(graph, params), jnp.full(len(tokens), tokens.shape[1])
    return model.unembed(model(tokens, positions, cache, count=count, **options).hidden)


def test_merged_weights_follow_the_formula(two):
    base, both = target(), [merged(target(), directory) for directory in two]
    scales = [8 / 4, 6 / 3**0.5]
    for directory, model, scale in zip(two, both, scales, strict=True):
        stored = lora.read(str(directory)).updates
        weights = dict(parameters.named_parameters(base))
        for path, leaf in parameters.named_parameters(model):
            before = np.asarray(weights[path].get_value(), np.float64)
            update = stored.get(f"model.{path.removesuffix('.kernel')}.weight")
            if update is not None:
                before = before + (update.b.astype(np.float64) @ update.a).T
            np.testing.assert_allclose(leaf.get_value(), before, atol=1e-5)
        one = next(iter(stored.values()))
        raw = _raw(directory, "B")
        np.testing.assert_allclose(one.b, scale * raw, rtol=1e-6)


def _raw(directory, matrix):
    from safetensors import numpy as safetensors

    name = next(iter(lora.read(str(directory)).updates)).removesuffix(".weight")
    tensors = safetensors.load_file(directory / lora.WEIGHTS)
    return tensors[f"base_model.model.{name}.lora_{matrix}.weight"]


def test_peft_computes_the_same(tmp_path):
    peft = pytest.importorskip("peft")
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs, ours = make_pair("Qwen3", sizes, tmp_path / "base")
    directory = write_adapter(tmp_path / "lora", ours, use_rslora=True, size=0.2)
    import torch

    tokens = np.random.default_rng(0).integers(0, 40, (2, 9))
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(theirs, directory)
        wanted = model(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(wanted - logits(ours, tokens)).max() > 0.1, "the adapter changes nothing"
    np.testing.assert_allclose(logits(merged(ours, directory), tokens), wanted, atol=2e-4)
    beside = logits(adapted(ours, [directory]), tokens, adapters=jnp.ones(2, jnp.int32))
    np.testing.assert_allclose(beside, wanted, atol=2e-4)


def test_each_sequence_has_the_logits_of_its_merged_model(two):
    base, tokens = target(), np.random.default_rng(1).integers(0, 24, (4, 12))
    chosen = jnp.array([0, 2, 1, 2], jnp.int32)
    found = logits(adapted(base, two), tokens, adapters=chosen)
    choices = [base, *(merged(base, directory) for directory in two)]
    for number, model in enumerate(choices):
        rows = np.flatnonzero(chosen == number)
        wanted = logits(model, tokens)[rows]
        np.testing.assert_allclose(found[rows], wanted, atol=1e-5)
        if number == 0:
            assert (found[rows] == wanted).all(), "without an adapter not a bit differs"


def test_each_request_decodes_with_its_adapter(two):
    """Greedily, its tokens are the likeliest ones of the merged model."""
    base, prompts = target(), random_prompts([5, 5, 5])
    requests = make_requests(prompts, 6)
    requests = [dataclasses.replace(one, adapter=one.id) for one in requests]
    events = decoding.decode(engine(on=adapted(base, two), batch_size=3, max_length=16), requests)
    choices = [base, *(merged(base, directory) for directory in two)]
    done = {event.id: event.output_ids for event in events if isinstance(event, RequestOutput)}
    for id, output_ids in done.items():
        tokens = [*prompts[id], *output_ids]
        (scores,) = logits(choices[id], [tokens])
        assert scores[len(prompts[id]) - 1 : -1].argmax(-1).tolist() == list(output_ids)
    assert len(set(done.values())) == 3


@pytest.mark.parametrize(
    "options",
    [{}, {"adaptive_blocks": True}, {"page_size": 8, "num_pages": 11}],
    ids=["mixed", "auto", "preempted"],
)
def test_output_is_that_of_the_merged_model(two, options):
    """In mixed batches, greedy and drawn, with drafting for the base."""
    base, numbers = target(), [0, 1, 2, 1, 0, 2, 1]
    prompts = random_prompts([5, 20, 9, 20, 33, 20, 20])
    prompts[5] = prompts[6] = prompts[1]
    how = {"temperature": 0.8, "seed": 3}
    requests = make_requests(prompts, 20, **how)
    requests = [
        dataclasses.replace(one, adapter=n) for one, n in zip(requests, numbers, strict=True)
    ]
    greedy = {"sampling": dataclasses.replace(requests[2].sampling, temperature=0.0)}
    requests[2] = dataclasses.replace(requests[2], **greedy)
    model = drafter("dflash", block_size=4)
    sizes = {"batch_size": 3, "max_length": 64, "sync_every": 2, "prefix_cache": True}
    one = Scheduler(engine(model, on=adapted(base, two), **sizes | options))
    for request in requests:
        one.submit(request)
    done = {}
    while not one.idle:
        done |= {e.id: e for e in one.step() if isinstance(e, RequestOutput)}
    cached = [done[id].cached_tokens for id in (1, 5, 6)]
    assert options.get("num_pages") or cached == [0, 0, 16], "of the same adapter alone"
    if "num_pages" in options:
        assert sum(each.preemptions for each in done.values()) > 0, "the pool was never dry"
    plain = engine(on=base, batch_size=3, max_length=64)
    for number, model in enumerate([base, *(merged(base, directory) for directory in two)]):
        plain.target_params = nnx.state(model)
        mine = [dataclasses.replace(one, adapter=0) for one in requests if one.adapter == number]
        for event in decoding.decode(plain, mine):
            if isinstance(event, RequestOutput):
                assert done[event.id].output_ids == event.output_ids, (number, event.id)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_5", "gpt_oss", "gemma4"])
def test_every_family_takes_adapters(tmp_path, family):
    kind = registry.load(registry.TARGETS[family].implementation)
    base = kind(models.family_architecture(family), dtype=jnp.float32, sharding=make_sharding())
    parameters.initialize(base, jax.random.key(0))
    rng, tensors = np.random.default_rng(0), {}
    for name, linear in adapters.linear_maps(base):
        (rows, columns), start = linear.kernel.get_value().shape, f"base_model.model.{name}"
        start = start.removesuffix(".weight")
        tensors[f"{start}.lora_A.weight"] = rng.normal(0, 0.1, (4, rows)).astype(np.float32)
        tensors[f"{start}.lora_B.weight"] = rng.normal(0, 0.1, (columns, 4)).astype(np.float32)
    directory = write_adapter(tmp_path / "a", base, tensors=tensors)
    tokens = rng.integers(0, 40, (2, 9))
    found = logits(adapted(base, [directory]), tokens, adapters=jnp.array([1, 0]))
    wanted = logits(merged(base, directory), tokens)[0], logits(base, tokens)[1]
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    assert np.abs(found[0] - logits(base, tokens)[0]).max() > 0.5


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 1, 2), (2, 1, 2)], ids=str)
def test_adapters_on_a_mesh(two, mesh):
    tokens, chosen = np.random.default_rng(1).integers(0, 24, (4, 12)), jnp.array([0, 2, 1, 2])
    wanted = logits(adapted(target(), two), tokens, adapters=chosen)
    placed = target(mesh)
    found = logits(adapted(placed, two), tokens, adapters=chosen)
    np.testing.assert_allclose(found, wanted, atol=2e-5)
    whole, merge = merged(target(), two[0]), merged(placed, two[0])
    np.testing.assert_allclose(logits(merge, tokens), logits(whole, tokens), atol=2e-5)


def test_weights_in_eight_bits_take_adapters_beside_them(two):
    tokens, narrow = np.random.default_rng(1).integers(0, 24, (2, 12)), []
    for references in ({}, {"a": str(two[0])}):
        model = type(target())(target().arch, dtype=jnp.float32, sharding=make_sharding())
        quantization.quantize(model, "int8")
        found = adapters.declare(model, references)
        parameters.init_fast_random(model, 0)
        adapters.fill(model, tuple(found.values()))
        narrow.append(model)
    base = logits(narrow[0], tokens)
    found = logits(narrow[1], tokens, adapters=jnp.array([0, 1]))
    assert (found[0] == base[0]).all()
    assert np.abs(found[1] - base[1]).max() > 0.1
    with pytest.raises(errors.CheckpointError, match="is in eight bits in the target"):
        adapters.check_mergeable(narrow[0], lora.read(str(two[0])))


def test_maps_with_adapters_are_not_joined(two):
    layer = adapted(target(), two).layers[0]
    assert not can_join([layer.self_attn.q_proj, layer.self_attn.k_proj])
    assert can_join([make_target().layers[0].mlp.gate_proj, make_target().layers[0].mlp.up_proj])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"use_dora": True}, "use_dora: true is not supported, only false"),
        ({"bias": "all"}, 'bias: "all" is not supported, only "none"'),
        ({"modules_to_save": ["lm_head"]}, 'modules_to_save: \\["lm_head"\\] is not supported'),
        ({"init_lora_weights": "pissa"}, 'init_lora_weights: "pissa" is not supported'),
        ({"peft_type": "IA3"}, 'peft_type: "IA3" is not supported, only "LORA"'),
        ({"r": 0}, "r: expected a number above 0"),
        ({"lora_alpha": None}, "lora_alpha: expected a number above 0"),
    ],
)
def test_unsupported_kinds_are_named(tmp_path, config, message):
    directory = write_adapter(tmp_path / "a", target(), **config)
    with pytest.raises(errors.CheckpointError, match=message):
        lora.check(str(directory))


LAYER = "base_model.model.model.layers.0"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"


def pair(name, a, b):
    """Tensors of these shapes for the update of a map."""
    return {f"{LAYER}.{name}.lora_{matrix}.weight": shape for matrix, shape in (("A", a), ("B", b))}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({EMBEDDING: (4, 24)}, "embed_tokens.lora_embedding_A' is no LoRA weight"),
        ({f"{LAYER}.mlp.up_proj.lora_A.weight": (4, 32)}, "found A [4, 32], expected A [rank, in]"),
        (pair("mlp.up_proj", (4, 8), (48, 4)),
         "updates a map of [48, 8], but the target's is [48, 32]"),
        (pair("mlp.no_proj", (4, 8), (8, 4)),
         "updates 'model.layers.0.mlp.no_proj.weight', which this target does not have"),
    ],
)  # fmt: skip
def test_unfit_tensors_are_named(tmp_path, tensors, message):
    arrays = {name: np.zeros(shape, np.float32) for name, shape in tensors.items()}
    directory = str(write_adapter(tmp_path / "a", target(), tensors=arrays))
    with pytest.raises(errors.CheckpointError, match=re.escape(message)):
        adapters.check_mergeable(target(), lora.read(directory))
    with pytest.raises(errors.CheckpointError, match=re.escape(message)):
        adapters.declare(target(), {"a": directory})


def test_missing_and_damaged_files_are_named(tmp_path):
    directory = write_adapter(tmp_path / "a", target())
    weights = directory / lora.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(errors.CheckpointError, match="truncated"):
        lora.check(str(directory))
    weights.unlink()
    (directory / "adapter_model.bin").touch()
    with pytest.raises(errors.CheckpointError, match=r"adapter_model\.bin is a pickle"):
        lora.check(str(directory))
    (directory / lora.CONFIG).unlink()
    with pytest.raises(errors.CheckpointError, match=r"no adapter_config\.json"):
        lora.check(str(directory))
    shapes = pair("mlp.up_proj", (4, 32), (48, 4))
    infinite = {name: np.full(shape, np.inf, np.float32) for name, shape in shapes.items()}
    directory = write_adapter(tmp_path / "b", target(), tensors=infinite)
    with pytest.raises(errors.CheckpointError, match="holds NaN or infinite numbers"):
        lora.read(str(directory))


def test_a_request_for_an_adapter_that_there_is_not_is_refused():
    run = engine(batch_size=1)
    request = dataclasses.replace(make_requests([(1, 2)], 4)[0], adapter=1)
    with pytest.raises(errors.InputError, match="adapter: 1, but the target has 0"):
        run.check(request)
