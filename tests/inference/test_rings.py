"""Tests of rings: layers with a window keep its rows alone, and nothing else changes."""

from unittest import mock

import pytest
from support.engines import decode, engine, logits_before, random_prompts
from support.models import drafter
from support.other_targets import target

from dflash.inference.pages import Layout
from dflash.layers.cache import Ring

PROMPTS = random_prompts((90, 5, 33, 61, 17))
LIMITS = (40, 30, 60, 9, 50)
OPTIONS = {"batch_size": 2, "sync_every": 4, "max_length": 160, "page_size": 8}
PAGES = 7  # A window of 7, a chunk of 16 and a tile of 32 rows.


def outputs(run):
    return [one.output_ids for one in decode(run, PROMPTS, LIMITS)]


def check_plain(outputs):
    """Asserts that outputs are the likeliest tokens by passes that keep all rows."""
    for prompt, ids in zip(PROMPTS, outputs, strict=True):
        likeliest = logits_before(target("gemma3"), prompt, ids, length=160).argmax(-1)
        assert likeliest.tolist() == list(ids)


@pytest.mark.parametrize(
    ("name", "tree", "options"),
    [
        ("dflash", True, {"num_pages": 30}),  # and preemption
        ("ngram", False, {"num_pages": 30, "partial_dispatches": True}),
        ("dflash", False, {"kv_dtype": "int8", "page_size": 8}),
    ],
)
def test_output_is_that_of_one_pool(name, tree, options):
    model = target("gemma3")
    run = engine(drafter(name, arch=model.arch, tree=tree), on=model, **OPTIONS | options)
    assert run.layout.ring == Ring(PAGES, 2 * PAGES + 1)
    sliding, full = ([pool.shape[1] for pool in layer] for layer in pools_by_layer(run))
    assert set(sliding) == {2 * PAGES + 1}
    assert set(full) == {run.layout.pages_per_replica}
    found = outputs(run)
    if "kv_dtype" not in options:
        check_plain(found)
        return
    with mock.patch.object(Layout, "ring", None):
        plain = engine(on=model, **OPTIONS | options)
        assert plain.abstract_state().cache.slots is None
        assert outputs(plain) == found


def pools_by_layer(run):
    cache = run.abstract_state().cache
    per_layer = len(cache.pools) // len(cache.layers)
    return [cache.pools[:per_layer], cache.pools[per_layer:]]


def test_a_prefix_cache_and_short_sequences_need_all_rows():
    sizes = {"block_size": 4, "page_size": 8, "prefill_chunk": 16, "num_replicas": 1, "window": 7}
    assert Layout(2, max_length=160, **sizes).ring == Ring(PAGES, 2 * PAGES + 1)
    assert Layout(2, max_length=160, prefix_cache=True, **sizes).ring is None
    assert Layout(2, max_length=40, **sizes).ring is None
    assert Layout(2, max_length=160, **sizes | {"window": None}).ring is None
