"""Tests of page hand-out and of the sizes of the decode loop."""

import collections
import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from dflash.inference.pages import MIN_CHUNK, Layout, PagePool

powers = st.integers(3, 10).map(lambda n: 1 << n)
layouts = st.builds(
    Layout, batch_size=st.sampled_from([4, 8, 12]), max_length=st.integers(2, 5000),
    block_size=st.integers(1, 32), page_size=powers, prefill_chunk=powers,
    num_replicas=st.sampled_from([1, 2, 4]),
)  # fmt: skip


class Model:
    """What a pool should hold: for every page its holders, and its key if it is published."""

    def __init__(self, shares: int, size: int):
        self.pool, self.shares, self.size = PagePool(shares, size), shares, size
        self.held: list[tuple[int, tuple[int, ...]]] = []  # by sequence
        self.key_of: dict[tuple[int, int], bytes] = {}

    def holders(self, share: int) -> collections.Counter:
        return collections.Counter(
            page for where, pages in self.held for page in pages if where == share
        )

    def check(self):
        for share in range(self.shares):
            held = self.holders(share)
            assert set(held) <= set(range(1, self.size)), "page 0 is scratch"
            assert len(held) + self.pool.num_free(share) == self.size - 1, "a page is lost"
            published = {page: key for (s, page), key in self.key_of.items() if s == share}
            for page, key in published.items():
                assert self.pool.find(share, [key]) == (page,)
            assert self.pool.num_idle(share) == len(set(published) - set(held))
            for page, count in held.items():
                assert count == 1 or page in published, "only published pages have several holders"


@given(st.data())
def test_pages_are_neither_lost_nor_used_twice(data):
    model = Model(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9)))
    pool, keys = model.pool, [bytes([i]) for i in range(6)]
    for _ in range(data.draw(st.integers(1, 40))):
        share = data.draw(st.integers(0, model.shares - 1))
        match data.draw(st.sampled_from(["take", "give back", "publish", "hit", "forget"])):
            case "take":
                count, free = data.draw(st.integers(0, 5)), pool.num_free(share)
                pages = pool.take(share, count)
                assert (pages is None) == (count > free)
                if pages is not None:
                    assert len(set(pages)) == count
                    assert not set(pages) & set(model.holders(share)), "a page with two owners"
                    for page in pages:
                        model.key_of.pop((share, page), None)
                    model.held.append((share, pages))
            case "give back" if model.held:
                where = data.draw(st.integers(0, len(model.held) - 1))
                pool.give_back(*model.held.pop(where))
            case "publish" if model.held:
                share, pages = data.draw(st.sampled_from(model.held))
                key = data.draw(st.sampled_from(keys))
                fresh = [page for page in pages if (share, page) not in model.key_of]
                if fresh:
                    taken = key in [k for (s, _), k in model.key_of.items() if s == share]
                    assert pool.publish(share, fresh[0], key) == (not taken)
                    if not taken:
                        model.key_of[share, fresh[0]] = key
            case "hit":
                found = pool.find(share, data.draw(st.lists(st.sampled_from(keys), unique=True)))
                pool.hold(share, found)
                model.held.append((share, found))
            case "forget" if data.draw(st.booleans()):
                pool.forget()
                model.key_of.clear()
                # From then on a page of several holders is theirs alone until the last lets go.
                assume_single = max(model.holders(share).values(), default=1) == 1
                if not assume_single:
                    return
        model.check()


def test_a_refused_request_takes_nothing():
    pool = PagePool(1, 4)
    assert pool.take(0, 4) is None
    assert sorted(pool.take(0, 3)) == [1, 2, 3]


def test_pages_that_were_not_used_for_longest_go_first_and_the_end_of_a_text_before_its_start():
    pool = PagePool(1, 6)
    first, second = pool.take(0, 2), pool.take(0, 2)
    keys = [b"a", b"ab", b"x", b"xy"]
    for page, key in zip((*first, *second), keys, strict=True):
        assert pool.publish(0, page, key)
    pool.give_back(0, first)
    pool.give_back(0, second)
    pool.hold(0, pool.find(0, keys[:2]))
    pool.give_back(0, first)  # used again, after the second
    gone = []
    while pool.num_idle(0):
        pool.take(0, 1)
        gone += [key for key in keys if not pool.find(0, [key]) and key not in gone]
    assert gone == [b"xy", b"x", b"ab", b"a"]


@given(layouts, st.booleans(), st.data())
def test_chunks_cover_a_prompt_within_the_capacity(layout, cached, data):
    layout = dataclasses.replace(layout, prefix_cache=cached)
    length = data.draw(st.integers(1, layout.max_length))
    start = 0
    if cached:
        start = data.draw(st.integers(0, (length - 1) // layout.page_size)) * layout.page_size
    known = layout.chunks([length])
    assert known == sorted(set(known))
    while start < length:
        rows = layout.chunk(length - start)
        assert rows in known
        assert rows <= layout.longest_chunk <= layout.prefill_chunk
        assert rows < 2 * max(length - start, MIN_CHUNK)
        assert start + rows <= layout.capacity
        assert start + rows <= layout.prefill_pages * layout.page_size
        start += min(rows, length - start)


@given(layouts)
def test_chunks_are_of_few_sizes(layout):
    sizes = {layout.chunk(length) for length in range(1, layout.max_length + 1)}
    assert len(sizes) <= layout.longest_chunk.bit_length() + 1
    assert set(layout.chunks(range(1, layout.max_length + 1))) == sizes


def test_a_sequence_that_may_come_back_needs_all_sizes():
    tight = Layout(
        2, max_length=90, block_size=4, page_size=8, prefill_chunk=32, num_replicas=1, num_pages=13
    )
    assert tight.overcommits
    assert tight.chunks([64]) == [32]
    wide = Layout(2, max_length=2000, block_size=4, page_size=8, prefill_chunk=512, num_replicas=1)
    assert wide.chunks([512]) == [512]
    assert wide.chunks([700]) == [256, 512]
    assert dataclasses.replace(wide, num_pages=300).chunks([512]) == [32, 64, 128, 256, 512]
    assert dataclasses.replace(wide, prefix_cache=True).chunks([300]) == [32, 64, 128, 256, 512]


@given(layouts, st.data())
def test_a_sequence_has_room_for_a_block_past_its_end(layout, data):
    length = data.draw(st.integers(1, layout.max_length))
    slots = layout.pages_for(length) * layout.page_size
    assert length + layout.block_size <= slots < length + layout.block_size + layout.page_size
    assert layout.pages_for(length) <= layout.pages_per_sequence


@given(layouts)
def test_every_slot_of_a_share_can_be_full_at_once(layout):
    pool = PagePool(layout.num_replicas, layout.pages_per_replica)
    shares = [layout.replica_of(slot) for slot in range(layout.batch_size)]
    assert shares == sorted(shares)
    assert set(shares) == set(range(layout.num_replicas))
    taken = [pool.take(share, layout.pages_per_sequence) for share in shares]
    assert None not in taken
