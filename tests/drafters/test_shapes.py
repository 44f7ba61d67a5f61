"""Properties that the shapes of all registered strategies with weights share.

A shape comes from a checkpoint's config.json or from the drafter's own config, never from the
target's attention.
"""

import dataclasses
import functools
import json
import types
import typing

import jax.numpy as jnp
import pytest
from support import TESTS, models, reduced_recipes
from support.models import make_architecture, make_sharding

from dflash import errors
from dflash.checkpoints import checkpoint
from dflash.config import (
    benchmark_schema,
    distill_schema,
    loader,
    merging,
    registry,
    schema,
    train_schema,
)
from dflash.drafters.autoregressive_config import DraftModelArchitecture
from dflash.drafters.base_config import DraftLayers
from dflash.drafters.parts.weighted import WeightedDrafter
from dflash.models.dense import Qwen3

CONFIGS, ASSETS = merging.package_configs(), TESTS.parent / "dflash" / "assets"


def kind_of(name: str) -> type:
    return registry.load(registry.DRAFTERS[name].implementation)


WITH_SHAPES = [name for name in registry.DRAFTERS if issubclass(kind_of(name), WeightedDrafter)]
each = pytest.mark.parametrize("name", WITH_SHAPES)
TARGET = make_architecture(vocab_size=600)


@each
def test_what_is_written_reads_back(name, tmp_path):
    drafter = models.drafter(name)
    kind, shape = type(drafter), drafter.shape
    checkpoint.save(drafter, tmp_path / "d", kind.config_to_hf(shape))
    config = checkpoint.read_config(tmp_path / "d")
    assert config["architectures"] == [kind.hf_architectures[0]]
    assert kind.architecture_from_hf(config) == shape
    again = kind(shape, dtype=drafter.dtype, sharding=drafter.sharding)
    checkpoint.load(again, tmp_path / "d")
    models.check_same_weights(again, drafter)


def make(name: str, hf: dict, *overrides: str):
    """Returns a drafter of a checkpoint for the target, with overrides of its architecture."""
    build = {"dtype": jnp.float32, "sharding": make_sharding()}
    return kind_of(name).create(read(name, *overrides), hf, TARGET, **build)


def shape_of(name: str, *overrides: str):
    """Returns the shape of a fresh drafter for the target."""
    return kind_of(name).architecture_for(TARGET, read(name, *overrides).architecture).fit(TARGET)


@functools.cache
def read(name: str, *overrides: str) -> schema.DrafterConfig:
    run = dataclasses.make_dataclass("Run", [("drafter", schema.DrafterConfig)])
    given = [f"drafter.name={name}", "drafter.checkpoint=random"]
    given += [f"drafter.architecture.{override}" for override in overrides]
    return loader.load(None, given, run).drafter


OTHER_VALUES = {
    "block_size": 8, "num_hidden_layers": 3, "target_layer_ids": [0, 1], "mask_token_id": 7,
    "draft_vocab_size": 64, "head_dim": 64, "causal": "true", "rms_norm_eps": 1e-3,
    "rope_theta": 5.0, "selector_rank": 3, "selector_hidden_size": 3, "markov_rank": 3,
}  # fmt: skip


@each
def test_an_architecture_agrees_with_the_checkpoint_or_is_refused_by_name(name):
    kind = kind_of(name)
    written = kind.config_to_hf(shape_of(name))
    fields = {field.name: field for field in dataclasses.fields(architecture_of(name))}
    for key, value in OTHER_VALUES.items():
        if key not in fields or (name, key) == ("eagle3", "num_hidden_layers"):
            continue
        override = f"{key}={value}"
        other = kind.config_to_hf(shape_of(name, override))
        assert make(name, other, override).shape == kind.architecture_from_hf(other).fit(TARGET)
        with pytest.raises(errors.ConfigError, match=rf"^drafter\.architecture\.{key}: "):
            make(name, written, override)
        default = fields[key].default
        if default is not None:  # A default that is given counts, too.
            with pytest.raises(errors.ConfigError, match=rf"^drafter\.architecture\.{key}: "):
                make(name, other, f"{key}={default}".lower())


def architecture_of(name: str) -> type:
    """Returns the schema of a strategy's `drafter.architecture`."""
    hints = typing.get_type_hints(registry.load(registry.DRAFTERS[name].schema))
    return next(kind for kind in typing.get_args(hints["architecture"]) if kind is not type(None))


# --- for a target --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*WITH_SHAPES, "autoregressive"])
def test_nothing_follows_the_targets_attention(name):
    """A target of which there is nothing else, as if it had experts and latent attention."""
    known = ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
    known += ("tie_word_embeddings", "eos_token_id", "lent")
    bare = types.SimpleNamespace(**{field: getattr(TARGET, field) for field in known})
    kind = kind_of(name)
    if kind.drafts_with_model:
        options = DraftModelArchitecture()
        assert options.for_target(bare) == options.for_target(TARGET)
    else:
        assert kind.architecture_for(bare, None) == kind.architecture_for(TARGET, None)


@pytest.mark.parametrize(
    ("width", "options", "heads", "kv_heads", "mlp"),
    [
        (2560, {}, 32, 8, 7680),
        (4096, {}, 32, 8, 12288),
        (7168, {}, 64, 8, 21504),
        (2048, {}, 16, 8, 6144),
        (32, {}, 1, 1, 96),
        (384, {"head_dim": 64}, 8, 8, 1152),
        (128, {}, 1, 1, 384),
        (129, {"num_attention_heads": 3, "intermediate_size": 7}, 3, 3, 7),
    ],
)
def test_rules_of_what_is_left_out(width, options, heads, kv_heads, mlp):
    target = make_architecture(hidden_size=width, rope_theta=3.0, rms_norm_eps=0.1)
    decoder = DraftLayers(**options).decoder_for(target, num_hidden_layers=2)
    found = decoder.num_attention_heads, decoder.num_key_value_heads, decoder.intermediate_size
    assert found == (heads, kv_heads, mlp)
    assert (decoder.rope_theta, decoder.rms_norm_eps) == (1e6, 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_attention_heads": 9}, "num_attention_heads: 9 does not divide into"),
        ({"head_dim": 7}, "head_dim: expected an even number"),
        ({"rope_scaling": schema.RopeScaling(low_freq_factor=9.0)}, "rope_scaling.low_freq_factor"),
    ],
)
def test_layers_that_cannot_be_built_are_one_line(options, message):
    with pytest.raises(errors.ConfigError) as caught:
        DraftLayers(**options).decoder_for(TARGET, num_hidden_layers=1)
    (problem,) = caught.value.problems
    assert problem.startswith(f"drafter.architecture.{message}")


def tiny_target() -> schema.TargetArchitecture:
    return Qwen3.architecture_from_hf(json.loads((ASSETS / "tiny_target/config.json").read_text()))


def shipped() -> dict[str, tuple[schema.DrafterConfig, schema.TargetArchitecture]]:
    """Returns drafter config and target of every shipped run with a fresh drafter, by file."""
    runs = {
        "train": train_schema.TrainRun,
        "distill": distill_schema.DistillRun,
        "benchmark": benchmark_schema.BenchmarkRun,
    }
    found = {}
    for path in sorted(CONFIGS.rglob("*.yml")):
        folder = path.parent.name
        if folder in ("models", "drafters", "sweeps"):
            continue
        generic = folder in ("train", "distill") and path.stem in reduced_recipes.GENERIC
        overrides = ["target.checkpoint=assets/tiny_target"] if generic else []
        if generic and folder == "train":
            overrides.append("data.files=[answers.jsonl]")
        if folder == "distill":
            overrides.append("answers.files=[questions.jsonl]")
        run = loader.load(path, overrides, schema=runs.get(folder, schema.DecodeRun))
        if getattr(run.drafter, "architecture", None) is not None:
            name = str(path.relative_to(CONFIGS))
            found[name] = run.drafter, run.target.architecture or tiny_target()
    return found


def has_layers_of_its_target(path: str, target: schema.TargetArchitecture) -> bool:
    """Returns whether a target has a drafter's kind of layers, grouped queries and a dense MLP.

    Ours for SmolLM2 has wider heads.
    """
    others = ("medusa", "distill/smollm2_135m")
    grouped = type(target) is schema.TargetArchitecture
    return grouped and not any(other in path for other in others)


def test_shipped_drafters_have_the_layers_of_their_targets():
    """Published drafters do so; only the number of layers is their own."""
    mlp = {"qwen3_8b_autoregressive.yml": 3072, "llama3_1_8b_dflash.yml": 12288}
    compared = 0
    for path, (config, target) in shipped().items():
        if not has_layers_of_its_target(path, target):
            continue
        if config.name == "autoregressive":
            decoder = config.architecture.for_target(target)
            options = {"num_attention_heads": 16, "hidden_size": 1024, "tie_word_embeddings": True}
            target = dataclasses.replace(target, **options)
        else:
            decoder = kind_of(config.name).architecture_for(target, config.architecture).decoder
        if config.name == "eagle3":
            target = dataclasses.replace(target, tie_word_embeddings=False)
        layers, width = decoder.num_hidden_layers, mlp.get(path, target.intermediate_size)
        wanted = dataclasses.replace(target, num_hidden_layers=layers, intermediate_size=width)
        assert decoder == wanted, path
        compared += 1
    assert compared > 3


# --- config.json ---------------------------------------------------------------------------------

NOT_SIZES = (0, -3, 16.5, "8", True, [4], {"a": 1}, 1e400, float("nan"), 2**40)
BLOCK = ("block_size",)
DEPTH = ("num_target_layers",)
SIZES = {
    "dflash": [BLOCK, DEPTH, ("sliding_window",), ("dflash_config", "block_size"),
               ("dflash_config", "num_target_layers"), ("dflash_config", "swa_window_size")],
    "dflare": [BLOCK, DEPTH],
    "dflash2": [("dflash_config", field) for field in
                ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")],
    "dspark": [BLOCK, DEPTH, ("markov_rank",)],
    "ubtree": [("dflash_config", field) for field in ("selector_rank", "selector_top_k")],
    "lilicorr": [("dflash_config", f"lilicorr_{field}") for field in
                 ("candidate_topk", "num_layers", "num_heads", "factor_dim")],
    "eagle3": [DEPTH, ("draft_vocab_size",)],
    "medusa": [BLOCK, DEPTH, ("hidden_size",), ("vocab_size",)],
}  # fmt: skip
OTHERS = [
    ("dflash", ("dflash_config",), 7),
    ("dflash", ("dflash_config",), [1]),
    ("dflash", ("dflash_config", "mask_token_id"), -1),
    ("dflash", ("dflash_config", "mask_token_id"), 1.5),
    ("dflash", ("dflash_config", "target_layer_ids"), 1),
    ("dflash", ("dflash_config", "target_layer_ids"), ["a"]),
    ("dflash", ("dflash_config", "target_layer_ids"), [-1]),
    ("dflash", ("dflash_config", "causal"), "yes"),
    ("dflash", ("dflash_config", "use_swa"), 1),
    ("dflash", ("layer_types",), "full_attention"),
    ("dflash", ("layer_types",), [7]),
    ("dflash", ("layer_types",), {"0": "full_attention"}),
    ("dflash", ("sliding_window_non_causal",), "no"),
    ("dspark", ("target_layer_ids",), [0.5]),
    ("lilicorr", ("dflash_config", "lilicorr_enabled"), False),
    ("lilicorr", ("dflash_config", "lilicorr_logit_scale"), float("nan")),
    ("lilicorr", ("dflash_config", "lilicorr_vector_eps"), 0),
    ("lilicorr", ("dflash_config", "lilicorr_mlp_ratio"), "2"),
    ("lilicorr", ("has_own_lm_head",), True),
    ("dspark", ("markov_head_type",), ["rnn"]),
    ("dspark", ("enable_confidence_head",), "true"),
    ("ubtree", ("dflash_config", "selector_hidden_size"), -1),
    ("ubtree", ("dflash_config", "selector_hidden_size"), "8"),
    ("eagle3", ("target_layer_ids",), [-1]),
    ("eagle3", ("target_layer_ids",), "1"),
    ("eagle3", ("eagle_config",), 3),
    ("eagle3", ("rope_parameters",), 5),
    ("eagle3", ("attention_bias",), "yes"),
    ("medusa", ("rms_norm_eps",), float("nan")),
    ("medusa", ("rms_norm_eps",), "1e-6"),
]
UNUSABLE = [
    (name, path, value) for name, paths in SIZES.items() for path in paths for value in NOT_SIZES
] + OTHERS


@pytest.mark.parametrize(
    ("name", "path", "value"), UNUSABLE, ids=[f"{n}-{'.'.join(p)}-{v}" for n, p, v in UNUSABLE]
)
def test_an_unusable_field_of_a_file_is_one_line(name, path, value):
    kind = kind_of(name)
    config = kind.config_to_hf(kind.architecture_for(TARGET, None))
    group = config
    for key in path[:-1]:
        group = group[key]
    group[path[-1]] = value
    with pytest.raises(errors.CheckpointError) as caught:
        kind.architecture_from_hf(config).fit(TARGET)
    message = str(caught.value)
    assert message.startswith("config.json: ")
    assert path[-1] in message
    assert "expected" in message or "supported" in message
    assert "\n" not in message
    assert len(message) < 200


@pytest.mark.parametrize("inner", [7, [1], "x"])
def test_a_decoder_of_speculators_that_is_no_mapping(inner):
    config = {"transformer_layer_config": inner, "aux_hidden_state_layer_ids": [1]}
    config |= {"conv_kernel_size": 2, "conv_group_size": 1, "selector_rank": 1, "selector_top_k": 1}
    with pytest.raises(
        errors.CheckpointError, match="transformer_layer_config: expected a mapping"
    ):
        kind_of("dflash2").architecture_from_hf(config)
