"""How often a loop of a compiled program turns, where it counts up to a constant.

The compiler notes the number on loops that it has not rebuilt. Those that it makes itself, such as
a product that begins while other shares of its weights still arrive, have no such note.
"""

import re
from collections.abc import Mapping

from dflash.compiler.hlo import Computation, HloModule, Instruction

_INDEX = re.compile(r"\bindex=(\d+)")


def trip_count(
    module: HloModule, loop: Instruction, by_name: Mapping[str, Instruction]
) -> int | None:
    """Turns of a `while` whose counter goes from a constant to another in constant steps.

    Args:
      module: the program.
      loop: the instruction.
      by_name: the instructions around it.
    Returns:
      None where the loop is of another kind.
    """
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    compare = condition.root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    counter, bound = (condition.by_name()[name] for name in compare.operands)
    place = _place(counter)
    if place is None or bound.literal is None:
        return None
    begin = _element(by_name.get(loop.operands[0]), place, by_name)
    step = _step(body, place)
    if begin is None or begin.literal is None or not step:
        return None
    return max(0, -(-(bound.literal - begin.literal) // step))


def _place(one: Instruction) -> int | None:
    """Which element of a tuple an instruction takes."""
    match = _INDEX.search(one.attributes) if one.opcode == "get-tuple-element" else None
    return int(match.group(1)) if match else None


def _element(
    one: Instruction | None, place: int, by_name: Mapping[str, Instruction]
) -> Instruction | None:
    """What makes an element of a tuple; None where that is not plain to see."""
    if one is None or one.opcode != "tuple" or place >= len(one.operands):
        return None
    return _origin(by_name.get(one.operands[place]), by_name)


def _origin(one: Instruction | None, by_name: Mapping[str, Instruction]) -> Instruction | None:
    """The instruction, or what it is a copy of."""
    while one is not None and one.opcode in ("copy", "bitcast"):
        one = by_name.get(one.operands[0])
    return one


def _step(body: Computation, place: int) -> int | None:
    """What a turn adds to the counter, through any number of constant additions."""
    by_name = body.by_name()
    now, total = _element(body.root, place, by_name), 0
    while now is not None and now.opcode == "add":
        parts = [by_name[name] for name in now.operands if name in by_name]
        constants = [part.literal for part in parts if part.literal is not None]
        others = [part for part in parts if part.literal is None]
        if len(constants) != 1 or len(others) != 1:
            return None
        total += constants[0]
        now = _origin(others[0], by_name)
    return total if now is not None and _place(now) == place else None
