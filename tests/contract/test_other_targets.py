"""The contract of drafters over targets of other makes: experts, latent attention, windows."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from support.engines import decode, engine, random_prompts
from support.models import (
    ARCHITECTURE,
    EMPHASIS,
    FAVOURITES,
    drafter,
    family_architecture,
    make_sharding,
    move,
    takes,
)

from dflash.config import registry, schema
from dflash.inference.cycle import adaptive
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import make_sharding as make

ARCHITECTURES = {
    family: family_architecture(family, ARCHITECTURE)
    for family in ("qwen3_moe", "deepseek_v3", "qwen3_next")
}
# Windows shorter than the prompts, and a layer that sees everything.
WINDOWS = {"sliding_window": 7, "layer_types": ("sliding_attention", "full_attention")}
ARCHITECTURES["gemma3"] = family_architecture("gemma3", ARCHITECTURE, **WINDOWS)
ARCHITECTURES["gemma4"] = family_architecture(
    "gemma4", ARCHITECTURE, **WINDOWS, global_head_dim=16, attention_k_eq_v=True,
    num_global_key_value_heads=2,
)  # fmt: skip
ARCHITECTURES["gpt_oss"] = family_architecture("gpt_oss", ARCHITECTURE, sliding_window=7)
# Members that meet every schedule and mesh, but not every strategy.
OTHERS = {
    "gemma4 with experts": dataclasses.replace(
        ARCHITECTURES["gemma4"], enable_moe_block=True, num_experts=8, top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "qwen3_5": family_architecture("qwen3_5", ARCHITECTURE),
}  # fmt: skip
SHAPES = ARCHITECTURES | OTHERS
NAMES = sorted(registry.DRAFTERS)
FORMS = [(name, False) for name in NAMES if name != "none"]
FORMS += [(name, True) for name in NAMES if takes(name, "tree")]
PROMPTS = random_prompts((16, 9, 31, 12, 13, 30))
LIMITS = (20, 1, 24, 7, 2, 13)
HOW = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1})
OPTIONS = {"batch_size": 4, "sync_every": 4, "max_length": 64}
# Fewer pages than the sequences grow to need.
PREEMPTED = {"sync_every": 1, "page_size": 8, "num_pages": 10}


@functools.cache
def target(family: str, expert: int = 1, tensor: int = 1, batch: tuple = ()) -> Decoder:
    """A random target of the family, whose favorite tokens make drafts hit now and then.

    Args:
      batch: mesh axes of its rows, if other than by default.
    """
    kind = registry.load(registry.TARGETS[family.partition(" ")[0]].implementation)
    sharding = make_sharding(expert=expert, tensor=tensor)
    if batch:
        rules = dict(schema.SHARDING_RULES) | dict.fromkeys(("batch", "pages"), batch)
        sharding = make({"expert": expert, "tensor": tensor}, rules)
    model = kind(SHAPES[family], dtype=np.dtype("float32"), sharding=sharding)
    if sharding.mesh.size > 1:
        return move(target(family), model)
    parameters.initialize(model, jax.random.key(0))
    for path, parameter in parameters.named_parameters(model):
        if path.endswith(".bias"):  # They begin as zeros.
            rng = np.random.default_rng(len(path))
            values = rng.normal(size=parameter.shape).astype(np.float32)
            parameter.set_value(jax.device_put(values, parameter.get_value().sharding))
    kernel = model.lm_head.kernel
    emphasis = np.where(np.arange(ARCHITECTURE.vocab_size) < FAVOURITES, EMPHASIS, 1.0)
    kernel.set_value(kernel.get_value() * emphasis.astype(np.float32))
    return model


@functools.cache
def plain(family: str) -> list:
    run = engine(on=target(family), **OPTIONS)
    return [outputs(run, how) for how in HOW]


def outputs(run, how) -> list:
    return [one.output_ids for one in decode(run, PROMPTS, LIMITS, **how)]


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(("name", "tree"), FORMS, ids=str)
def test_output_is_that_of_plain_decoding(family, name, tree):
    model = drafter(name, arch=ARCHITECTURES[family], tree=tree)
    run = engine(model, on=target(family), **OPTIONS)
    assert [outputs(run, how) for how in HOW] == plain(family)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_eight_devices_equal_one(family):
    """Experts over four devices, and their widths, heads and vocabulary over two.

    With latent attention and recurrent state the sequences are split over the four devices too, and
    rows exchanged.
    """
    batch = ("expert",) if family in ("deepseek_v3", "qwen3_next") else ()
    run = engine(on=target(family, expert=4, tensor=2, batch=batch), **OPTIONS)
    assert [outputs(run, how) for how in HOW] == plain(family)


def test_rows_divided_among_sequences_change_nothing():
    """With recurrent state and experts."""
    family = "qwen3_next"
    model = drafter("dflash", arch=ARCHITECTURES[family], block_size=4)
    run = engine(model, on=target(family), adaptive_blocks=True, **OPTIONS)
    run.cycle_seconds = tuple(adaptive.only(len(run.block_sizes), run.rules.num_choices).tolist())
    assert [outputs(run, how) for how in HOW] == plain(family)


def test_recurrent_state_in_slots_that_come_and_go():
    """Too few pages for all slots, buckets of slots, and trees."""
    family, prompts, limits = "qwen3_next", random_prompts([15, 14, 13, 5]), [32, 32, 31, 20]
    options = {"batch_size": 3, "sync_every": 2, "max_length": 48}
    model = drafter("dflash", arch=ARCHITECTURES[family], tree=True)
    few = {"num_pages": 7, "partial_dispatches": True}
    run = engine(model, on=target(family), **options, **few)
    done = decode(run, prompts, limits, temperature=0.8)
    alone = decode(engine(on=target(family), **options), prompts, limits, temperature=0.8)
    assert [one.output_ids for one in done] == [one.output_ids for one in alone]
    assert sum(one.preemptions for one in done) > 0, "nothing was interrupted"


def test_recurrent_state_is_not_found_in_a_prefix_cache():
    """Cached pages have no state, so the engine has no prefix cache."""
    run = engine(on=target("qwen3_next"), prefix_cache=True, **OPTIONS)
    assert not run.prefix_cache


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({}, PREEMPTED),
        ({}, {"partial_dispatches": True}),
        ({"tensor": 2}, {}),
        ({"tensor": 2, "expert": 2}, PREEMPTED | {"partial_dispatches": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_oss", "dflash"),
        ("gpt_oss", "eagle3"),
        ("gemma4", "dflash"),
        ("gemma4", "dspark"),
        ("gemma4 with experts", "dflash"),
        ("qwen3_5", "dflash"),
        ("qwen3_next", "dflash"),
        ("qwen3_next", "dflash2"),
        ("qwen3_next", "eagle3"),
    ],
)
def test_every_schedule_and_mesh_gives_the_output_of_plain_decoding(
    family, name, tree, mesh, options
):
    axes = (1, 1, mesh.get("tensor", 1), mesh.get("expert", 1))
    form = {"block_size": 4} if takes(name, "block_size") else {}
    model = drafter(name, arch=SHAPES[family], tree=tree, mesh=axes, **form)
    run = engine(model, on=target(family, **mesh), **OPTIONS | options)
    done = [decode(run, PROMPTS, LIMITS, **how) for how in HOW]
    assert [[one.output_ids for one in each] for each in done] == plain(family)
    preemptions = sum(one.preemptions for each in done for one in each)
    assert (preemptions > 0) == ("num_pages" in options)
