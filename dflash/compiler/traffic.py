"""HBM traffic and floating-point operations of one scheduled instruction.

Reads from VMEM do not count: an asynchronous copy has brought the data there, and the bytes are
attributed to that copy.
"""

import math
import re
from collections.abc import Mapping

from dflash.compiler.hlo import COLLECTIVES, Computation, HloModule, Instruction

_SLICES = frozenset(("dynamic-slice", "gather", "slice"))
_UPDATES = frozenset(("dynamic-update-slice", "scatter"))
_VIEWS = frozenset(("bitcast", "reshape"))
# Matmuls per pair of query and key blocks, by kernel. The kernels of splash attention have no cost
# estimate. Forward: scores and weighted sum. Backward: the scores again, their gradients, and the
# gradients of queries, keys and values.
_SPLASH_PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dkv": 5}
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")

Names = Mapping[str, Instruction]


def hbm_bytes(module: HloModule, instruction: Instruction, by_name: Names) -> tuple[int, int]:
    """Returns the HBM traffic of a single execution of an instruction.

    Args:
      by_name: Instructions of the same computation, by name.
    Returns:
      (Bytes read, bytes written). For a kernel with a cost estimate, all traffic counts as read.
    """
    operands = [by_name[name] for name in instruction.operands if name in by_name]
    if instruction.opcode.endswith("-start"):
        if not instruction.results:
            return 0, 0
        # The result of copy-start is (destination, source, semaphore). Other asynchronous
        # instructions list their operands before the destination.
        first = 0 if instruction.opcode == "copy-start" else len(instruction.operands)
        destination = instruction.results[min(first, len(instruction.results) - 1)]
        reads = any(operand.hbm_bytes for operand in operands)
        written = destination.num_bytes if destination.in_hbm else 0
        return destination.num_bytes if reads else 0, written
    if instruction.opcode in _SLICES:
        return instruction.num_bytes if operands[0].hbm_bytes else 0, instruction.hbm_bytes
    if instruction.opcode in _UPDATES:
        update = _update_bytes(instruction, by_name)
        return (0 if instruction.opcode == "dynamic-update-slice" else update), update
    if instruction.opcode == "fusion":
        return _fusion_bytes(module, instruction, operands)
    if estimated := _estimate(instruction, "bytes_accessed"):
        return estimated, 0
    return sum(operand.hbm_bytes for operand in operands), instruction.hbm_bytes


def matmul_flops(module: HloModule, instruction: Instruction, by_name: Names) -> float:
    """Returns the floating-point operations of the matmuls in one execution of an instruction."""
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called["calls"][0]]
        names = body.by_name()
        return sum(matmul_flops(module, inner, names) for inner in body.instructions)
    if instruction.opcode == "custom-call":
        return _estimate(instruction, "flops") or _splash_flops(instruction, by_name)
    if instruction.opcode == "convolution":
        left, right = (by_name[name].results[0] for name in instruction.operands)
        out = instruction.results[0]
        shared = _batch(instruction.attributes, left.dims, right.dims, out.dims)
        return 2 * math.sqrt(left.size * right.size * out.size / shared)
    if instruction.opcode == "dot":
        left = by_name[instruction.operands[0]].results[0]
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
        return 2 * instruction.results[0].size * math.prod(left.dims[dim] for dim in dims)
    return 0


def _estimate(instruction: Instruction, field: str) -> int:
    """Returns a field of a kernel's `cost_estimate`; 0 if it has none."""
    estimate = re.search(r'"cost_estimate":\{[^}]*\}', instruction.attributes)
    value = re.search(rf'"{field}":"(\d+)"', estimate.group()) if estimate else None
    return int(value.group(1)) if value else 0


def _splash_flops(instruction: Instruction, by_name: Names) -> float:
    """Returns the operations of a causal splash attention kernel; 0 for other kernels."""
    products = next(
        (n for name, n in _SPLASH_PRODUCTS.items() if instruction.name.startswith(name)), 0
    )
    if not products:
        return 0
    blocks, _, queries, keys = (by_name[name].results[0].dims for name in instruction.operands[:4])
    # A causal kernel skips the key blocks after the query block.
    share = (blocks[-1] + 1) / (2 * blocks[-1])
    return 2 * products * math.prod(queries) * keys[-2] * share


def _batch(attributes: str, left, right, out) -> int:
    """Returns the product of the batch dimensions of a matmul that is written as a convolution.

    The compiler represents batch dimensions as spatial dimensions that have the same size in both
    operands and the result.
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


def _fusion_bytes(module: HloModule, instruction: Instruction, operands) -> tuple[int, int]:
    """Returns (bytes read, bytes written); slices and updates count only the part in use."""
    body = module.computations[instruction.called["calls"][0]]
    read = sum(
        _parameter_bytes(module, body, index, operand.hbm_bytes)
        for index, operand in enumerate(operands)
        if operand.hbm_bytes
    )
    return read, _written_bytes(module, body, instruction)


def _parameter_bytes(module: HloModule, body: Computation, index: int, full_size: int) -> int:
    """Returns the bytes that a fusion reads of parameter `index`, which has `full_size` bytes."""
    users = body.users()
    todo = [inner for inner in body.instructions if inner.parameter == index]
    sizes = []
    while todo:
        now = todo.pop()
        if now.is_root:
            return full_size
        for user in users.get(now.name, ()):
            if user.opcode in _VIEWS:
                todo.append(user)
            elif user.opcode in _SLICES and user.operands[0] == now.name:
                sizes.append(user.num_bytes)
            elif user.opcode in _UPDATES and user.operands[0] == now.name:
                sizes.append(0)
            elif user.opcode in COLLECTIVES or (user.opcode == "tuple" and user.is_root):
                # Passed through, or read by a collective that another operation starts.
                sizes.append(0)
            elif user.opcode == "fusion":
                inner = module.computations[user.called["calls"][0]]
                sizes.append(
                    _parameter_bytes(module, inner, user.operands.index(now.name), full_size)
                )
            else:
                return full_size
    return min(sum(sizes), full_size)


def _written_bytes(module: HloModule, body: Computation, instruction: Instruction) -> int:
    """Returns the bytes that a fusion writes; an in-place update counts only the updated part."""
    by_name = body.by_name()
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [by_name[name] for name in body.root.operands]
    if len(roots) != len(instruction.results):
        return instruction.hbm_bytes
    written = 0
    for root, result in zip(roots, instruction.results, strict=True):
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


def _update_bytes(instruction: Instruction, by_name: Names) -> int:
    index = 1 if instruction.opcode == "dynamic-update-slice" else -1
    return by_name[instruction.operands[index]].num_bytes
