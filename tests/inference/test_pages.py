"""Tests of page hand-out and of the sizes of the decode loop."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.inference.pages import MIN_BUCKET, Layout, PagePool

steady = settings(deadline=None, derandomize=True, database=None)
powers = st.integers(3, 10).map(lambda n: 1 << n)
layouts = st.builds(
    Layout,
    batch_size=st.sampled_from([4, 8, 12]),
    max_length=st.integers(2, 5000),
    block_size=st.integers(1, 32),
    page_size=powers,
    prefill_chunk=powers,
    num_shares=st.sampled_from([1, 2, 4]),
)


@steady
@given(st.data())
def test_no_page_has_two_owners(data):
    shares, size = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    pool = PagePool(shares, size)
    held: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        if held and data.draw(st.booleans()):
            pool.give_back(*held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            share, count = data.draw(st.integers(0, shares - 1)), data.draw(st.integers(0, 6))
            free = pool.num_free(share)
            pages = pool.take(share, count)
            assert (pages is None) == (count > free)
            if pages is not None:
                assert len(pages) == count
                held.append((share, pages))
        for share in range(shares):
            owned = [page for where, pages in held for page in pages if where == share]
            assert len(set(owned)) == len(owned)
            assert set(owned) <= set(range(1, size)), "page 0 is scratch"
            assert len(owned) + pool.num_free(share) == size - 1


def test_a_refused_request_takes_nothing():
    pool = PagePool(1, 4)
    assert pool.take(0, 4) is None
    assert sorted(pool.take(0, 3)) == [1, 2, 3]


@steady
@given(layouts, st.data())
def test_buckets_hold_their_prompts_in_whole_chunks(layout, data):
    length = data.draw(st.integers(1, layout.max_length))
    bucket = layout.bucket(length)
    assert length <= bucket <= layout.capacity
    assert bucket == layout.capacity or bucket & (bucket - 1) == 0
    assert bucket < 2 * max(length, MIN_BUCKET)
    assert bucket % layout.chunk(bucket) == 0
    assert layout.chunk(bucket) <= layout.prefill_chunk
    assert bucket <= layout.bucket(min(length + 1, layout.max_length)), "not monotone"
    assert layout.prefix_pages(bucket) * layout.page_size >= bucket


@steady
@given(layouts)
def test_buckets_are_few(layout):
    buckets = {layout.bucket(length) for length in range(1, layout.max_length + 1)}
    assert len(buckets) <= layout.max_length.bit_length() + 1


@steady
@given(layouts, st.data())
def test_a_sequence_has_room_for_a_block_past_its_end(layout, data):
    length = data.draw(st.integers(1, layout.max_length))
    slots = layout.pages_for(length) * layout.page_size
    assert length + layout.block_size <= slots < length + layout.block_size + layout.page_size
    assert layout.pages_for(length) <= layout.pages_per_sequence


@steady
@given(layouts)
def test_every_slot_of_a_share_can_be_full_at_once(layout):
    pool = PagePool(layout.num_shares, layout.pages_per_share)
    shares = [layout.share_of(slot) for slot in range(layout.batch_size)]
    assert shares == sorted(shares)
    assert set(shares) == set(range(layout.num_shares))
    taken = [pool.take(share, layout.pages_per_sequence) for share in shares]
    assert None not in taken


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(1, 32), (32, 32), (33, 64), (65, 96), (96, 96)],
)
def test_bucket_edges(length, bucket):
    layout = Layout(1, max_length=90, block_size=4, page_size=8, prefill_chunk=32, num_shares=1)
    assert layout.bucket(length) == bucket


@pytest.mark.parametrize(("length", "bucket"), [(1, 128), (128, 128), (129, 256), (700, 1024)])
def test_short_prompts_share_their_programs(length, bucket):
    layout = Layout(1, max_length=4096, block_size=4, page_size=8, prefill_chunk=512, num_shares=1)
    assert layout.bucket(length) == bucket
