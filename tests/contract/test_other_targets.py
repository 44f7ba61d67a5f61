"""The contract of drafters over targets of other makes: experts, latent attention, windows."""

import functools

import numpy as np
import pytest
from support.engines import decode, engine, random_prompts
from support.forms import KINDS
from support.models import drafter
from support.other_targets import ARCHITECTURES, SHAPES, target

from dflash import errors
from dflash.inference.timing import only

FORMS = [(form.name, form.tree) for form in KINDS if form.name != "none"]
PROMPTS = random_prompts((16, 9, 31, 12, 13, 30))
LIMITS = (20, 1, 24, 7, 2, 13)
HOW = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 1})
OPTIONS = {"batch_size": 4, "sync_every": 4, "max_length": 64}
MESH = {"tensor": 2, "expert": 2}
# Fewer pages than the sequences grow to need.
PREEMPTED = {"sync_every": 1, "page_size": 8, "num_pages": 10, "partial_dispatches": True}
# Each way to draft meets latent attention on one device, and recurrent state on a mesh with
# preemption and short dispatches. Other families meet a tree, and some a chain.
ALONE = [
    *(("deepseek_v3", *form) for form in FORMS),
    *((family, "dflash", True) for family in ("qwen3_moe", "gemma3")),
]
GRID = [
    *(("qwen3_next", *form) for form in FORMS),
    *((family, "dflash", True) for family in ("minimax_m2", "gemma4 with experts", "muse_glimmer")),
    *((family, "dflash", True) for family in ("gpt_oss", "gemma4", "qwen3_5")),
    *((family, "ngram", False) for family in ("gpt_oss", "gemma4", "qwen3_5")),
]


@functools.cache
def plain(family: str) -> list:
    run = engine(on=target(family), **OPTIONS)
    return [outputs(run, how) for how in HOW]


def outputs(run, how) -> list:
    return [one.output_ids for one in decode(run, PROMPTS, LIMITS, **how)]


@pytest.mark.parametrize(("family", "name", "tree"), ALONE, ids=str)
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


@pytest.mark.parametrize(
    ("family", "name", "tree", "choice"),
    [
        ("qwen3_next", "dflash", True, "all sizes"),
        ("qwen3_next", "ngram", False, "all sizes"),
        ("qwen3_next", "dflash", True, "divided rows"),
        ("qwen3_next", "dspark", False, "divided rows"),
        ("gemma4", "dflash", True, "all sizes"),
        ("gpt_oss", "dspark", False, "divided rows"),
    ],
)
def test_chosen_block_sizes_change_nothing(family, name, tree, choice):
    """One size for all sequences of a cycle, or a number of rows that is divided among them."""
    model = drafter(name, arch=SHAPES[family], tree=tree, block_size=4)
    run = engine(model, on=target(family), adaptive_blocks=True, **OPTIONS)
    sizes, choices = len(run.block_sizes), len(run.rules.choices)
    table = only(min(sizes, choices - 1), choices)
    if choice == "all sizes":
        # Drafting pays now and then, so that sequences change between plain and drafted cycles.
        table = np.full(choices, np.inf, np.float32)
        table[:sizes] = 1.0 + 0.2 * np.arange(sizes)
    run.cycle_seconds = tuple(table.tolist())
    done = [decode(run, PROMPTS, LIMITS, **how) for how in HOW]
    assert [[one.output_ids for one in each] for each in done] == plain(family)
    if choice == "all sizes":
        assert len({size for each in done for one in each for size in one.block_sizes}) > 1


def test_heads_that_do_not_divide_over_devices_are_an_error():
    """Though the elements of two key heads would divide over four devices."""
    with pytest.raises(errors.ConfigError, match="axis 'heads' of length 2 does not divide over 4"):
        target("qwen3_5", tensor=4)


def test_recurrent_state_is_not_found_in_a_prefix_cache():
    """Cached pages have no state, so the engine has no prefix cache."""
    run = engine(on=target("qwen3_next"), prefix_cache=True, **OPTIONS)
    assert not run.prefix_cache


@pytest.mark.parametrize(("family", "name", "tree"), GRID, ids=str)
def test_preemption_on_a_mesh_gives_the_output_of_plain_decoding(family, name, tree):
    model = drafter(name, arch=SHAPES[family], tree=tree, block_size=4, mesh=(1, 1, 2, 2))
    run = engine(model, on=target(family, **MESH), **OPTIONS | PREEMPTED)
    done = [decode(run, PROMPTS, LIMITS, **how) for how in HOW]
    assert [[one.output_ids for one in each] for each in done] == plain(family)
    assert sum(one.preemptions for each in done for one in each) > 0
