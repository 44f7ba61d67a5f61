"""Lookahead decoding against plain loops: its tree, its pool, and whole runs of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import decode, random_prompts, shared_engine
from support.models import ARCHITECTURE, make_sharding

from dflash import errors
from dflash.drafters.lookahead import Lookahead, find_candidates, merge_alike, remember, tree_layout
from dflash.drafters.lookahead_config import LookaheadConfig
from dflash.parallel.sharding import Sharding

WINDOW, NGRAM, CANDIDATES, POOL = 3, 3, 2, 8  # as `support.models.drafter` has them
LEVELS, VOCAB = NGRAM - 1, ARCHITECTURE.vocab_size
LENGTH = 64
few = settings(max_examples=25)


def one_device() -> Sharding:
    return make_sharding(1, 1, 1)


def build(**changes) -> Lookahead:
    options = {
        "window": WINDOW, "ngram_size": NGRAM, "candidates": CANDIDATES, "pool_size": POOL
    } | changes  # fmt: skip
    config = LookaheadConfig(**options)
    return Lookahead.create(
        config, None, ARCHITECTURE, dtype=jnp.dtype("float32"), sharding=one_device()
    )


def paths_of(tokens, parents):
    """Returns the tokens from the anchor down to each draft."""
    found = [()]
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize(("window", "levels", "count"), [(3, 2, 2), (1, 1, 1), (2, 4, 1)])
def test_the_tree_of_window_and_candidates(window, levels, count):
    drafts = levels * (window + count)
    layout = tree_layout(window, levels, count)
    assert layout.shape == (drafts, window + levels - 1)
    paths = [tuple(path[path >= 0].tolist()) for path in layout]
    assert [path[-1] for path in paths] == list(range(drafts))
    for level in range(levels):
        for column in range(window):
            trunk = tuple(range(column + 1))
            side = tuple(k * window + column for k in range(1, level + 1))
            assert paths[level * window + column] == trunk + side
    for i in range(count):
        first = levels * (window + i)
        assert paths[first + levels - 1] == tuple(range(first, first + levels))


merge = jax.jit(lambda tokens: merge_alike(tokens, tree_layout(WINDOW, LEVELS, CANDIDATES)))


@few
@given(st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_alike_paths_are_merged(flat):
    layout = tree_layout(WINDOW, LEVELS, CANDIDATES)
    drafts = len(layout)
    nodes = np.array(flat, np.int32).reshape(2, drafts)
    tokens, parents, rows = (np.asarray(part) for part in merge(nodes))
    for b in range(2):
        wanted = [tuple(nodes[b, path[path >= 0]].tolist()) for path in layout]
        found = paths_of(tokens[b].tolist(), parents[b].tolist())
        assert (parents[b] <= np.arange(drafts)).all()
        assert len(set(found)) == drafts, "alike nodes are left"
        assert [found[row - 1] for row in rows[b]] == wanted
        fillers = [path for path in found if path not in wanted]
        unused = [t for t in range(drafts) if (t,) not in wanted]
        assert fillers == [(token,) for token in unused[: len(fillers)]]


GRAMS = st.lists(st.tuples(*[st.integers(0, 3)] * NGRAM), max_size=5)


@few
@given(st.lists(GRAMS, min_size=1, max_size=5), st.integers(0, 2))
def test_the_pool_holds_the_newest_ngrams_once(batches, anchor):
    pool, wanted = jnp.zeros((1, POOL, NGRAM), jnp.int32), []
    for grams in batches:
        padded = grams + [(0, 0, 0)] * (5 - len(grams))
        pool = jax.jit(remember)(pool, jnp.asarray([padded], jnp.int32))
        for gram in reversed(grams):
            if 0 not in gram:
                wanted = [gram, *(old for old in wanted if old != gram)]
        wanted = wanted[:POOL]
        found = [tuple(gram) for gram in np.asarray(pool[0]).tolist()]
        assert found == wanted + [(0, 0, 0)] * (POOL - len(wanted))
    default = jnp.asarray([[7, 8]])
    found = find_candidates(pool, jnp.asarray([anchor]), CANDIDATES, default=default)
    after = [tuple(t - 1 for t in gram[1:]) for gram in wanted if gram[0] == anchor + 1]
    assert [tuple(x) for x in found[0].tolist()] == (after + [(7, 8)] * CANDIDATES)[:CANDIDATES]


# Acceptance lengths that a simulation of lookahead decoding by loops over lists came to.
RUNS = {
    0.0: (
        (1, 2, 2, 1, 2, 2, 5, 3, 3, 2),
        (2, 2, 2, 3, 3, 2, 1, 1, 2, 1),
        (1, 1, 3, 1, 3, 1, 2, 5, 3, 3, 2, 2, 2),
    ),
    0.8: (
        (2, 4, 1, 2, 4, 2, 1, 2, 2, 1, 2),
        (1, 2, 3, 1, 3, 3, 1, 3, 1, 1),
        (2, 2, 2, 1, 2, 1, 2, 1, 2, 2, 2, 3, 3, 3, 1),
    ),
}


@pytest.mark.parametrize("temperature", RUNS)
def test_a_run_goes_as_in_plain_loops(temperature):
    """A window that did not move with the text, or a pool that forgot, would draft other tokens."""
    prompts, limits = random_prompts([1, 19, 6]), [24, 20, 30]
    done = decode(shared_engine("lookahead"), prompts, limits, temperature=temperature)
    assert tuple(one.acceptance_lengths for one in done) == RUNS[temperature]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pool_size": 1}, "drafter.pool_size: 1 is smaller than drafter.candidates=2"),
        (
            {"window": 100, "ngram_size": 16},
            "drafter.window: 1530 drafts do not fit in a block of at most 1024 rows",
        ),
        ({"window": 11}, "drafter.window: 26 drafts need as many distinct tokens.* has 24"),
    ],
)
def test_what_does_not_fit_is_one_line(changes, message):
    with pytest.raises(errors.ConfigError, match=message) as caught:
        build(**changes)
    assert "\n" not in str(caught.value)
