"""The course of a sweep, with a runner that computes something small."""

import csv
import json

import pytest
from support import failure

from dflash import errors
from dflash.config import loader
from dflash.config import sweep_points as sweep_lib
from dflash.runs import shards, sweeps
from dflash.runs.display import Display
from dflash.runs.shards import Shard
from dflash.storage import files

CONFIG = """
base: [random_tiny_dflash.yml]
sweep: {product: {decode.seed: [1, 2, 3], decode.top_k: [10, 20]}}
"""


class Sums(sweeps.Runner):
    """Runner that adds up a point's values, writes a file, and fails at chosen points."""

    metrics = ("sum", "half")
    shown = ("sum",)

    def __init__(self, display, unusable=(), failing=()):
        super().__init__(display)
        self.order = []
        self.unusable, self.failing = unusable, failing

    def check(self, config):
        if config.decode.seed in self.unusable:
            raise errors.InputError(f"seed {config.decode.seed} will not do")

    def affinity(self, config):
        return str(config.decode.top_k)

    def run(self, config, directory):
        seed, top_k = config.decode.seed, config.decode.top_k
        if seed in self.failing:
            raise RuntimeError(f"out of memory for {seed}\nmore of it")
        self.order.append((seed, top_k))
        directory.mkdir(parents=True)
        half = None if seed == 1 else (seed + top_k) / 2
        return {"sum": seed + top_k, "half": half, "unheard of": 1}


@pytest.fixture
def load(tmp_path):
    def load_with(*overrides):
        (tmp_path / "s.yml").write_text(CONFIG)
        return sweep_lib.load(tmp_path / "s.yml", overrides)

    return load_with


def run(sweep, directory, index=None, shard=shards.WHOLE, **options):
    runner = Sums(Display.silent(), **options)
    outcome = sweeps.run(sweep, runner, directory, Display.silent(), index=index, shard=shard)
    return runner.order, outcome


def table(directory):
    with (directory / sweeps.TABLE).open(newline="") as lines:
        return {row["name"]: row for row in csv.DictReader(lines)}


def test_points_run_by_affinity_and_leave_one_table(load, tmp_path):
    order, outcome = run(load(), tmp_path / "w")
    assert order == [(1, 10), (2, 10), (3, 10), (1, 20), (2, 20), (3, 20)]
    assert list(outcome.rows) == list(load().points)
    assert outcome.failed == {}
    rows = table(tmp_path / "w")
    assert set(rows) == set(load().points)
    row = rows["decode.seed=2,decode.top_k=20"]
    assert {key: row[key] for key in ("decode.seed", "decode.top_k", "sum", "half")} == {
        "decode.seed": "2", "decode.top_k": "20", "sum": "22", "half": "11.0",
    }  # fmt: skip
    assert rows["decode.seed=1,decode.top_k=10"]["half"] == "null"
    assert "unheard of" not in row


def test_finished_points_are_skipped_and_new_values_run(load, tmp_path):
    run(load(), tmp_path)
    before = (tmp_path / sweeps.TABLE).read_text()
    order, outcome = run(load(), tmp_path)
    assert order == []
    assert len(outcome.rows) == 6
    assert (tmp_path / sweeps.TABLE).read_text() == before
    order, outcome = run(load("sweep.product.decode.seed=[1, 4]"), tmp_path)
    assert order == [(4, 10), (4, 20)]
    assert len(outcome.rows) == 4  # of this sweep
    assert len(table(tmp_path)) == 8  # of both
    assert (tmp_path / sweeps.TABLE).read_text().startswith(before)


def test_a_table_lost_or_cut_short_is_made_again(load, tmp_path):
    """A kill between a point's end and its line in the table, or a file that somebody spoiled."""
    run(load(), tmp_path)
    before = (tmp_path / sweeps.TABLE).read_text()
    (tmp_path / sweeps.TABLE).unlink()
    assert run(load(), tmp_path)[0] == []
    assert sorted(table(tmp_path)) == sorted(load().points)
    (tmp_path / sweeps.TABLE).write_text("".join(before.splitlines(True)[:-1]))
    assert run(load(), tmp_path)[0] == []
    assert (tmp_path / sweeps.TABLE).read_text() == before


def test_bad_points_are_named_before_any_runs(load, tmp_path):
    with pytest.raises(errors.ConfigError) as caught:
        run(load(), tmp_path / "w", unusable=(2, 3))
    assert caught.value.problems == (
        "seed 2 will not do [decode.seed=2,decode.top_k=10 and 1 more]",
        "seed 3 will not do [decode.seed=3,decode.top_k=10 and 1 more]",
    )
    assert not (tmp_path / "w").exists()


def test_a_point_that_fails_leaves_the_others_alone(load, tmp_path):
    order, outcome = run(load(), tmp_path, failing=(2,))
    assert len(order) == 4
    assert outcome.failed == dict.fromkeys(
        ("decode.seed=2,decode.top_k=10", "decode.seed=2,decode.top_k=20"), "out of memory for 2"
    )
    assert len(table(tmp_path)) == 4
    assert run(load(), tmp_path)[0] == [(2, 10), (2, 20)]


def test_one_point_by_its_index(load, tmp_path):
    order, outcome = run(load(), tmp_path, index=3)
    assert order == [(2, 20)]
    assert list(outcome.rows) == ["decode.seed=2,decode.top_k=20"]
    with pytest.raises(errors.ConfigError, match="--index: 6, but the points are 0 to 5"):
        run(load(), tmp_path, index=6)


def test_another_config_s_points_are_refused(load, tmp_path):
    run(load(), tmp_path)
    with pytest.raises(errors.WorkdirError, match="belongs to a run of another config"):
        run(load("decode.max_new_tokens=3"), tmp_path)
    path = tmp_path / "points" / "decode.seed=1,decode.top_k=10" / sweeps.POINT
    for damage in ("{", "[]", '{"config_hash": "x"}', "[" * 100_000):
        path.write_text(damage)
        with pytest.raises(errors.WorkdirError, match="damaged: delete it to run the point again"):
            run(load(), tmp_path)


def test_a_run_begun_with_another_config_is_refused_up_front(load, tmp_path):
    point = load("decode.max_new_tokens=3").points["decode.seed=1,decode.top_k=10"]
    directory = tmp_path / "points" / point.name
    directory.mkdir(parents=True)
    (directory / "config.yml").write_text(loader.to_yaml(point.config))
    message = failure(run, load(), tmp_path, kind=errors.ConfigError)
    assert "another config (decode.max_new_tokens: 3 there, 64 here)" in message
    assert message.endswith(f"[{point.name}]")


def test_a_point_of_an_earlier_version_counts_as_finished(load, tmp_path):
    """A finished point may have another hash if its config.yml is equal."""
    sweep = load()
    run(sweep, tmp_path)
    point = sweep.points["decode.seed=1,decode.top_k=10"]
    path = tmp_path / "points" / point.name / sweeps.POINT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config_hash": "of before"}))
    with pytest.raises(errors.WorkdirError, match="belongs to a run of another config: use"):
        run(sweep, tmp_path)  # without config.yml, the hash decides
    path.with_name("config.yml").write_text(loader.to_yaml(point.config))
    assert run(sweep, tmp_path)[0] == []


def test_shards_divide_the_points_and_the_last_has_the_whole_table(load, tmp_path):
    done = [run(load(), tmp_path, shard=Shard(index, 4)) for index in range(4)]
    assert sorted(len(order) for order, _ in done) == [1, 1, 2, 2]
    assert list(done[0][1].rows) == [
        "decode.seed=1,decode.top_k=10",
        "decode.seed=3,decode.top_k=10",
    ]
    _, whole = run(load(), tmp_path)
    assert done[3][1].rows == whole.rows
    assert len(table(tmp_path)) == 6


def test_a_table_that_another_host_overtakes_loses_no_point(load, tmp_path, monkeypatch):
    """Another host finishes a point between the last reading and writing of this one."""
    run(load(), tmp_path, shard=Shard(0, 2))
    points, write = tmp_path / sweeps.POINTS, files.write_whole

    def overtaken(path, content):
        done = sorted(points.glob(f"*/{sweeps.POINT}"))
        if path.name == sweeps.TABLE and len(done) == 6:
            (points / "late").mkdir()
            (points / "late" / sweeps.POINT).write_bytes(done[0].read_bytes())
        write(path, content)

    monkeypatch.setattr(files, "write_whole", overtaken)
    run(load(), tmp_path, shard=Shard(1, 2))
    assert len(table(tmp_path)) == 7


def test_a_table_has_the_columns_of_all_points(tmp_path):
    contents = {
        "p10": {"values": {"x": 1, "text": 'with "quotes", commas\nand lines'}, "metrics": {}},
        "p9": {"values": {"x": [1, 2]}, "metrics": {"y": True}},
    }
    for name, content in contents.items():
        path = tmp_path / sweeps.POINTS / name / sweeps.POINT
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps({**content, "config_hash": "h"}))
    sweeps.write_table(tmp_path)
    assert list(table(tmp_path).values()) == [
        {"name": "p9", "x": "1-2", "y": "true", "config_hash": "h", "text": ""},
        {
            "name": "p10",
            "x": "1",
            "y": "",
            "config_hash": "h",
            "text": 'with "quotes", commas\nand lines',
        },
    ]
