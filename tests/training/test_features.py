"""Feature cache: rows are computed once, stored in complete parts, and read by any process."""

import itertools
import json

import ml_dtypes
import numpy as np
import pytest

from dflash import errors
from dflash.data import corpus as corpora
from dflash.data import packing
from dflash.data.batches import Batches
from dflash.data.mixture import Mixture
from dflash.training import features
from dflash.training.features import CachedBatches

ROWS, LENGTH, WIDTH = 4, 3, 2
ORDER = np.random.default_rng(0).permutation(24)


def compute(numbers):
    """Returns features that identify their row."""
    compute.calls.append(list(numbers))
    wide = np.array(numbers, np.float32)[:, None, None] * np.ones((LENGTH, WIDTH), np.float32)
    return {"features": (wide / 2).astype(ml_dtypes.bfloat16)}


def open_cache(directory, num_rows=24, compute=compute, order=ORDER, rows=None):
    return features.open_cache(
        directory,
        order=order,
        num_rows=num_rows,
        rows=rows or {0: range(ROWS)},
        compute=compute,
        progress=lambda done: None,
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Two batches to a part."""
    monkeypatch.setattr(features, "_PART_BYTES", 1.5 * ROWS * LENGTH * WIDTH * 2)
    compute.calls = []


def read(cache, numbers):
    return [float(cache[number]["features"][0, 0]) * 2 for number in numbers]


def test_rows_are_found_by_their_place_in_the_order(tmp_path):
    cache = open_cache(tmp_path)
    assert read(cache, range(24)) == ORDER.tolist()
    row = cache[7]["features"]
    assert (row.shape, row.dtype) == ((LENGTH, WIDTH), ml_dtypes.bfloat16)
    assert sorted(itertools.chain(*compute.calls)) == list(range(24))
    assert len(list(tmp_path.iterdir())) == 3


def test_only_rows_that_are_needed_are_computed_and_a_longer_run_adds_the_next(tmp_path):
    assert open_cache(tmp_path, 5)._ends[-1] == 8
    assert len(compute.calls) == 2
    open_cache(tmp_path, 8, compute=None)
    cache = open_cache(tmp_path, 17)
    assert cache._ends[-1] == 20
    assert read(cache, range(20)) == ORDER[:20].tolist()
    assert len(compute.calls) == 5


@pytest.mark.parametrize("size", [1, 3, 4, 5, 13])
def test_a_corpus_need_not_fill_its_last_batch(tmp_path, size):
    order = np.random.default_rng(1).permutation(size)
    assert read(open_cache(tmp_path, 99, order=order), range(size)) == order.tolist()


def test_a_cache_serves_batches_of_another_size(tmp_path):
    open_cache(tmp_path, 9)
    cache = open_cache(tmp_path, 24, rows={0: range(5)})
    assert read(cache, range(24)) == ORDER.tolist()


@pytest.mark.parametrize("dies_at", range(1, 7))
def test_a_killed_build_continues_after_its_last_part(tmp_path, dies_at):
    calls = itertools.count(1)

    def dying(numbers):
        if next(calls) == dies_at:
            raise KeyboardInterrupt
        return compute(numbers)

    with pytest.raises(KeyboardInterrupt):
        open_cache(tmp_path, compute=dying)
    whole = (dies_at - 1) // 2
    half = tmp_path / f"part-{whole:05d}"
    half.mkdir()
    (half / "process-0.features.bfloat16.npy").write_bytes(b"half")
    (half / "process-7.features.bfloat16.npy").write_bytes(b"of more processes")
    compute.calls = []
    cache = open_cache(tmp_path)
    assert len(compute.calls) == 6 - 2 * whole
    assert read(cache, range(24)) == ORDER.tolist()
    assert len(list(half.iterdir())) == 2


@pytest.mark.parametrize(
    "damage", [lambda file: file.write_bytes(file.read_bytes()[:-2]), lambda file: file.unlink()]
)
def test_damage_is_named(tmp_path, damage):
    open_cache(tmp_path)
    file = tmp_path / "part-00001" / "process-0.features.bfloat16.npy"
    damage(file)
    with pytest.raises(errors.InputError) as caught:
        open_cache(tmp_path)
    assert str(caught.value) == f"{file}: damaged; delete {tmp_path} to compute it again"


def make_mixture():
    """Opens corpora of 40 and 3 rows; the first token of a row is its number."""

    def corpus(size, first):
        documents = [np.array([first + i, 2**31, 2**31 + 1], np.uint32) for i in range(size)]
        return corpora.join("toy", documents)

    opened = corpus(40, 0), corpus(3, 1000)
    rows = tuple(packing.PackedRows(one, packing.pack(one, LENGTH)) for one in opened)
    return Mixture(rows, (1.0, 1.0), seed=5)


def cached_batches(directory, batches, mixture):
    """Opens cached batches with the tokens as features, which identify their row."""

    def features_of(corpus):
        def compute(numbers):
            batch = mixture.read([(corpus, number) for number in numbers])
            return {"features": batch["tokens"][..., None].astype(np.float32)}

        return compute

    caches = [
        open_cache(directory / str(corpus), 99, features_of(corpus), mixture.order(corpus, 0))
        for corpus in range(2)
    ]
    return CachedBatches(batches, mixture, caches)


def test_cached_batches_are_the_online_ones_with_features(tmp_path):
    """Through all passes, and on from a position that either of them has saved."""
    mixture = make_mixture()
    online = Batches(mixture, batch_size=ROWS)
    cached = cached_batches(tmp_path, Batches(mixture, batch_size=ROWS), mixture)
    seen = set()
    for step in range(60):
        if step == 33:
            state = json.loads(json.dumps(cached.state()))
            assert state == online.state()
            resumed = Batches(mixture, batch_size=ROWS, state=state)
            cached = cached_batches(tmp_path, resumed, mixture)
        batch, other = next(online), next(cached)
        found = other.pop("features")
        assert batch.keys() == other.keys()
        for name, array in batch.items():
            np.testing.assert_array_equal(array, other[name])
        np.testing.assert_array_equal(found[..., 0], batch["tokens"])
        seen |= set(batch["tokens"][:, 0].tolist())
    assert seen == {*range(40), 1000, 1001, 1002}


def test_the_position_of_an_earlier_version_is_one_line():
    with pytest.raises(errors.InputError, match=r"earlier version with train\.features=cached"):
        Batches(make_mixture(), batch_size=ROWS, state={"batch": 7})


def test_the_fingerprint_depends_on_weights(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = features.fingerprint(tmp_path)
    file.write_bytes(b"other")
    assert features.fingerprint(tmp_path) != before
