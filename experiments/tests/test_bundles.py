"""Tests of parsing static schedules in the compiler's format."""

import pytest

from experiments import bundles

# Excerpts of compiler dumps; an empty bundle has no marks.
SCHEDULE = """= control target key start
LB: loop body
= control target key end

     0   :  { %1 = vsyncpa [#allocation1], 0  ;;  %s2226_s0 = inlined_call_operand.hbm [] }
   0x1   :  { %s1861_s5 = smov 0 } /* End region 300 */
   0x2 LB: > { %s1614_s6 = sadd.s32 4294967291, %s1847_s5 }
   0x3   : >> { %p48_p0 = scmp.ge.s32.totalorder %s47_s7, 23  ;;  %s54_s8 = sadd.s32 1, %s1843_s4 }
   0x4   :  {} /* End region 10 */
   0x5   : > > { %v1883_v0 = vmatmul %s97_s10 }
   0x6   : > { %65 = sbr.rel (%p1615_p2) target = $region12 }
   0x7   :  { %1785 = shalt.err (%p1) }
"""

UTILIZATION = """== CAPACTIY:
MXU, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, VSTORE:SPILL, SALU
    4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 1 0 0 0 0
0 0 0 0 0 1 0 0 0 0
0 0 0 0 0 0 0 0 0 1
1 0 2 0 0 0 1 0 0 0
0 0 0 0 0 0 0 0 0 0
3 0 0 0 0 0 0 0 2 0
0 0 0 0 0 0 0 0 0 1
0 0 0 0 0 0 0 0 0 0
"""


def test_sections_follow_the_depth_of_loops():
    found = bundles.sections(SCHEDULE, UTILIZATION)
    shapes = [(part.depth, part.bundles) for part in found]
    assert shapes == [(0, 2), (1, 1), (2, 3), (1, 1), (0, 1)]
    inner = bundles.inner_loop(found)
    assert (inner.depth, inner.matmuls, inner.spills) == (2, 4, 3)


def test_texts_of_different_programs_are_rejected():
    with pytest.raises(ValueError, match="the schedule has 8 bundles, but the utilization has 7"):
        bundles.sections(SCHEDULE, UTILIZATION.rsplit("\n", 2)[0] + "\n")


def test_the_inner_loop_is_the_longest_of_the_deepest():
    loops = [bundles.Section(2, size, {"MXU": 1}) for size in (5, 9, 7)]
    found = bundles.inner_loop([bundles.Section(1, 50, {"MXU": 1}), *loops])
    assert found.bundles == 9


def test_kernels_are_found_by_name(tmp_path):
    one_bundle = UTILIZATION.partition("0 0 0 0 0 1")[0] + "1 0 0 0 0 1 0 0 0 0\n"
    schedules = {
        "17-my_kernel.1": (SCHEDULE, UTILIZATION),
        "16-my_kernel_other.2": (SCHEDULE.splitlines()[4], one_bundle),
    }
    for name, (schedule, use) in schedules.items():
        (tmp_path / f"{name}-03-final_bundles.txt").write_text(schedule)
        path = tmp_path / f"{name}-01-final_hlo-static-per-bundle-utilization.txt"
        path.write_text(use)
        (tmp_path / f"{name}-02-schedule-analysis_final_bundles.txt").write_text("")
    found = bundles.read_schedules(tmp_path, ["my_kernel", "absent"])
    assert list(found) == ["my_kernel"]
    text = "\n".join(bundles.lines(found))
    assert "my_kernel: 8 bundles; inner loop at depth 2: 3 bundles, 4 matrix unit slots" in text
    assert bundles.lines({}) == []
