"""Tests of the points that a forecast compiles, stores and sums up."""

import dataclasses
import json
import types

import pytest
from support.models import make_sharding, make_target

from dflash import errors
from dflash.compiler import compile_points
from dflash.compiler.compile_points import LayerRepeats
from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.forecast import LIMITS, PLAIN, CompiledCost, DeviceMemory, StrategyPoint
from dflash.compiler.hlo import COLLECTIVES, Instruction
from dflash.compiler.topology import RooflineRates
from dflash.config import loader, tpu_schema
from dflash.parallel.chips import Chip

CHIP = Chip("v9", tflops=1, hbm_gb_per_s=1, hbm_gb=1, clock_ghz=1.0)
RATES = RooflineRates(flops_per_s=1e9, bytes_per_s=1e9)


def config(*overrides):
    given = ("tpu.topology=v5p:1x1x1", "forecast.batches=[1,4]", *overrides)
    return loader.load("configs/random_tiny_dflash.yml", given, tpu_schema.CompileDecode)


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
        return StrategyPoint(
            spec.strategy, spec.batch, 4, cost, cost, memory, {"all-reduce": (2, 4.0)}
        )


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
    assert found["a", 4].collectives == {"all-reduce": (2, 4.0)}


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
            ["strategies.x.block_size=auto", "strategies.x.tree.budget=8"],
            "strategies.x.tree: the acceptance of trees of each size is unknown, so "
            "block_size=auto has no forecast; leave one of them out",
        ),
    ],
)
def test_unusable_forecast_configs_are_rejected(overrides, message):
    with pytest.raises(errors.ConfigError, match=message):
        compile_points.point_specs(config(*overrides))


def test_a_strategy_that_chooses_its_rows_has_a_point_for_each_choice(monkeypatch):
    monkeypatch.setattr(compile_points.importlib.metadata, "version", lambda name: "1")
    chosen = config("strategies.x.block_size=auto", "strategies.y.block_size=2")
    specs = compile_points.point_specs(chosen)
    machine = types.SimpleNamespace(sharding=make_sharding())
    names = [
        (spec.name, spec.batch)
        for spec in compile_points.by_choice(specs, machine)
        if spec.strategy != PLAIN
    ]
    of_one = [f"x {rows}" for rows in (1, 2, 4, 8, 12, 16)]
    of_four = [*of_one, "x ~2", "x ~4", "x ~8"]  # A single sequence has nothing to divide.
    rest = [("y", 1), ("y", 4)]
    assert names == [*((name, 1) for name in of_one), *((name, 4) for name in of_four), *rest]
    # A cycle that divides rows drafts as many as the largest share has, which costs as much.
    divided = {
        spec.choice: spec for spec in compile_points.by_choice(specs, machine) if spec.divides
    }
    assert {name: spec.drafted for name, spec in divided.items()} == {"~2": 8, "~4": 16, "~8": 16}
    assert divided["~2"].key != dataclasses.replace(divided["~2"], drafted=16).key


def operation(scope, *, name="fusion.1", opcode="fusion", flops=0.0, size=0, cycles=0, times=1):
    instruction = Instruction(name, opcode, (), (), {}, scope, cycles, None, None, None, "", False)
    collective = opcode if opcode in COLLECTIVES else None
    return ScheduledOperation(instruction, scope, times, flops, size, 0, cycles, (), collective)


def test_operations_are_summed_by_bottleneck():
    """Uses rates at which a byte, an operation and a cycle take one nanosecond each."""
    million = 1_000_000
    found = [
        operation("target/mlp", size=2 * million, flops=million, cycles=3 * million),
        operation("target/attention", size=million, cycles=million, times=2),
        operation("target/attention", name="paged_attention_t4.1", opcode="custom-call",
                  size=10 * million, times=2),
        operation("drafter/attention", name="block_attention_t4", opcode="custom-call",
                  size=6 * million),
        operation("drafter/mlp", size=million, flops=5 * million),
        operation("unembed", size=4 * million, cycles=million),
        operation("", name="copy.1", opcode="copy", size=7 * million),
    ]  # fmt: skip
    cost = compile_points.cost_of(found, RATES, CHIP, fill=0.5, repeats=LayerRepeats(3, 2))
    # The target's layers repeat three times, the drafter's twice; the context is half full.
    assert cost.limits == pytest.approx(
        {
            "weights": 3 * 2 + 3 * 2 * 1,
            "context": 3 * 2 * 0.5 * 10 + 2 * 0.5 * 6,
            "arithmetic": 2 * 5,
            "output head": 4,
            "rest": 7,
        }
    )
    # Kernels count by roofline; other operations without cycles count as 0.
    assert cost.cycles_ms == pytest.approx(3 * 3 + 3 * 2 * 1 + 36 + 1)
    assert cost.bottleneck == ("context", pytest.approx(36 / 69))


def test_draft_layers_with_a_window_read_no_more_than_the_window():
    def kernel(name):
        return operation("drafter/attention", name=name, opcode="custom-call", size=1)

    kernels = [kernel(f"block_attention_t4{end}") for end in ("", "_w64", "_w64.1", "_w256.2")]
    found = compile_points._by_window([*kernels, operation("drafter/mlp", name="fusion_w8")])
    assert found == {64: kernels[1:3], 256: kernels[3:]}
    point = StrategyPoint(
        *("a", 1, 4),
        *(CompiledCost({"context": ms}, ms) for ms in (1.0, 0.5)),
        DeviceMemory(1.0, 2.0),
        {},
        {64: CompiledCost({"context": 0.25}, 0.25)},
    )
    again = StrategyPoint.from_json(json.loads(json.dumps(dataclasses.asdict(point))))
    assert again == point
    ms = [again.cost(context).roofline_ms for context in (0, 32, 64, 128)]
    assert ms == [1, 1 + 16 + 8, 1 + 32 + 16, 1 + 64 + 16]


def test_collectives_are_multiplied_by_the_layers():
    def reduce(scope, times):
        return operation(scope, opcode="all-reduce", times=times)

    found = compile_points._collectives(
        [reduce("target/mlp", 2), reduce("drafter/fc", 1)], LayerRepeats(18.0)
    )
    assert found == {"all-reduce": (37, 0)}


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
