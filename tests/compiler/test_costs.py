"""Tests of the costs of operations inside loops and branches."""

import pytest
from support import hlo_snippets as snippets

from dflash.compiler import costs, hlo, traffic

WEIGHT = 2560 * 9728 * 2


@pytest.fixture(scope="module")
def module():
    return hlo.parse(snippets.MODULE)


def run(module, *, turns=8, sampled=0):
    found = costs.operations(module, trips=lambda loop: turns, branch=lambda one: sampled)
    return {one.instruction.name: one for one in found}


def test_trip_counts_multiply(module):
    found = run(module)
    assert found["copy.1"].times == 1
    assert found["copy.9"].times == 3  # known to the compiler
    assert found["fusion.7"].times == 3 * 8
    assert found["fusion.7"].loops == ("while.2", "while.1")
    assert run(module, turns=None)["fusion.7"].times == 3


def test_the_branch_that_is_taken_counts(module):
    assert "draw.3" not in run(module)
    assert run(module, sampled=1)["draw.3"].cycles == 9000
    assert run(module, sampled=None)["draw.3"].times == 3  # the most expensive, if unknown


def test_a_prefetch_counts_once(module):
    found = run(module)
    assert found["copy-start.1"].read_bytes == WEIGHT
    assert found["copy-start.1"].written_bytes == 0
    assert found["copy-start.1"].is_async
    assert found["fusion.8"].read_bytes == 0
    assert found["fusion.8"].written_bytes == 16 * 9728 * 2


def test_operations_of_the_compiler_have_the_scope_of_their_reader(module):
    found = run(module)
    assert found["copy-start.1"].scope.endswith("target/mlp/dot_general")
    assert found["copy.1"].scope == "state.keys"


def test_matmuls_in_fusions_are_counted(module):
    assert run(module)["fusion.7"].flops == pytest.approx(2 * 8 * 64 * 256 * 128)


def test_a_projection_to_heads_has_no_batch_dimension(module):
    heads = module.computations["heads"]
    flops = traffic.matmul_flops(module, heads.root, heads.by_name())
    assert flops == pytest.approx(2 * 16 * 2560 * 32 * 128)


def test_collectives_are_labeled(module):
    found = run(module)
    assert found["all-reduce.1"].collective == "all-reduce"
    assert found["fusion.8"].collective is None


def test_a_kernel_costs_its_estimate(module):
    stated = '"cost_estimate":{"flops":"77","transcendentals":"0","bytes_accessed":"1234"}'
    kernel = 'custom_call_target="tpu_custom_call"'
    text = snippets.MODULE.replace(kernel, f"{kernel}, backend_config={{{stated}}}")
    found = run(hlo.parse(text))["fusion.8"]
    assert (found.flops, found.read_bytes, found.written_bytes) == (77, 1234, 0)


PARTS = """HloModule parts

ENTRY %main (p0: bf16[4096,3072]) -> bf16[1024,3072] {
  %p0 = bf16[4096,3072]{1,0:T(8,128)(2,1)} parameter(0)
  %slice-start = ((bf16[4096,3072]{1,0:T(8,128)(2,1)}), bf16[1024,3072]{1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%p0), slice={[1024:2048], [0:3072]}
  ROOT %slice-done = bf16[1024,3072]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
}
"""  # noqa: E501


def test_only_the_prefetched_part_is_read():
    part = run(hlo.parse(PARTS))["slice-start"]
    assert (part.read_bytes, part.written_bytes) == (1024 * 3072 * 2, 0)
