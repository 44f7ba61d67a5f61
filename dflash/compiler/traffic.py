"""Bytes of main memory and floating-point operations of one scheduled instruction.

What an operation reads from VMEM, an asynchronous copy has brought there, and it is that copy's
bytes that count.
"""

import math
import re
from collections.abc import Mapping

from dflash.compiler.hlo import COLLECTIVES, Computation, HloModule, Instruction

_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
_VIEWS = frozenset(("bitcast", "reshape"))
# Splash attention's kernels state nothing. Matrix products a pair of blocks, by kernel: scores and
# sums; for gradients the scores again, their gradients, and the three of queries, keys and values.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 5}
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")

Names = Mapping[str, Instruction]


def hbm_bytes(module: HloModule, one: Instruction, by_name: Names) -> tuple[int, int]:
    """Bytes read and bytes written by one run of an instruction.

    Args:
      module: the program.
      one: an instruction of it.
      by_name: those of the same computation.
    Returns:
      Bytes read, bytes written; of a kernel that states its traffic, all of it as read.
    """
    operands = [by_name[name] for name in one.operands if name in by_name]
    if one.opcode.endswith("-start"):
        if not one.results:
            return 0, 0
        # A copy's result is where to, where from, a semaphore. Others repeat their operands first.
        first = 0 if one.opcode == "copy-start" else len(one.operands)
        target = one.results[min(first, len(one.results) - 1)]
        reads = any(operand.hbm_bytes for operand in operands)
        return target.num_bytes if reads else 0, target.num_bytes if target.in_hbm else 0
    if one.opcode in _SLICES:
        return one.num_bytes if operands[0].hbm_bytes else 0, one.hbm_bytes
    if one.opcode in _UPDATES:
        update = _update_bytes(one, by_name)
        return (0 if one.opcode == "dynamic-update-slice" else update), update
    if one.opcode == "fusion":
        return _fusion_bytes(module, one, operands)
    if stated := _stated(one, "bytes_accessed"):
        return stated, 0
    return sum(operand.hbm_bytes for operand in operands), one.hbm_bytes


def matmul_flops(module: HloModule, one: Instruction, by_name: Names) -> float:
    """Multiplications and additions of the matrix products of one run of an instruction."""
    if one.opcode == "fusion":
        body = module.computations[one.called["calls"][0]]
        names = body.by_name()
        return sum(matmul_flops(module, inner, names) for inner in body.instructions)
    if one.opcode == "custom-call":
        return _stated(one, "flops") or _splash_flops(one, by_name)
    if one.opcode == "convolution":
        left, right = (by_name[name].results[0] for name in one.operands)
        out = one.results[0]
        shared = _batch(one.attributes, left.dims, right.dims, out.dims)
        return 2 * math.sqrt(left.size * right.size * out.size / shared)
    if one.opcode == "dot":
        left = by_name[one.operands[0]].results[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
        return 2 * one.results[0].size * math.prod(left.dims[dim] for dim in dims)
    return 0


def _stated(one: Instruction, what: str) -> int:
    """What a kernel says of itself (`cost_estimate` of its call); 0 if it says nothing."""
    estimate = re.search(r'"cost_estimate":\{[^}]*\}', one.attributes)
    value = re.search(rf'"{what}":"(\d+)"', estimate.group()) if estimate else None
    return int(value.group(1)) if value else 0


def _splash_flops(one: Instruction, by_name: Names) -> float:
    """Of a causal splash attention kernel; 0 of any other."""
    products = next((n for name, n in _SPLASH_PRODUCTS.items() if one.name.startswith(name)), 0)
    if not products:
        return 0
    blocks, _, queries, keys = (by_name[name].results[0].dims for name in one.operands[:4])
    # Of the blocks of keys, those up to the queries' own are computed.
    share = (blocks[-1] + 1) / (2 * blocks[-1])
    return 2 * products * math.prod(queries) * keys[-2] * share


def _batch(attributes: str, left, right, out) -> int:
    """Product of the dimensions that both factors and the result have in common.

    The compiler writes matrix products as convolutions; what is a batch there is a spatial
    dimension of the same length in all three.
    """
    match = _LABELS.search(attributes)
    if not match:
        return 1
    lengths = [
        dict(zip(labels, dims, strict=False))
        for labels, dims in zip(match.groups(), (left, right, out), strict=True)
    ]
    spatial = [label for label in lengths[0] if label.isdigit()]
    same = [label for label in spatial if len({sizes.get(label) for sizes in lengths}) == 1]
    return math.prod(lengths[0][label] for label in same)


def _fusion_bytes(module: HloModule, one: Instruction, operands) -> tuple[int, int]:
    """Slices are read, and updates written, as far as they go; the arrays around them stay."""
    body = module.computations[one.called["calls"][0]]
    read = sum(
        _parameter_bytes(module, body, index, operand.hbm_bytes)
        for index, operand in enumerate(operands)
        if operand.hbm_bytes
    )
    return read, _written_bytes(module, body, one)


def _parameter_bytes(module: HloModule, body: Computation, index: int, whole: int) -> int:
    """Bytes that a fusion reads of its parameter number `index`, of `whole` bytes."""
    users = body.users()
    todo = [inner for inner in body.instructions if inner.parameter == index]
    sizes = []
    while todo:
        now = todo.pop()
        if now.is_root:
            return whole
        for user in users.get(now.name, ()):
            if user.opcode in _VIEWS:
                todo.append(user)
            elif user.opcode in _SLICES and user.operands[0] == now.name:
                sizes.append(user.num_bytes)
            elif user.opcode in _UPDATES and user.operands[0] == now.name:
                sizes.append(0)
            elif user.opcode in COLLECTIVES or (user.opcode == "tuple" and user.is_root):
                sizes.append(0)  # passed on, or moved by a collective that another operation began
            elif user.opcode == "fusion":
                inner = module.computations[user.called["calls"][0]]
                sizes.append(_parameter_bytes(module, inner, user.operands.index(now.name), whole))
            else:
                return whole
    return min(sum(sizes), whole)


def _written_bytes(module: HloModule, body: Computation, one: Instruction) -> int:
    """Bytes that a fusion writes: of an array that is updated in place, the update."""
    by_name = body.by_name()
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [by_name[name] for name in body.root.operands]
    if len(roots) != len(one.results):
        return one.hbm_bytes
    written = 0
    for root, result in zip(roots, one.results, strict=True):
        if not result.in_hbm:
            continue
        while root.opcode in _VIEWS:
            root = by_name[root.operands[0]]
        size = result.num_bytes
        if root.opcode in COLLECTIVES or root.opcode == "parameter":
            size = 0
        elif root.opcode in _UPDATES:
            size = _update_bytes(root, by_name)
        elif root.opcode == "fusion":
            size = _written_bytes(module, module.computations[root.called["calls"][0]], root)
        written += size
    return written


def _update_bytes(one: Instruction, by_name: Names) -> int:
    index = 1 if one.opcode == "dynamic-update-slice" else -1
    return by_name[one.operands[index]].num_bytes
