"""Tests of the points that a forecast compiles and stores."""

import dataclasses

import pytest
from support.models import make_target

from dflash import errors
from dflash.config import loader
from experiments.forecast import points as compile_points
from experiments.forecast.costs import LIMITS, PLAIN, CompiledCost, DeviceMemory, StrategyPoint
from experiments.forecast.schema import ForecastRun


def config(*overrides):
    given = ("tpu.topology=v5p:1x1x1", "forecast.batches=[1,4]", *overrides)
    return loader.load("configs/random_tiny_dflash.yml", given, ForecastRun)


class Compiler:
    """Fake of `compile_point` that records its calls and raises for the points in `broken`."""

    def __init__(self, broken=()):
        self.calls, self.broken = [], broken

    def __call__(self, spec, machine):
        if (spec.strategy, spec.batch) in self.broken:
            raise KeyboardInterrupt
        self.calls.append((spec.strategy, spec.batch))
        cost = CompiledCost(dict.fromkeys(LIMITS, 0.1 * spec.batch), 1 / 3)
        memory = DeviceMemory(1.0, 2.0)
        return StrategyPoint(spec.strategy, spec.batch, 4, cost, cost, memory)


@pytest.fixture
def specs(monkeypatch):
    monkeypatch.setattr(compile_points.importlib.metadata, "version", lambda name: "1")
    return compile_points.point_specs(
        config("strategies.a.block_size=2", "strategies.b.block_size=4")
    )


def test_plain_decoding_comes_first_and_every_batch_once(specs):
    names = [(spec.strategy, spec.batch) for spec in specs]
    assert names == [(name, batch) for name in (PLAIN, "a", "b") for batch in (1, 4)]
    assert len({spec.key for spec in specs}) == len(specs)
    alone = compile_points.point_specs(config("forecast.batches=[4,4]"))
    assert [spec.strategy for spec in alone] == [PLAIN, "dflash"]


def test_a_stopped_forecast_resumes(specs, tmp_path):
    first = Compiler(broken={("a", 4)})
    with pytest.raises(KeyboardInterrupt):
        compile_points.compile_points(specs, None, tmp_path, compile_one=first)
    assert first.calls == [(PLAIN, 1), (PLAIN, 4), ("a", 1)]
    second = Compiler()
    found = compile_points.compile_points(specs, None, tmp_path, compile_one=second)
    assert second.calls == [("a", 4), ("b", 1), ("b", 4)]
    again = Compiler()
    assert compile_points.compile_points(specs, None, tmp_path, compile_one=again) == found
    assert not again.calls
    assert found["a", 4].cost(10).cycles_ms == pytest.approx(11 / 3)


def test_a_damaged_point_is_compiled_again(specs, tmp_path):
    compile_points.compile_points(specs, None, tmp_path, compile_one=Compiler())
    damaged = next((tmp_path / "points").glob("b-4-*.json"))
    damaged.write_text('{"strategy"')
    again = Compiler()
    compile_points.compile_points(specs, None, tmp_path, compile_one=again)
    assert again.calls == [("b", 4)]


def test_the_key_covers_what_changes_the_program(specs):
    spec = specs[-1]
    deeper = config("target.architecture.num_hidden_layers=3")
    assert dataclasses.replace(spec, config=deeper).key != spec.key
    assert dataclasses.replace(spec, batch=5).key != spec.key
    elsewhere = config("forecast.contexts=[7]", "forecast.batches=[9]", "strategies.c.block_size=3")
    assert dataclasses.replace(spec, config=elsewhere, strategy="c").key == spec.key


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["strategies.plain.block_size=4"],
            "strategies.plain: this name is reserved for decoding without",
        ),
        (["forecast.contexts=[]"], "forecast.contexts: expected at least one number"),
        (
            ["strategies.x.block_size=auto"],
            "strategies.x.block_size: auto depends on acceptance, which is not measured here",
        ),
    ],
)
def test_unusable_forecast_configs_are_rejected(overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        compile_points.point_specs(config(*overrides))


class DrafterStub:
    """Stub of a drafter with only its feature layers."""

    def __init__(self, *layers):
        self.feature_layers = layers


def test_identical_layers_are_truncated():
    target = make_target(num_hidden_layers=9)
    drafter = DrafterStub(1, 4, 8)
    compile_points._truncate(target, drafter)
    assert (len(target.layers), drafter.feature_layers) == (2, (0, 1, 0))
    target = make_target(num_hidden_layers=9)
    compile_points._truncate(target, DrafterStub())
    assert len(target.layers) == 2


def test_different_layers_are_kept():
    target = make_target(num_hidden_layers=3)
    target.layers[1].mlp = make_target(intermediate_size=96).layers[0].mlp
    drafter = DrafterStub(2)
    compile_points._truncate(target, drafter)
    assert (len(target.layers), drafter.feature_layers) == (3, (2,))
