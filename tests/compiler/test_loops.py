import pytest

from dflash.compiler import hlo


def turns(bound="constant(7)", begin="constant(1)", step="constant(2)", direction="LT", more=""):
    """Returns the trip count of a loop whose counter is the second element of its carry."""
    module = hlo.parse(f"""HloModule small
%condition (c: (f32[4], s32[])) -> pred[] {{
  %c = (f32[4]{{0}}, s32[]) parameter(0)
  %now = s32[] get-tuple-element(%c), index=1
  %bound = s32[] {bound}
  ROOT %goes_on = pred[] compare(%now, %bound), direction={direction}
}}

%body (b: (f32[4], s32[])) -> (f32[4], s32[]) {{
  %b = (f32[4]{{0}}, s32[]) parameter(0)
  %x = f32[4]{{0}} get-tuple-element(%b), index=0
  %i = s32[] get-tuple-element(%b), index=1
  %step = s32[] {step}
  %next = s32[] add(%i, %step){more}
  ROOT %carried = (f32[4]{{0}}, s32[]) tuple(%x, %next)
}}

ENTRY %main (x0: f32[4]) -> (f32[4], s32[]) {{
  %x0 = f32[4]{{0}} parameter(0)
  %unknown = s32[] iota()
  %begin = s32[] {begin}
  %start = s32[] copy(%begin)
  %carry = (f32[4]{{0}}, s32[]) tuple(%x0, %start)
  ROOT %loop = (f32[4]{{0}}, s32[]) while(%carry), condition=%condition, body=%body
}}
""")
    by_name = module.entry.by_name()
    return hlo.trip_count(module, by_name["loop"], by_name)


def test_the_step_of_a_loop_counts():
    assert turns() == 3  # at 1, 3 and 5
    assert turns(bound="constant(8)") == 4
    assert turns(step="constant(1)") == 6
    assert turns(bound="constant(1)") == 0


def test_a_counter_may_be_copied_before_the_increment():
    copied = """s32[] iota()
  %mine = s32[] copy(%i)
  %one = s32[] constant(2)
  %raised = s32[] add(%mine, %one)
  ROOT %carried = (f32[4]{0}, s32[]) tuple(%x, %raised)
}

%unused (u: s32[]) -> s32[] {
  %i = s32[] parameter(0)
  %step = s32[] constant(2)"""
    assert turns(step=copied) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"bound": "iota()"},
        {"begin": "iota()"},
        {"step": "iota()"},
        {"step": "constant(0)"},
        {"direction": "GT"},
    ],
)
def test_other_loops_are_unknown(changed):
    assert turns(**changed) is None
