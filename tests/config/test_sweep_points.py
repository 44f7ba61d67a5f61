"""Sweeps: which points a block stands for, and what is wrong with a bad one."""

import pytest

from dflash import errors
from dflash.config import loader, merging, sweep_points

BASE = "base: [random_tiny_dflash.yml]\n"
SHIPPED = sorted(merging.package_configs().glob("sweeps/*.yml"))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Loads a config of this text, with overrides."""
    monkeypatch.chdir(tmp_path)

    def load_text(text, *overrides):
        (tmp_path / "s.yml").write_text(BASE + text)
        return sweep_points.load("s.yml", overrides)

    return load_text


@pytest.fixture
def failure(load):
    """The problems of a config of this text."""

    def problems(*given):
        with pytest.raises(errors.ConfigError) as caught:
            load(*given)
        return list(caught.value.problems)

    return problems


def test_a_product_has_every_combination_in_order(load):
    found = load("sweep: {product: {drafter.block_size: [4, 8], decode: {temperature: [0, 0.5]}}}")
    assert found.run == "decode"
    assert found.axes == (("drafter.block_size",), ("decode.temperature",))
    assert list(found.points) == [
        "drafter.block_size=4,decode.temperature=0",
        "drafter.block_size=4,decode.temperature=0.5",
        "drafter.block_size=8,decode.temperature=0",
        "drafter.block_size=8,decode.temperature=0.5",
    ]
    configs = [point.config for point in found.points.values()]
    assert [(c.drafter.block_size, c.decode.temperature) for c in configs] == [
        (4, 0.0), (4, 0.5), (8, 0.0), (8, 0.5),
    ]  # fmt: skip
    overrides = ["drafter.block_size=4", "decode.temperature=0.5"]
    assert configs[1] == loader.load("random_tiny_dflash.yml", overrides)
    assert found.points["drafter.block_size=8,decode.temperature=0"].values == {
        "drafter.block_size": 8,
        "decode.temperature": 0,
    }


def test_a_zip_goes_side_by_side_and_is_one_axis(load):
    found = load(
        "sweep: {product: {decode.seed: [1, 2]}, "
        "zip: {decode.batch_size: [1, 8], decode.sync_every: [8, 2]}}"
    )
    assert found.axes == (("decode.seed",), ("decode.batch_size", "decode.sync_every"))
    decodes = [point.config.decode for point in found.points.values()]
    assert [(d.seed, d.batch_size, d.sync_every) for d in decodes] == [
        (1, 1, 8), (1, 8, 2), (2, 1, 8), (2, 8, 2),
    ]  # fmt: skip


def test_the_command_line_goes_over_the_block_and_the_config(load):
    text = "sweep: {product: {decode.seed: [1, 2, 3], decode.top_k: [1, 2]}}"
    found = load(
        text, "sweep.product.decode.seed=[7]", "sweep.product.decode.top_k=5", "dtype=bfloat16"
    )
    assert list(found.points) == ["decode.seed=7,decode.top_k=5"]
    (point,) = found.points.values()
    assert (point.config.decode.seed, point.config.dtype) == (7, "bfloat16")


def test_bases_may_hold_a_part_of_the_block(load, tmp_path):
    (tmp_path / "b.yml").write_text("sweep: {product: {decode.seed: [1], decode.top_k: [3]}}")
    (tmp_path / "s2.yml").write_text(
        "base: [random_tiny_dflash.yml, b.yml]\nsweep: {product: {decode.seed: [4, 5]}}"
    )
    assert list(sweep_points.load("s2.yml").points) == [
        "decode.seed=4,decode.top_k=3",
        "decode.seed=5,decode.top_k=3",
    ]


def test_names_are_fit_for_directories_and_stay_apart(load):
    long = ", ".join(f'"{"x" * 200}{end}"' for end in "ab")
    text = f"sweep: {{product: {{prompts.file: [a/b, a b, null, {long}]}}}}\nprompts: {{text: []}}"
    names = list(load(text).points)
    assert len(set(names)) == 5
    assert names[2] == "prompts.file=null"
    for name in names:
        assert len(name) <= 130
        assert "/" not in name
        assert " " not in name
    assert names == list(load(text).points)  # and the next time


@pytest.mark.parametrize(
    "values",
    ['[[a, b-c], ["a-b", c], ["a-b-c"], [a, b, c]]', '[["null"], ["null-null"], ["null", "null"]]'],
)
def test_lists_that_read_alike_are_points_of_their_own(load, values):
    points = load(f"sweep: {{product: {{prompts.text: {values}}}}}").points
    assert len(points) == len({point.config.prompts.text for point in points.values()})
    # A name depends on the values of its point alone.
    for name, point in points.items():
        text = f"sweep: {{product: {{prompts.text: [{list(point.config.prompts.text)}]}}}}"
        assert list(load(text).points) == [name]


def test_every_bad_point_is_named_at_once(failure):
    text = (
        "sweep:\n  product:\n    drafter.block_size: [4, 99]\n    decode.temperature: [0, -1, x]\n"
    )
    assert failure(text) == [
        "s.yml:5: decode.temperature: expected a number >= 0, got -1 "
        "[drafter.block_size=4,decode.temperature=-1 and 1 more]",
        "s.yml:5: decode.temperature: expected a number >= 0, got 'x' "
        "[drafter.block_size=4,decode.temperature=x and 1 more]",
        "s.yml:4: drafter.block_size: 99 exceeds drafter.architecture.block_size=16 "
        "[drafter.block_size=99,decode.temperature=0 and 2 more]",
    ]


def test_what_is_wrong_with_all_points_is_said_once(failure):
    text = "decode: {seeed: 1}\nsweep: {product: {decode.seed: [1, 2]}}"
    assert failure(text) == ["s.yml:2: decode.seeed: unknown key; did you mean 'decode.seed'?"]


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("", "s.yml: sweep: required: keys and their values, below product"),
        ("sweep: 3", "s.yml:2: sweep: expected a mapping"),
        ("sweep: {product: 3}", "s.yml:2: sweep.product: expected a mapping"),
        ("sweep: {prodct: {}}", "s.yml:2: sweep.prodct: unknown key; did you mean 'product'?"),
        ("sweep: {run: decod, product: {dtype: [float32]}}",
         "s.yml:2: sweep.run: unknown run 'decod'; did you mean 'decode'?"),
        ("sweep: {product: {decode.seed: 3}}",
         "s.yml:2: sweep.product.decode.seed: expected a list of values"),
        ("sweep: {zip: {decode.seed: [1, 2], decode.top_k: [1]}}",
         "s.yml:2: sweep.zip: lists of different lengths (decode.seed: 2, decode.top_k: 1)"),
        ("sweep: {product: {decode.seed: [1]}, zip: {decode.seed: [1]}}",
         "s.yml:2: sweep: decode.seed and decode.seed overlap"),
        ("sweep: {product: {drafter.name: [none], drafter: [{block_size: 4}]}}",
         "s.yml:2: sweep: drafter and drafter.name overlap"),
        ("sweep: {product: {decode.seed: [1, 1]}}",
         "s.yml: sweep: the point decode.seed=1 occurs twice [decode.seed=1]"),
        (f"sweep: {{product: {{decode.seed: {[*range(101)]}, decode.top_k: {[*range(100)]}}}}}",
         "s.yml: sweep: 10100 points exceed the limit 10000"),
    ],
)  # fmt: skip
def test_a_bad_block_is_named(failure, block, problem):
    assert failure(block) == [problem]


def test_a_key_of_the_sweep_is_not_for_the_command_line(failure):
    text = "sweep: {product: {decode.seed: [1, 2]}}"
    assert failure(text, "decode.seed=3") == ["command line: decode.seed: the sweep sets this key"]


def test_other_commands_leave_sweeps_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.yml").write_text(BASE + "sweep: {product: {decode.seed: [1, 2]}}")
    with pytest.raises(errors.ConfigError) as caught:
        loader.load("s.yml")
    assert caught.value.problems == ("s.yml:2: sweep: only dflash sweep accepts this key",)
    with pytest.raises(errors.ConfigError, match="command line: sweep: only dflash sweep"):
        loader.load("random_tiny_dflash.yml", ["sweep.product.decode.seed=[1]"])


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_sweep_loads_from_anywhere(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sweep_points.load(f"configs/sweeps/{path.name}")
    assert len(found.points) > 1
    header = path.read_text(encoding="utf-8")
    assert f"python -m dflash.sweep configs/sweeps/{path.name}" in header
    assert "Needs:" in header
