"""Reads the text of a compiled XLA module: computations, instructions, and what each carries."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_NAME = re.compile(r"%([\w.\-]+)")
_SPACE = re.compile(r"S\((\d+)\)")
# Metadata of a kernel is written on lines of its own, in the middle of its instruction.
_CONTINUATIONS = ('"', "}}")
# Attributes that name the computations an instruction runs.
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%[\w.\-]+)")

COLLECTIVES = frozenset(
    """all-gather all-reduce reduce-scatter all-to-all collective-permute collective-broadcast
    ragged-all-to-all""".split()
)


@dataclasses.dataclass(frozen=True)
class HloArray:
    """One array of an instruction's result.

    Attributes:
      dtype: as XLA writes it, such as "bf16".
      dims: its shape.
      in_hbm: it lives in the chip's main memory, not in VMEM, SMEM or the like.
    """

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Without the padding of tiles."""
        return self.size * _bits(self.dtype) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: unique in the module.
      opcode: such as "fusion".
      results: arrays of the result; several if it is a tuple.
      operands: names of instructions of the same computation.
      called: names of computations by attribute; "branch_computations" in their order.
      op_name: the path of jax scopes that it came from; empty if the compiler added it.
      cycles: the compiler's estimate, or None.
      trip_count: of a loop, where the compiler knows it, or None.
      parameter: which of the computation's parameters it is, or None.
      literal: value of a constant that is one whole number from 0 on, or None.
      attributes: the rest of the line, as it stands.
      is_root: its result is the computation's.
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
        """Of the result, wherever it lives."""
        return sum(array.num_bytes for array in self.results)

    @property
    def hbm_bytes(self) -> int:
        """Of the result, as far as it lives in main memory."""
        return sum(array.num_bytes for array in self.results if array.in_hbm)


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in the order of their schedule."""

    name: str
    instructions: tuple[Instruction, ...]

    def by_name(self) -> dict[str, Instruction]:
        """The instructions by their names."""
        return {instruction.name: instruction for instruction in self.instructions}

    def users(self) -> dict[str, list[Instruction]]:
        """For each name, the instructions that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                found.setdefault(operand, []).append(instruction)
        return found

    @property
    def root(self) -> Instruction:
        """What the computation returns."""
        return next(one for one in self.instructions if one.is_root)


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A whole program."""

    computations: Mapping[str, Computation]
    entry: Computation


def parse(text: str) -> HloModule:
    """Reads `Compiled.as_text()`.

    Raises:
      ValueError: the text holds no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry = None
    header, lines = None, []
    for line in text.splitlines():
        if match := _HEADER.match(line):
            header, lines = match, []
        elif line.startswith(_CONTINUATIONS):
            lines.append(lines.pop() + line if lines else line)
        elif line.startswith("}") and header:
            found = Computation(header.group(2), tuple(_instructions(lines)))
            computations[found.name] = found
            entry = found if header.group(1) else entry
            header = None
        elif header:
            lines.append(line)
    if entry is None:
        raise ValueError("no entry computation: this is not the text of an XLA module")
    return HloModule(computations, entry)


def arrays(text: str) -> tuple[HloArray, ...]:
    """The arrays of a written shape, such as "(f32[8,128]{1,0:T(8,128)S(1)}, s32[])"."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        shape = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        space = _SPACE.search(layout)
        found.append(HloArray(dtype, shape, space is None or space.group(1) == "0"))
    return tuple(found)


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
    """The shape that a line begins with, and the rest."""
    if text.startswith("("):
        end = _closing(text[1:]) + 2
        return text[:end], text[end:]
    shape, _, rest = text.partition(" ")
    return shape, rest


def _closing(text: str) -> int:
    """Index of the parenthesis that closes one opened just before `text`."""
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
    """Bits of one element; 0 for tokens and other things without a size."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[a-z]+(\d+)", dtype)
    return int(match.group(1)) if match else 0
