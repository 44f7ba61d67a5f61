"""Lookahead decoding against plain loops: its tree, its pool, and whole runs of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engines import decode, expected, random_prompts, shared_engine
from support.models import ARCHITECTURE, make_sharding, target

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


@functools.cache
def oracle(temperature: float, index: int):
    """Returns a function from a text to the target's next token, for sequence `index`, seed 0."""

    model = target()

    @jax.jit
    def after_each(text):
        cache = model.new_cache(batch=1, pages_per_sequence=1, num_pages=1, page_size=LENGTH)
        cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
        positions = jnp.arange(LENGTH)[None]
        logits = model.unembed(model(text[None], positions, cache).hidden)[0]
        if temperature:
            sequence = jax.random.fold_in(jax.random.key(0), index)
            keys = jax.vmap(lambda p: jax.random.fold_in(sequence, p))(positions[0] + 1)
            noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
            logits = logits / temperature + noise
        return jnp.argmax(logits, axis=-1)

    @functools.cache
    def following(text):
        padded = np.zeros(LENGTH, np.int32)
        padded[: len(text)] = text
        return int(after_each(padded)[len(text) - 1])

    return following


class Simulation:
    """Lookahead decoding of one sequence by loops over lists."""

    def __init__(self, prompt, following):
        self.following = following
        self.text = [*prompt, following(tuple(prompt))]
        self.window = [[None] * WINDOW for _ in range(LEVELS)]
        self.pool: list[tuple] = []
        for end in range(NGRAM, len(self.text) + 1):
            self.remember([tuple(self.text[end - NGRAM : end])])

    def remember(self, grams):
        for gram in reversed(grams):
            self.pool = [gram, *(old for old in self.pool if old != gram)]
        self.pool = self.pool[:POOL]

    def cycle(self) -> int:
        """Runs one cycle and returns the number of tokens that it commits."""
        anchor = self.text[-1]
        size = WINDOW + LEVELS - 1
        tail = ([anchor] * size + self.text)[-size:]
        for level in range(LEVELS):
            for column in range(WINDOW):
                if self.window[level][column] is None:
                    self.window[level][column] = tail[level + column]
        columns = [
            [*self.window[0][: c + 1], *(self.window[k][c] for k in range(1, LEVELS))]
            for c in range(WINDOW)
        ]
        grams = [gram[1:] for gram in self.pool if gram[0] == anchor][:CANDIDATES]
        grams += [tuple(columns[0])] * (CANDIDATES - len(grams))
        leaves = [tuple(column) for column in columns] + grams
        paths = {leaf[:i] for leaf in leaves for i in range(1, len(leaf) + 1)}
        drafts = LEVELS * (WINDOW + CANDIDATES)
        unused = [token for token in range(drafts) if (token,) not in paths]
        paths |= {(token,) for token in unused[: drafts - len(paths)]}

        accepted = ()
        while True:
            bonus = self.following((*self.text, *accepted))
            if (*accepted, bonus) not in paths:
                break
            accepted = (*accepted, bonus)
        newest = [self.following((*self.text, *column)) for column in columns]
        self.window = [*self.window, newest]
        self.remember([tuple(level[c] for level in self.window) for c in range(WINDOW)])
        moved = len(accepted)
        self.window = [level[moved:] + [None] * min(moved, WINDOW) for level in self.window[1:]]
        for token in (*accepted, bonus):
            self.text.append(token)
            self.remember([tuple(self.text[-NGRAM:])] if len(self.text) >= NGRAM else [])
        return moved + 1


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_run_goes_as_in_plain_loops(temperature):
    prompts, limits = random_prompts([1, 19, 6]), [24, 20, 30]
    done = decode(shared_engine("lookahead"), prompts, limits, temperature=temperature)
    wanted = expected(prompts, limits, temperature=temperature)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    for index, (prompt, one) in enumerate(zip(prompts, done, strict=True)):
        simulation = Simulation(prompt, oracle(temperature, index))
        left, lengths = len(one.output_ids) - 1, []
        while left:
            lengths.append(min(simulation.cycle(), left))
            left -= lengths[-1]
        assert one.acceptance_lengths == tuple(lengths)
    longest = max(max(one.acceptance_lengths) for one in done)
    assert longest > (2 if temperature == 0 else 1), "nothing was ever accepted"


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
