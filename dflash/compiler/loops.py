"""Trip counts of loops in a compiled program.

XLA annotates most loops with their trip count (`known_trip_count`). Loops that the TPU backend
builds itself have no annotation, such as those that overlap a matmul with the all-gather of its
weights. Their trip counts are derived here.
"""

import re
from collections.abc import Mapping

from dflash.compiler.hlo import Computation, HloModule, Instruction

_INDEX = re.compile(r"\bindex=(\d+)")


def trip_count(
    module: HloModule, loop: Instruction, by_name: Mapping[str, Instruction]
) -> int | None:
    """Returns the trip count of a `while` that counts from a constant up to a constant.

    Args:
      module: Program that contains the loop.
      loop: The `while` instruction.
      by_name: Instructions of the loop's computation, by name.
    Returns:
      The trip count; None if the bounds or the step are not constant.
    """
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, bound = (condition.by_name()[name] for name in compare.operands)
    index = _tuple_index(counter)
    if index is None or bound.literal is None:
        return None
    start = _element(by_name.get(loop.operands[0]), index, by_name)
    step = _step(body, index)
    if start is None or start.literal is None or not step:
        return None
    return max(0, -(-(bound.literal - start.literal) // step))


def _tuple_index(instruction: Instruction) -> int | None:
    """Returns the index of a get-tuple-element; None for other instructions."""
    if instruction.opcode != "get-tuple-element":
        return None
    match = _INDEX.search(instruction.attributes)
    return int(match.group(1)) if match else None


def _element(
    instruction: Instruction | None, index: int, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    """Returns the instruction that produces an element of a tuple; None if it is unknown."""
    if instruction is None or instruction.opcode != "tuple" or index >= len(instruction.operands):
        return None
    return _skip_copies(by_name.get(instruction.operands[index]), by_name)


def _skip_copies(
    instruction: Instruction | None, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    while instruction is not None and instruction.opcode in ("copy", "bitcast"):
        instruction = by_name.get(instruction.operands[0])
    return instruction


def _step(body: Computation, index: int) -> int | None:
    """Returns the constant that an iteration adds to the counter; None if it is not constant.

    The compiler may split the increment into a chain of additions.
    """
    by_name = body.by_name()
    current, total = _element(body.root, index, by_name), 0
    while current is not None and current.opcode == "add":
        operands = [by_name[name] for name in current.operands if name in by_name]
        constants = [operand.literal for operand in operands if operand.literal is not None]
        others = [operand for operand in operands if operand.literal is None]
        if len(constants) != 1 or len(others) != 1:
            return None
        total += constants[0]
        current = _skip_copies(others[0], by_name)
    return total if current is not None and _tuple_index(current) == index else None
