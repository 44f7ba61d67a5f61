"""Tests of the compile report, its text and its budgets."""

import dataclasses
from types import SimpleNamespace

import pytest
from support import hlo_snippets as snippets

from dflash.compiler import report
from dflash.compiler.components import MLP, UNEMBED
from dflash.compiler.programs import CYCLE, PREFILL, CompiledProgram
from dflash.compiler.report import CompileReport, RunAssumptions
from dflash.compiler.topology import RooflineRates, Topology
from dflash.config.tpu_schema import TpuConfig
from dflash.parallel import chips

CHIP = chips.find("v5p")
RATES = RooflineRates(flops_per_s=400e12, bytes_per_s=2e12)
WEIGHT = 2560 * 9728 * 2


@dataclasses.dataclass
class Compiled:
    """Stub of `jax.stages.Compiled` for the module of the HLO snippets."""

    text: str = snippets.MODULE

    def as_text(self):
        return self.text

    def memory_analysis(self):
        return SimpleNamespace(temp_size_in_bytes=10**9, generated_code_size_in_bytes=10**8)

    def cost_analysis(self):
        return {"flops": 1.0, "bytes accessed": 2.0, "optimal_seconds": 0.003}


def examine(name=CYCLE, text=snippets.MODULE, head=2765e6):
    ideals = {MLP: WEIGHT, UNEMBED: head}
    arguments = {"target weights": WEIGHT}
    program = CompiledProgram(name, "a title", Compiled(text), 1.5, 2000, ideals, arguments, 8)
    return report.examine(program, RunAssumptions(2000), CHIP, RATES)


def make_report(**changes):
    values = {
        "topology": Topology("v5p:2x2x1", CHIP, 1, (None,) * 4),
        "mesh": {"data": 1, "fsdp": 1, "tensor": 4}, "rates": RATES,
        "memory": {"target weights": 40 * 10**9, "temporaries": 2 * 10**9}, "capacity_bytes": 95e9,
        "refused": None, "programs": {CYCLE: examine()},
    }  # fmt: skip
    return CompileReport(**(values | changes))


def test_a_loop_is_reported_apart_from_its_surroundings():
    found = examine()
    assert found.once.cycles_ms == pytest.approx(17032 / 1.75e6)
    assert [name for name, *_ in found.copies] == ["copy.9"]
    assert found.collectives == {"all-reduce": (3, 3 * 16 * 2560 * 2)}
    assert found.kernels == {"fusion": 3}
    assert found.compiler["optimal_ms"] == pytest.approx(3)
    assert examine(PREFILL).once.hbm_bytes == 0
    assert len(examine(PREFILL).copies) == 2


def test_the_head_counts_once_per_read():
    """Counts reads of most of the head, in each of three iterations, but not reads of a slice."""
    scope = ', metadata={op_name="jit(generate)/while/body/drafter/unembed/dot_general"}'
    text = snippets.MODULE.replace("copy(%body.4)", f"copy(%body.4){scope}")
    found = examine(text=text, head=WEIGHT).components[UNEMBED]
    assert found.ideal_ms == pytest.approx(3 * WEIGHT / 2765e6)
    found = examine(text=text, head=3 * WEIGHT).components[UNEMBED]
    assert found.ideal_ms == pytest.approx(3 * WEIGHT / 2765e6)


@pytest.mark.parametrize(
    ("limits", "changes", "message"),
    [
        ({}, {}, None),
        ({"max_hbm_gb": 42.5, "max_cycle_ms": 10.0}, {}, None),
        ({"max_hbm_gb": 41.0}, {}, "tpu.max_hbm_gb: 42.00 GB per chip, over 41"),
        ({"max_cycle_ms": 0.01}, {}, "tpu.max_cycle_ms: 0.214 ms by cycles, over 0.01"),
        ({}, {"capacity_bytes": 42e9}, None),
        ({}, {"capacity_bytes": 40e9}, "does not fit in the memory of v5p:2x2x1: 42.00 GB of 40"),
        ({}, {"refused": "Ran out of memory"}, "v5p:2x2x1: Ran out of memory"),
    ],
)
def test_budgets(limits, changes, message):
    broken = make_report(**changes).exceeded_budgets(TpuConfig(**limits))
    assert len(broken) == (message is not None)
    if message:
        assert message in broken[0]


def test_two_devices_share_a_chip():
    halves = dataclasses.replace(CHIP, devices=2)
    found = make_report(topology=Topology("tpu7x:1x1x1", halves, 1, (None,) * 2))
    assert found.exceeded_budgets(TpuConfig(max_hbm_gb=80.0)) == [
        "tpu.max_hbm_gb: 84.00 GB per chip, over 80.0"
    ]


def test_the_table_is_labeled_as_estimates():
    text = "\n".join(report.lines(make_report()))
    assert "compiler estimates: nothing here was measured on a chip" in text
    assert "42.000 GB of 95 GB: fits" in text
    assert "3 × all-reduce (0.246 MB in total)" in text
    assert "3, 149.4 MB, 0.109 ms; the largest is copy.9 of 49.8 MB" in text
    assert "outside the loop, once per 8 iterations: 0.010 ms by cycles" in text
    refused = "\n".join(report.lines(make_report(refused="Ran out of memory")))
    assert "does NOT fit" in refused
    assert "compiler error: Ran out of memory" in refused
