"""Tests of attributing operations to components and summing them."""

import pytest
from support import hlo_snippets as snippets

from dflash.compiler import components, costs, hlo
from dflash.compiler.components import ATTENTION, DRAFTER, MLP, REST, UNEMBED
from dflash.compiler.report import RunAssumptions
from dflash.compiler.topology import RooflineRates
from dflash.parallel import chips

RATES = RooflineRates(flops_per_s=400e12, bytes_per_s=2e12)


@pytest.fixture(scope="module")
def operations():
    assumptions = RunAssumptions(context=2000)
    module = hlo.parse(snippets.MODULE)
    return costs.operations(module, trips=assumptions.trips, branch=assumptions.branch)


@pytest.mark.parametrize(
    ("scope", "name"),
    [
        ("jit(generate)/while/body/target/attention/dot_general", ATTENTION),
        ("jit(generate)/while/body/target/mlp/jit(silu)/mul", MLP),
        ("jit(generate)/while/body/drafter/attention/dot_general", DRAFTER),
        ("jit(generate)/while/body/drafter/unembed/dot_general", UNEMBED),
        ("jit(generate)/while/body/sample/argmax", UNEMBED),
        ("jit(step)/transpose(jvp(drafter))/mlp/dot_general", DRAFTER),
        ("jit(step)/jvp(target)/checkpoint/attention/dot_general", ATTENTION),
        ("jit(generate)/while/body/retarget/attention", REST),
        ("", REST),
    ],
)
def test_components_by_scope(scope, name):
    assert components.component_of(scope) == name


def test_sums(operations):
    chip = chips.find("v5p")
    ideals = {ATTENTION: 2765e6, MLP: 0}
    parts = components.summarize(operations, ideals, chip, RATES)
    assert parts[ATTENTION].cycles_ms == pytest.approx(3 * 8 * 7561 / 1.75e6)
    assert parts[ATTENTION].ideal_ms == pytest.approx(1)
    assert parts[MLP].ideal_ms == 0
    prefetch_ms = 3 * 2560 * 9728 * 2 / 2e9
    assert parts[MLP].async_ms == pytest.approx(prefetch_ms)
    assert parts[MLP].roofline_ms >= prefetch_ms
    whole = components.total(parts.values())
    assert whole.hbm_bytes == sum(one.hbm_bytes * one.times for one in operations)


def test_the_slower_of_arithmetic_and_memory_counts(operations):
    scores = next(one for one in operations if one.instruction.name == "fusion.7")
    size, flops = 8 * 256 * 128 * 2, 2 * 8 * 64 * 256 * 128
    assert components.roofline_ms(scores, RooflineRates(1e30, 1e9)) == pytest.approx(size / 1e6)
    assert components.roofline_ms(scores, RooflineRates(1e9, 1e30)) == pytest.approx(flops / 1e6)


def test_big_copies_are_found(operations):
    found = {one.instruction.name: one.times for one in components.big_copies(operations)}
    assert found == {"copy.1": 1, "copy.9": 3}


@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("copy_bitcast_fusion.93", True),
        ("transpose_copy_fusion", True),
        ("copy_dynamic-slice_fusion.2.clone", True),
        ("convert_copy_fusion", False),
        ("fusion.12", False),
        ("bitcast_fusion.1", False),
    ],
)
def test_fusions_that_only_move_are_copies(name, moves):
    line = f"  %{name} = f32[1024,1024]{{1,0}} fusion(%x), kind=kLoop, calls=%f"
    text = f"ENTRY %main (x: f32[1]) -> f32[1] {{\n  %x = f32[1]{{0}} parameter(0)\n{line}\n}}\n"
    text = "%f (p: f32[1]) -> f32[1] {\n  ROOT %p = f32[1]{0} parameter(0)\n}\n" + text
    found = costs.operations(hlo.parse(text), trips=lambda one: 1, branch=lambda one: 0)
    assert bool(components.big_copies(found)) == moves


@pytest.mark.parametrize(
    ("context", "turns"), [(0, 1), (1, 1), (256, 1), (257, 2), (2048, 8), (32768, 128)]
)
def test_attention_loops_over_its_context(context, turns):
    module = hlo.parse(snippets.MODULE)
    loop = module.computations["body"].by_name()["while.1"]
    assert RunAssumptions(context).trips(loop) == turns
    assert RunAssumptions(context).trips(module.entry.by_name()["while.2"]) is None


@pytest.mark.parametrize(
    ("scope", "assumptions", "index"),
    [
        ("a/sample/if_sampled/cond", RunAssumptions(1), 0),
        ("a/sample/if_sampled/cond", RunAssumptions(1, sampled=True), 1),
        ("a/sample/if_sampled/cond/branch_1_fun/if_filtered/cond", RunAssumptions(1, sampled=True),
         0),
        ("a/if_sampled/if_filtered/cond", RunAssumptions(1, sampled=True, filtered=True), 1),
        ("a/if_logits/cond", RunAssumptions(1), 0),
        ("a/if_logits/cond", RunAssumptions(1, sampled=True), 1),
        ("a/if_logits/cond", RunAssumptions(1, shaped=True), 1),  # The last of two.
        ("a/cond", RunAssumptions(1), None),
    ],
)  # fmt: skip
def test_branches_follow_the_config(scope, assumptions, index):
    text = snippets.MODULE.replace("jit(generate)/while/body/target/sample/if_sampled/cond", scope)
    body = hlo.parse(text).computations["body"]
    assert assumptions.branch(body.by_name()["conditional.1"]) == index
