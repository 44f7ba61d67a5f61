import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dflash.inference.cycle import tree as trees
from dflash.inference.cycle import verify

BATCH, DRAFTS = 4, 9  # fixed, so that everything compiles once

parent_lists = st.tuples(*(st.integers(0, g) for g in range(DRAFTS)))
batches = st.lists(parent_lists, min_size=BATCH, max_size=BATCH)
token_lists = st.lists(st.integers(0, 3), min_size=DRAFTS + 1, max_size=DRAFTS + 1)
token_batches = st.lists(token_lists, min_size=BATCH, max_size=BATCH)

from_parents = jax.jit(trees.from_parents)
coupled_tree = jax.jit(verify.coupled_tree)
coupled_chain = jax.jit(verify.coupled_chain)


def ancestors(parents, row: int) -> list[int]:
    """A row, its parent, …, the anchor."""
    chain = [row]
    while chain[-1]:
        chain.append(parents[chain[-1] - 1])
    return chain


@given(batches)
def test_ancestry_and_depth(parents):
    tree = jax.tree.map(np.asarray, from_parents(np.array(parents, np.int32)))
    for b in range(BATCH):
        for row in range(DRAFTS + 1):
            line = ancestors(parents[b], row)
            assert set(np.flatnonzero(tree.ancestry[b, row])) == set(line)
            assert tree.depth[b, row] == len(line) - 1


@given(batches, token_batches, token_batches)
def test_the_longest_matching_path_is_accepted(parents, draft, sampled):
    draft, sampled = np.array(draft, np.int32)[:, :DRAFTS], np.array(sampled, np.int32)
    tree = from_parents(np.array(parents, np.int32))
    result = jax.tree.map(np.asarray, coupled_tree(draft, sampled, tree))
    for b in range(BATCH):
        matches = [draft[b, g] == sampled[b, parents[b][g]] for g in range(DRAFTS)]
        accepted = [
            line[::-1]
            for line in (ancestors(parents[b], row) for row in range(DRAFTS + 1))
            if all(matches[row - 1] for row in line[:-1])
        ]
        longest = max(len(line) for line in accepted)
        count = result.num_accepted[b]
        path = result.path[b, : count + 1].tolist()
        assert count == longest - 1
        assert path in accepted
        assert result.next_token[b] == sampled[b, path[-1]]
        assert set(result.path[b]) <= set(range(DRAFTS + 1)), "rows past the path are rows too"


@given(token_batches, token_batches)
def test_a_chain_is_a_tree(draft, sampled):
    draft, sampled = np.array(draft, np.int32)[:, :DRAFTS], np.array(sampled, np.int32)
    chain = coupled_chain(draft, sampled)
    parents = np.tile(np.arange(DRAFTS, dtype=np.int32), (BATCH, 1))
    as_tree = coupled_tree(draft, sampled, from_parents(parents))
    np.testing.assert_array_equal(chain.num_accepted, as_tree.num_accepted)
    np.testing.assert_array_equal(chain.next_token, as_tree.next_token)
