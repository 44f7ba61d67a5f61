import collections
import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples, write_lines
from support.corpora import join
from support.trained_tokenizers import failure

from dflash import errors
from dflash.config.train_schema import DataConfig
from dflash.data import corpus as corpora
from dflash.data import datasets, mixture, packing
from dflash.data.batches import Batches
from dflash.data.mixture import Mixture
from dflash.text.tokenizer import ByteTokenizer

LENGTH = 16
# Documents as (unsupervised, supervised) numbers of tokens.
DOCUMENTS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=40
).filter(lambda shapes: any(asked < LENGTH and answered for asked, answered in shapes))


def make_corpus(shapes, first_id=1):
    """Builds a corpus in which every token has a unique id."""
    ids = itertools.count(first_id)
    documents = []
    for asked, answered in shapes:
        document = np.array([next(ids) for _ in range(asked + answered)], np.uint32)
        document[asked:] |= corpora.SUPERVISED
        documents.append(document)
    return join("toy", documents)


def supervised_ids(rows):
    return [
        int(token)
        for row in rows
        for token in np.asarray(row["tokens"])[np.asarray(row["loss_mask"]) > 0]
    ]


def reachable(corpus):
    """Returns the supervised ids within the length of a row."""
    found = []
    for index in range(len(corpus)):
        document = corpus.document(index)[:LENGTH]
        found += (document[document >= corpora.SUPERVISED] & ~corpora.SUPERVISED).tolist()
    return found


@given(DOCUMENTS, st.integers(0, 5))
@settings(max_examples=150)
def test_rows_hold_every_document_once(shapes, seed):
    corpus = make_corpus(shapes)
    packed = packing.pack(corpus, LENGTH, seed)
    rows = packing.PackedRows(corpus, packed)
    by_row = [rows[index] for index in range(len(rows))]
    assert sorted(supervised_ids(by_row)) == sorted(reachable(corpus))
    useful = [corpus.document(i) for i in packed.documents]
    whole = collections.Counter(tuple((d & ~corpora.SUPERVISED)[:LENGTH]) for d in useful)
    seen = collections.Counter()
    for row in by_row:
        dtypes = dict.fromkeys(("tokens", "positions", "segment_ids"), np.int32)
        assert {name: array.dtype for name, array in row.items()} == (
            dtypes | {"loss_mask": np.float32}
        )
        assert {array.shape for array in row.values()} == {(LENGTH,)}
        segments = row["segment_ids"]
        count = segments.max()
        assert set(segments) - {0} == set(range(1, count + 1))
        filled = int((segments > 0).sum())
        assert (np.diff(segments[:filled]) >= 0).all()
        for name in ("tokens", "positions", "loss_mask"):
            assert not row[name][filled:].any()
        for segment in range(1, count + 1):
            here = segments == segment
            assert row["positions"][here].tolist() == list(range(here.sum()))
            assert row["loss_mask"][here][0] == 0
            seen[tuple(row["tokens"][here])] += 1
    assert seen == whole


def test_a_token_of_id_0_is_learned_like_any_other():
    """Only its supervision bit distinguishes token 0 from padding."""
    zero = corpora.SUPERVISED
    corpus = join("toy", [np.array([5, zero], np.uint32), np.array([5, 6], np.uint32)])
    packed = packing.pack(corpus, LENGTH)
    assert packed.documents.tolist() == [0]
    row = packing.PackedRows(corpus, packed)[0]
    assert row["tokens"][:2].tolist() == [5, 0]
    assert row["loss_mask"][:3].tolist() == [0, 1, 0]


def mix(corpora, shares=None, length=LENGTH, seed=3):
    rows = (packing.PackedRows(one, packing.pack(one, length, seed)) for one in corpora)
    return Mixture(tuple(rows), tuple(shares or [1.0] * len(corpora)), seed)


def open_batches(corpora, shares=None, *, mine=None, state=None, batch_size=4, **options):
    mixed = mix(corpora, shares, **options)
    return Batches(mixed, batch_size=batch_size, mine=mine, state=state)


SMALL = make_corpus([(2, 3), (1, 9), (5, 5), (3, 4), (9, 7), (2, 14), (20, 4), (1, 13), (6, 9)] * 5)
OTHER = make_corpus([(2, 12), (1, 15), (3, 9), (4, 12)] * 3, first_id=10_000)


def take_rows(source, count):
    """Returns the first `count` rows of a source of batches."""
    rows = []
    while len(rows) < count:
        batch = next(source)
        names = list(batch)
        rows += [dict(zip(names, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    return rows[:count]


def share(index, processes):
    """Returns the rows of a batch of 4 that a process reads."""
    size = 4 // processes
    return range(index * size, (index + 1) * size)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_an_epoch_has_every_supervised_token_once(processes):
    sources = [open_batches([SMALL], mine=share(index, processes)) for index in range(processes)]
    rows = []
    num_rows = mix([SMALL]).num_rows
    while len(rows) < 2 * num_rows:  # batches go on from one epoch into the next
        for source in sources:
            rows += take_rows(source, 4 // processes)
    first, second = rows[:num_rows], rows[num_rows : 2 * num_rows]
    expected = sorted(reachable(SMALL))
    assert sorted(supervised_ids(first)) == expected
    assert sorted(supervised_ids(second)) == expected
    assert supervised_ids(first) != supervised_ids(second)


@given(st.integers(0, 60), st.integers(0, 3), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
@settings(max_examples=40)
def test_resuming_continues_identically(steps, seed, before, after):
    """The number of processes may change."""
    first = open_batches([SMALL, OTHER], [1.0, 0.4], seed=seed, mine=share(0, before))
    for _ in range(steps):
        next(first)
    state = json.loads(json.dumps(first.state()))
    assert sum(state["rows"]) == 4 * steps
    straight = open_batches([SMALL, OTHER], [1.0, 0.4], seed=seed, mine=share(0, after))
    for _ in range(steps):
        next(straight)
    resumed = open_batches([SMALL, OTHER], [1.0, 0.4], seed=seed, mine=share(0, after), state=state)
    assert resumed.state() == state
    for _ in range(3):
        one, other = next(straight), next(resumed)
        assert all(np.array_equal(one[name], other[name]) for name in one)
    assert resumed.state() == straight.state()


def test_shares_are_kept():
    source = open_batches([SMALL, OTHER], [3.0, 1.0])
    rows = take_rows(source, 400)
    others = sum(row["tokens"].max() >= 10_000 for row in rows)
    assert others == 100


def test_mixtures_go_on_through_all_of_their_data():
    """Each corpus has its own passes: 1,000 and 10 rows at equal shares take 2,000 rows."""
    large = make_corpus([(2, LENGTH - 2)] * 1000)
    small = make_corpus([(2, LENGTH - 2)] * 10, first_id=100_000)
    source = open_batches([large, small], batch_size=16)
    drawn = [place for _ in range(125) for place in source.draw()]
    assert {row for corpus, row in drawn if corpus == 0} == set(range(1000))
    counts = collections.Counter(row for corpus, row in drawn if corpus == 1)
    assert set(counts.values()) == {100}
    assert source.state()["rows"] == [1000, 1000]


def test_the_corpus_that_is_due_comes_first():
    """A run of few steps would otherwise see too much of the first corpus."""
    (row,) = take_rows(open_batches([SMALL, OTHER], [1.0, 3.0]), 1)
    assert row["tokens"].max() >= 10_000


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"batch_size": 8}, {"length": 17}, {"corpora": [OTHER]}, {"shares": [2.0]}],
)
def test_a_state_of_other_data_is_refused(change):
    values = {"corpora": [SMALL], "shares": [1.0]}
    state = open_batches(**values).state()
    with pytest.raises(errors.InputError, match="differ from those of the checkpoint"):
        open_batches(**(values | change), state=state)


def test_less_than_a_batch_is_one_line():
    assert failure(open_batches, [make_corpus([(2, 12)] * 3)]) == (
        "toy: 3 rows of 16 tokens in all, but a batch has 4: give more data, a smaller batch, or a "
        "smaller data.length"
    )


def test_a_process_reads_any_rows_of_a_batch():
    whole, some = open_batches([SMALL, OTHER]), open_batches([SMALL, OTHER], mine=(0, 3))
    for _ in range(9):
        batch, part = next(whole), next(some)
        for name, array in batch.items():
            np.testing.assert_array_equal(part[name], array[[0, 3]])


def open_rows(config, vocab_size=None, split="train"):
    sets = datasets.find_all(config)
    return mixture.open_mixture(config, sets, ByteTokenizer(), split=split, vocab_size=vocab_size)


def test_from_a_config(tmp_path):
    options = {"length": 256, "data_dir": str(tmp_path / "data"), "held_out_percent": 20.0}
    config = examples.config(tmp_path, 60, **options)
    batch = next(Batches(open_rows(config, vocab_size=256), batch_size=4))
    assert batch["tokens"].shape == (4, 256)
    held_out = Batches(open_rows(config, split="validation"), batch_size=4)
    assert not np.array_equal(next(held_out)["tokens"], batch["tokens"])
    with pytest.raises(errors.ConfigError, match="the tokenizer has 256 tokens"):
        open_rows(config, vocab_size=255)


def open_line(line, tmp_path, **options):
    path = write_lines(tmp_path / "a.jsonl", [line])
    config = DataConfig(files=(path,), data_dir=str(tmp_path / "data"), held_out_percent=0)
    return open_rows(dataclasses.replace(config, **options), vocab_size=256)


def test_ids_beyond_the_vocabulary_are_found(tmp_path):
    said = failure(open_line, {"prompt_ids": [1], "output_ids": [300]}, tmp_path)
    assert said == "jsonl/train: token id 300 is out of the model's vocabulary (size 256)"


def test_nothing_to_learn_is_one_line(tmp_path):
    line = {"prompt_ids": [1] * 16, "output_ids": [2]}
    assert failure(open_line, line, tmp_path, length=16) == (
        "jsonl/train: none of its 1 documents has a supervised token within data.length=16 "
        "tokens: raise data.length"
    )


def test_conversations_that_are_cut_off_are_counted(tmp_path, capsys):
    shapes = [(3, 4), (20, 4), (20, 4), (14, 4)]  # prompt and output
    lines = [{"prompt_ids": [1] * asked, "output_ids": [2] * told} for asked, told in shapes]
    path = write_lines(tmp_path / "a.jsonl", lines)
    options = {"files": (path,), "data_dir": str(tmp_path / "d"), "held_out_percent": 0.0}
    open_rows(DataConfig(**options, length=16))
    told = "data: jsonl/train: data.length=16 cuts 3 of 4 documents, 2 of them before their first "
    assert f"{told}answer, so that they teach nothing\n" in capsys.readouterr().err
    open_rows(DataConfig(**options, length=24))
    assert "cuts" not in capsys.readouterr().err
