"""Tests of the traffic and the operations of instructions in small modules."""

import pytest

from dflash.compiler import components, costs, hlo, traffic


def entry(*lines, root="f32[8]{0} copy(%x)", computations=""):
    """Returns a module with the f32 [64, 32] parameters %x in HBM and %v in VMEM."""
    body = "\n".join(f"  {line}" for line in lines)
    return hlo.parse(f"""HloModule small
{computations}
ENTRY %main (x: f32[64,32], v: f32[64,32], i: s32[]) -> f32[8] {{
  %x = f32[64,32]{{1,0}} parameter(0)
  %v = f32[64,32]{{1,0:T(8,128)S(1)}} parameter(1)
  %i = s32[] parameter(2)
{body}
  ROOT %end = {root}
}}
""")


def bytes_of(line, *before, **options):
    """Returns the bytes that an instruction after others reads and writes."""
    module = entry(*before, f"%one = {line}", **options)
    names = module.entry.by_name()
    return traffic.hbm_bytes(module, names["one"], names)


def flops_of(line):
    module = entry(f"%one = {line}")
    names = module.entry.by_name()
    return traffic.matmul_flops(module, names["one"], names)


X, ROW = 64 * 32 * 4, 32 * 4


@pytest.mark.parametrize(
    ("line", "read", "written"),
    [
        ("f32[2,32]{1,0} slice(%x), slice={[0:2], [0:32]}", 2 * ROW, 2 * ROW),
        ("f32[2,32]{1,0:S(1)} slice(%x), slice={[0:2], [0:32]}", 2 * ROW, 0),
        ("f32[2,32]{1,0} slice(%v), slice={[0:2], [0:32]}", 0, 2 * ROW),
        ("f32[64,32]{1,0} copy(%x)", X, X),
        ("f32[64,32]{1,0:S(0)} copy(%v)", 0, X),  # Memory space 0 is HBM.
        # The source of an in-place update counts for the operation that produced it.
        ("f32[64,32]{1,0} dynamic-update-slice(%x, %row, %i, %i)", 0, ROW),
        # The updates of a scatter are its last operand.
        ("f32[64,32]{1,0} scatter(%x, %at, %row), to_apply=%add", ROW, ROW),
        # The result of copy-start is (destination, source, semaphore); only HBM counts.
        ("(f32[64,32]{1,0:S(1)}, f32[64,32]{1,0}, u32[]{:S(2)}) copy-start(%x)", X, 0),
        ("(f32[64,32]{1,0}, f32[64,32]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%v)", 0, X),
    ],
)
def test_bytes(line, read, written):
    row = ("%row = f32[1,32]{1,0} slice(%x), slice={[0:1], [0:32]}", "%at = s32[4]{0} iota()")
    assert bytes_of(line, *row) == (read, written)


FUSED = """
%twice (p: f32[64,32], q: s32[]) -> f32[64,32] {
  %p = f32[64,32]{1,0} parameter(0)
  %q = s32[] parameter(1)
  %a = f32[40,32]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={40,32}
  %b = f32[40,32]{1,0} dynamic-slice(%p, %q, %q), dynamic_slice_sizes={40,32}
  ROOT %sum = f32[40,32]{1,0} add(%a, %b)
}
"""


def test_slices_read_at_most_the_whole_array():
    """Reads two slices of 40 of 64 rows, which count as all rows, and the index."""
    line = "f32[40,32]{1,0:S(1)} fusion(%x, %i), kind=kLoop, calls=%twice"
    assert bytes_of(line, computations=FUSED) == (X + 4, 0)


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("f32[64,64]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
         2 * 64 * 64 * 32),
        ("f32[32,32]{1,0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
         2 * 32 * 32 * 64),
        # A batch of 64 dot products, which multiplies each element once.
        ("f32[64]{0} dot(%x, %x), lhs_batch_dims={0}, rhs_batch_dims={0}, "
         "lhs_contracting_dims={1}, rhs_contracting_dims={1}", 2 * 64 * 32),
        ("f32[64,32]{1,0} add(%x, %x)", 0),
    ],
)  # fmt: skip
def test_operations_of_matmuls(line, flops):
    assert flops_of(line) == flops


@pytest.mark.parametrize(
    ("kernel", "products"),
    [("splash_mha_fwd_segmented_residuals", 2), ("splash_mha_dkv_segmented", 5), ("other", 0)],
)
def test_splash_attention_is_counted_by_its_shapes(kernel, products):
    """Uses two blocks of queries and keys, of whose four pairs three are computed."""
    module = entry(
        "%next = s8[1,2,2]{2,1,0} constant(0)",
        "%queries = bf16[8,1024,128]{2,1,0} constant(0)",
        "%keys = bf16[2,1024,128]{2,1,0} constant(0)",
        f"%{kernel}.1 = bf16[8,1024,128]{{2,1,0}} custom-call(%next, %next, %queries, %keys)",
    )
    names = module.entry.by_name()
    flops = traffic.matmul_flops(module, names[f"{kernel}.1"], names)
    assert flops == 2 * products * 8 * 1024 * 1024 * 128 * 3 / 4


def operations(*lines):
    module = entry(*lines)
    found = costs.operations(module, trips=lambda _: 4, branch=lambda _: None)
    return {one.instruction.name: one for one in found}


def test_small_copies_are_left_out():
    assert not components.big_copies(operations("%small = f32[64,32]{0,1} copy(%x)").values())


def test_an_asynchronous_collective_counts_its_destination():
    found = operations(
        "%s = ((f32[64,32]{1,0}), f32[256,32]{1,0}) all-gather-start(%x), dimensions={0}",
        "%d = f32[256,32]{1,0} all-gather-done(%s)",
    )
    assert components.collectives(found.values()) == {"all-gather": (1, 4 * X)}


def test_a_collective_that_overlaps_a_matmul_counts_at_its_start():
    share, whole, product = "bf16[320,9728]{1,0}", "bf16[2560,9728]{1,0}", "bf16[64,2560]{1,0}"
    both = f"({product}, {share}, {whole}, {whole})"
    module = hlo.parse(f"""HloModule small
%begin (p0: bf16[320,9728]) -> (bf16[320,9728], bf16[2560,9728], u32[]) {{
  %p0 = {share} parameter(0)
  %gathered = {whole} all-gather(%p0), dimensions={{0}}
  ROOT %all = ({share}, {whole}, u32[]) custom-call(%p0, %gathered)
}}

%middle (a: bf16[64,9728]) -> (bf16[64,2560]) {{
  %a = bf16[64,9728]{{1,0}} parameter(0)
  %b = bf16[9728,2560]{{1,0}} parameter(1)
  %p0 = {share} parameter(2)
  %p1 = {whole} parameter(3)
  %gathered = {whole} all-gather(%p0), dimensions={{0}}
  %product = {product} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  ROOT %all = {both} tuple(%product, %p0, %p1, %gathered)
}}

%end (p0: bf16[2560,9728]) -> bf16[2560,9728] {{
  %p0 = {whole} parameter(0)
  ROOT %all = {whole} custom-call(%p0)
}}

ENTRY %main (a: bf16[64,9728], b: bf16[9728,2560], w: bf16[320,9728]) -> bf16[2560,9728] {{
  %a = bf16[64,9728]{{1,0}} parameter(0)
  %b = bf16[9728,2560]{{1,0}} parameter(1)
  %w = {share} parameter(2)
  %async-collective-start.1 = ({share}, {whole}, u32[]) fusion(%w), kind=kCustom, calls=%begin
  %g0 = {share} get-tuple-element(%async-collective-start.1), index=0
  %g1 = {whole} get-tuple-element(%async-collective-start.1), index=1
  %both = {both} fusion(%a, %b, %g0, %g1), kind=kOutput, calls=%middle
  %g2 = {whole} get-tuple-element(%both), index=3
  ROOT %async-collective-done.1 = {whole} fusion(%g2), kind=kCustom, calls=%end
}}
""")
    rules = {"trips": lambda loop: None, "branch": lambda conditional: None}
    begin, product = costs.operations(module, **rules)
    assert components.collectives([begin, product]) == {"all-gather": (1, 2560 * 9728 * 2)}
    assert begin.is_async
    assert not product.is_async
    assert product.read_bytes == 2 * 9728 * (64 + 2560)
    assert product.written_bytes == 2 * 64 * 2560
    assert product.flops == 2 * 64 * 9728 * 2560
