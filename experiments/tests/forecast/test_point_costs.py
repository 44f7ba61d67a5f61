"""Tests of costs that are summed over the operations of a cycle with few layers."""

import dataclasses
import json

import pytest

from dflash.compiler.costs import ScheduledOperation
from dflash.compiler.hlo import COLLECTIVES, Instruction
from dflash.compiler.topology import RooflineRates
from dflash.parallel.chips import Chip
from experiments.forecast import costs as forecast
from experiments.forecast.costs import CompiledCost, DeviceMemory, LayerRepeats, StrategyPoint

CHIP = Chip("v9", tflops=1, hbm_gb_per_s=1, hbm_gb=1, clock_ghz=1.0)
RATES = RooflineRates(flops_per_s=1e9, bytes_per_s=1e9)


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
    cost = forecast.cost_of(found, RATES, CHIP, fill=0.5, repeats=LayerRepeats(3, 2))
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
    found = forecast.by_window([*kernels, operation("drafter/mlp", name="fusion_w8")])
    assert found == {64: kernels[1:3], 256: kernels[3:]}
    point = StrategyPoint(
        *("a", 1, 4),
        *(CompiledCost({"context": ms}, ms) for ms in (1.0, 0.5)),
        DeviceMemory(1.0, 2.0),
        {64: CompiledCost({"context": 0.25}, 0.25)},
    )
    again = StrategyPoint.from_json(json.loads(json.dumps(dataclasses.asdict(point))))
    assert again == point
    ms = [again.cost(context).roofline_ms for context in (0, 32, 64, 128)]
    assert ms == [1, 1 + 16 + 8, 1 + 32 + 16, 1 + 64 + 16]
