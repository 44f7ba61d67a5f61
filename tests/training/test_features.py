"""The feature cache: computed once, whole parts only, streamed in a new order every epoch."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from dflash import errors
from dflash.training import features
from dflash.training.features import CachedBatches

ROWS, BATCHES, LENGTH = 4, 6, 3


class Source:
    """Batches of rows that carry their number."""

    made = 0

    def __init__(self, state):
        self.number = 0 if state is None else state["next"]

    def __next__(self):
        start = self.number * ROWS
        self.number += 1
        Source.made += 1
        rows = np.arange(start, start + ROWS, dtype=np.int32)
        return {"tokens": np.repeat(rows[:, None], LENGTH, axis=1)}

    def state(self):
        return {"next": self.number}


def compute(batch):
    wide = batch["tokens"][..., None] * np.ones(2, np.float32)
    return {"features": (wide / 2).astype(ml_dtypes.bfloat16)}


def open_cache(directory, compute=compute, **options):
    return features.open_cache(
        directory,
        **{"num_batches": BATCHES, "batches": Source} | options,
        compute=compute,
        progress=lambda done: None,
    )


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Two batches to a part."""
    monkeypatch.setattr(features, "_PART_BYTES", 1.5 * ROWS * LENGTH * 8)
    Source.made = 0


def numbers(batch) -> list[int]:
    return batch["tokens"][:, 0].tolist()


def test_rows_come_back_with_their_features(tmp_path):
    cache = open_cache(tmp_path)
    assert (cache.num_rows, len(cache.parts)) == (ROWS * BATCHES, 3)
    rows = cache.rows([23, 0, 9])
    assert numbers(rows) == [23, 0, 9]
    assert rows["features"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(rows["features"][:, 0, 0].astype(float), [11.5, 0, 4.5])


def test_the_last_part_may_be_smaller(tmp_path):
    cache = open_cache(tmp_path, num_batches=5)
    assert (cache.num_rows, len(cache.parts)) == (5 * ROWS, 3)
    assert numbers(cache.rows([19])) == [19]


def test_a_finished_cache_computes_nothing(tmp_path):
    open_cache(tmp_path)
    made = Source.made
    open_cache(tmp_path, compute=None)
    assert Source.made == made == BATCHES


@pytest.mark.parametrize("dies_at", range(1, BATCHES + 1))
def test_a_killed_build_continues_after_its_last_part(tmp_path, dies_at):
    whole = open_cache(tmp_path / "whole")
    calls = itertools.count(1)

    def dying(batch):
        if next(calls) == dies_at:
            raise KeyboardInterrupt
        return compute(batch)

    with pytest.raises(KeyboardInterrupt):
        open_cache(tmp_path / "killed", dying)
    half = tmp_path / "killed" / "process-0-of-1" / f"part-{(dies_at - 1) // 2:05d}"
    half.mkdir()
    (half / "tokens.npy").write_bytes(b"half")
    Source.made = 0
    rest = open_cache(tmp_path / "killed")
    assert Source.made == BATCHES - (dies_at - 1) // 2 * 2
    everything = range(ROWS * BATCHES)
    for name, array in whole.rows(everything).items():
        np.testing.assert_array_equal(array, rest.rows(everything)[name])


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path):
    source = CachedBatches(open_cache(tmp_path), range(ROWS), seed=0)
    epochs = [[n for _ in range(BATCHES) for n in numbers(next(source))] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(ROWS * BATCHES))
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_rows_are_shuffled_once_an_epoch(tmp_path, monkeypatch):
    source = CachedBatches(open_cache(tmp_path), range(ROWS), seed=0)
    seeds, generator = [], np.random.default_rng
    monkeypatch.setattr(
        np.random, "default_rng", lambda seed: seeds.append(seed) or generator(seed)
    )
    for _ in range(2 * BATCHES):
        next(source)
    assert seeds == [(0, epoch, row) for epoch in (0, 1) for row in range(ROWS)]


def test_a_state_continues_the_order(tmp_path):
    cache = open_cache(tmp_path)
    source = CachedBatches(cache, range(ROWS), seed=0)
    for _ in range(8):
        next(source)
    twin = CachedBatches(cache, range(ROWS), seed=0, state=source.state())
    for _ in range(5):
        assert numbers(next(source)) == numbers(next(twin))


def test_less_than_a_batch_is_an_error(tmp_path):
    with pytest.raises(errors.InputError, match="24 rows do not fill a batch of 25"):
        CachedBatches(open_cache(tmp_path), range(25), seed=0)


def test_damage_is_named(tmp_path):
    open_cache(tmp_path)
    file = tmp_path / "process-0-of-1" / "part-00001" / "features.bfloat16.npy"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(errors.InputError, match=r"features\.bfloat16\.npy: damaged"):
        open_cache(tmp_path)


def test_the_key_depends_on_weights_and_config(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = features.fingerprint(tmp_path)
    file.write_bytes(b"other")
    after = features.fingerprint(tmp_path)
    keys = [features.cache_key(*x) for x in ((before, 1), (after, 1), (before, 2), (before, 1))]
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]
