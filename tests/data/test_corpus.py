import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.corpora import join

from dflash.data import corpus as corpora
from dflash.data import packing
from dflash.data.batches import Batches
from dflash.data.mixture import Mixture

LENGTH = 2048


def sparse_corpus(path, tokens, mean_length):
    """Writes a corpus as a sparse file of zero tokens, with a real index."""
    generator = np.random.default_rng(0)
    sizes = generator.integers(1, 2 * mean_length, tokens // mean_length)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    with path.open("wb") as file:
        file.truncate(4 * int(offsets[-1]))
    learned = np.zeros(len(sizes), np.int32)
    opened = corpora.TokenFile(path)
    return corpora.Corpus("sparse", "", opened, offsets, learned, 0, directory=path.parent)


@pytest.mark.parametrize("mean_length", [50, 500, 5000])
def test_ten_million_tokens_cost_a_hundredth_of_what_a_host_may_spend_on_a_billion(
    tmp_path, mean_length
):
    """Memory is proportional to documents; 2 GB for 1e9 tokens are 2 bytes per token."""
    corpus = sparse_corpus(tmp_path / "tokens.bin", 10**7, mean_length)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    tracemalloc.start()
    sys.setprofile(count)
    try:
        rows = packing.PackedRows(corpus, packing.pack(corpus, LENGTH))
        next(Batches(Mixture((rows,), (1.0,)), batch_size=8))
    finally:
        sys.setprofile(None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    index = corpus.offsets.nbytes + 2 * corpus.learned.nbytes
    assert (index + peak) / 10**7 < 2
    assert calls < 10**5, "some Python runs for each of 200,000 documents"


def test_no_token_is_read_before_a_row_needs_it(tmp_path, monkeypatch):
    corpora.write(tmp_path / "one", [np.full(7, 2**31, np.uint32) for _ in range(500)])
    spans = []
    read = corpora.TokenFile.__getitem__
    monkeypatch.setattr(
        corpora.TokenFile, "__getitem__", lambda self, part: spans.append(part) or read(self, part)
    )
    corpus = corpora.open_stored(tmp_path / "one", "x", "y")
    rows = packing.PackedRows(corpus, packing.pack(corpus, 14))
    source = Batches(Mixture((rows,), (1.0,)), batch_size=8, mine=(2, 5))
    assert spans == []
    next(source)
    assert len(spans) == 4  # two documents in each row of this process


def place_one_by_one(sizes, length):
    """Places documents by the definition of best fit; ties go to the last changed row."""
    rows = []
    for size in sorted(sizes, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= length]
        row = max(reversed(fitting), key=sum) if fitting else []
        rows = [one for one in rows if one is not row]
        row.append(size)
        rows.append(row)
    return sorted(rows)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=120), st.integers(30, 60))
@settings(max_examples=80)
def test_documents_are_placed_as_they_would_be_one_by_one(sizes, length):
    corpus = join("x", [np.full(size, 2**31, np.uint32) for size in sizes])
    packed = packing.pack(corpus, length)
    parts = np.split(np.array(sizes)[packed.documents], packed.offsets[1:-1])
    assert sorted(part.tolist() for part in parts) == place_one_by_one(sizes, length)
