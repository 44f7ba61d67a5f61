"""Parser of the text of a compiled XLA module: its computations and their instructions."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_INDEX = re.compile(r"\bindex=(\d+)")
_SPACE = re.compile(r"S\((\d+)\)")
# Prefixes of the lines that continue an instruction: XLA breaks lines inside a kernel's metadata.
_CONTINUATIONS = ('"', "}}")
# Attributes with the names of the computations that an instruction runs.
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")

COLLECTIVES = frozenset(
    """all-gather all-reduce reduce-scatter all-to-all collective-permute collective-broadcast
    ragged-all-to-all""".split()
)


@dataclasses.dataclass(frozen=True)
class HloArray:
    """One array of an instruction's result.

    Attributes:
      dtype: XLA's name of the dtype, such as "bf16".
      in_hbm: The array is in HBM, not in VMEM, SMEM or another memory space.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Returns the size in bytes, without the padding of tiles."""
        return self.size * _bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: Name, unique in the module.
      results: Arrays of the result; several if the result is a tuple.
      operands: Names of the operands, instructions of the same computation.
      called: Names of the called computations by attribute; "branch_computations" in branch order.
      op_name: Path of jax scopes; empty for instructions that the compiler added.
      cycles: The compiler's estimate of cycles, or None.
      trip_count: Trip count of a loop if the compiler states it, else None.
      parameter: Index among the computation's parameters, or None if it is not a parameter.
      literal: Value of a constant non-negative integer scalar, else None.
      attributes: Unparsed text after the operands.
      is_root: The instruction's result is the result of its computation.
    """

    name: str
    opcode: str
    results: tuple[HloArray, ...]
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    op_name: str
    cycles: int | None
    trip_count: int | None
    parameter: int | None
    literal: int | None
    attributes: str
    is_root: bool

    @property
    def num_bytes(self) -> int:
        """Returns the size of the result in bytes, in any memory space."""
        return sum(array.num_bytes for array in self.results)

    @property
    def hbm_bytes(self) -> int:
        """Returns the size in bytes of those arrays of the result that are in HBM."""
        return sum(array.num_bytes for array in self.results if array.in_hbm)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Named sequence of instructions in scheduled order, such as the body of a loop."""

    name: str
    instructions: tuple[Instruction, ...]

    def by_name(self) -> dict[str, Instruction]:
        """Returns the instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    def users(self) -> dict[str, list[Instruction]]:
        """Returns the instructions that read each instruction, by its name."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                users.setdefault(operand, []).append(instruction)
        return users

    @property
    def root(self) -> Instruction:
        """Returns the instruction whose result the computation returns."""
        return next(instruction for instruction in self.instructions if instruction.is_root)


@dataclasses.dataclass(frozen=True)
class HloModule:
    """Compiled program: its computations by name, and its entry computation."""

    computations: Mapping[str, Computation]
    entry: Computation


def parse(text: str) -> HloModule:
    """Parses `jax.stages.Compiled.as_text()`; raises ValueError without an entry computation."""
    computations: dict[str, Computation] = {}
    entry = None
    header, lines = None, []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            header, lines = match, []
        elif line.startswith(_CONTINUATIONS):
            lines.append(lines.pop() + line if lines else line)
        elif line.startswith("}") and header:
            computation = Computation(header.group(2), tuple(_instructions(lines)))
            computations[computation.name] = computation
            entry = computation if header.group(1) else entry
            header = None
        elif header:
            lines.append(line)
    if entry is None:
        raise ValueError("no entry computation: expected the text of an XLA module")
    return HloModule(computations, entry)


def arrays(text: str) -> tuple[HloArray, ...]:
    """Parses a shape, such as "(f32[8,128]{1,0:T(8,128)S(1)}, s32[])"."""
    parsed = []
    for dtype, dims, layout in _ARRAY.findall(text):
        shape = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        space = _SPACE.search(layout)
        parsed.append(HloArray(dtype, shape, space is None or space.group(1) == "0"))
    return tuple(parsed)


def _instructions(lines: list[str]) -> Iterator[Instruction]:
    for line in lines:
        if match := _LINE.match(line):
            yield _instruction(match.group(2), match.group(3), bool(match.group(1)))


def _instruction(name: str, text: str, is_root: bool) -> Instruction:
    shape, rest = _cut_shape(text)
    opcode, _, rest = rest.lstrip().partition("(")
    end = _closing(rest)
    operands, attributes = rest[:end], rest[end + 1 :]
    cycles = _number(attributes, r'"estimated_cycles":"(\d+)"')
    called = {key: tuple(_NAME.findall(names)) for key, names in _CALLED.findall(attributes)}
    op_name = re.search(r'op_name="([^"]*)"', attributes)
    return Instruction(
        name=name,
        opcode=opcode,
        results=arrays(shape),
        operands=tuple(_NAME.findall(operands)),
        called=called,
        op_name=op_name.group(1) if op_name else "",
        cycles=cycles,
        trip_count=_number(attributes, r'"known_trip_count":\{"n":"(\d+)"'),
        parameter=int(operands) if opcode == "parameter" else None,
        literal=int(operands) if opcode == "constant" and operands.isdecimal() else None,
        attributes=attributes,
        is_root=is_root,
    )


def _cut_shape(text: str) -> tuple[str, str]:
    """Splits a line into the shape that it starts with and the rest."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:]
    shape, _, rest = text.partition(" ")
    return shape, rest


def _closing(text: str) -> int:
    """Returns the index of the parenthesis that closes the one just before `text`."""
    depth = 1
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if not depth:
            return match.start()
    return len(text)


def _number(text: str, pattern: str) -> int | None:
    match = re.search(pattern, text)
    return int(match.group(1)) if match else None


def _bits(dtype: str) -> int:
    """Returns the bits per element; 0 for tokens and other types without a size."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 0


def trip_count(
    module: HloModule, loop: Instruction, by_name: Mapping[str, Instruction]
) -> int | None:
    """Returns the trip count of a `while` that counts from a constant up to a constant.

    XLA annotates most loops with their trip count. Loops that the TPU backend builds itself have no
    annotation, such as those that overlap a matmul with the all-gather of its weights.

    Args:
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
        variables = [operand for operand in operands if operand.literal is None]
        if len(constants) != 1 or len(variables) != 1:
            return None
        total += constants[0]
        current = _skip_copies(variables[0], by_name)
    return total if current is not None and _tuple_index(current) == index else None
