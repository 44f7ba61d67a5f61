import pytest
from support import hlo_snippets as snippets

from dflash.compiler import hlo


@pytest.fixture(scope="module")
def module():
    return hlo.parse(snippets.MODULE)


def test_the_entry_is_found(module):
    assert module.entry.name == "main"
    assert module.entry.root.name == "result"
    assert set(module.computations) == {
        *("fused_slice", "scores", "heads", "greedy", "draw"),
        *("inner_condition", "inner_body", "body", "main"),
    }


def test_the_entry_need_not_be_the_last():
    text = """ENTRY %first (a: f32[2]) -> f32[2] {
  ROOT %a = f32[2]{0} parameter(0)
}

%second (b: f32[2]) -> f32[2] {
  ROOT %b = f32[2]{0} parameter(0)
}
"""
    assert hlo.parse(text).entry.name == "first"


def test_metadata_on_separate_lines_belongs_to_its_instruction():
    text = """ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %kernel.1 = f32[2]{0} custom-call(%a), frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="jit(f)/attention/kernel"}, backend_config={}
  ROOT %end = f32[2]{0} copy(%kernel.1)
}
"""
    entry = hlo.parse(text).entry
    assert [one.name for one in entry.instructions] == ["a", "kernel.1", "end"]
    assert entry.by_name()["kernel.1"].op_name == "jit(f)/attention/kernel"


def test_a_tuple_has_arrays_with_memory_spaces(module):
    start = module.computations["body"].by_name()["copy-start.1"]
    assert [array.in_hbm for array in start.results] == [False, True, False]
    assert start.results[0].dims == (2560, 9728)
    assert start.results[0].num_bytes == 2560 * 9728 * 2
    assert start.operands == ("body.4",)


def test_a_loop_has_a_body_and_a_trip_count(module):
    loop = module.entry.by_name()["while.2"]
    assert loop.called == {"condition": ("inner_condition",), "body": ("body",)}
    assert loop.trip_count == 3
    assert module.computations["body"].by_name()["while.1"].trip_count is None


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("f32[]", [4]),
        ("pred[1]{0:T(512)(128)(4,1)S(1)}", [1]),
        ("(bf16[2,3]{1,0:T(8,128)(2,1)}, /*index=5*/s4[8]{0}, f8e4m3fn[16])", [12, 4, 16]),
        ("token[]", [0]),
        ("f32[<=8,128]{1,0}", [8 * 128 * 4]),
    ],
)
def test_sizes(text, sizes):
    assert [array.num_bytes for array in hlo.arrays(text)] == sizes


def test_other_text_is_rejected():
    with pytest.raises(ValueError, match="no entry computation"):
        hlo.parse("module @jit_f {}")
