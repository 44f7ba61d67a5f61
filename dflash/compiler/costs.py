"""Cost of each scheduled operation of a compiled program, with loops multiplied by trip counts.

All figures are per device.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from dflash.compiler import hlo, traffic
from dflash.compiler.hlo import COLLECTIVES, HloModule, Instruction

# Opcodes that move no data and take no time of their own.
_FREE = frozenset(
    """parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id
    optimization-barrier add-dependency copy-done async-done async-update slice-done
    dynamic-slice-done all-gather-done all-reduce-done collective-permute-done send-done
    recv-done""".split()
)
# Prefixes of the fusions that start and finish a collective which overlaps other operations.
_START_PREFIX, _DONE_PREFIX = "async-collective-start", "async-collective-done"

# Maps a `while`, with its scope as `op_name`, to its trip count, or a `conditional` to the index of
# the branch that runs; returns None if unknown.
ControlFlowRule = Callable[[Instruction], int | None]


@dataclasses.dataclass(frozen=True)
class ScheduledOperation:
    """Operation of a compiled program, with the cost of a single execution.

    Attributes:
      scope: Path of jax scopes. An operation that the compiler added has the scope of its reader.
      times: Number of executions, loops multiplied by their trip counts.
      flops: Multiplications and additions of its matmuls.
      read_bytes: Bytes read from HBM.
      written_bytes: Bytes written to HBM.
      cycles: The compiler's estimate of cycles; 0 if it gives none.
      loops: Names of the enclosing loops, outermost first.
      collective: Kind of the collective that the operation is or starts; None for others.
    """

    instruction: Instruction
    scope: str
    times: int
    flops: float
    read_bytes: int
    written_bytes: int
    cycles: int
    loops: tuple[str, ...]
    collective: str | None = None

    @property
    def hbm_bytes(self) -> int:
        """Returns the bytes read from and written to HBM."""
        return self.read_bytes + self.written_bytes

    @property
    def is_async(self) -> bool:
        """Returns whether it overlaps other operations, so that the compiler gives no cycles."""
        opcode, name = self.instruction.opcode, self.instruction.name
        return opcode.endswith("-start") or name.startswith(_START_PREFIX)


def operations(
    module: HloModule, *, trips: ControlFlowRule, branch: ControlFlowRule
) -> list[ScheduledOperation]:
    """Returns every operation that a run of the program schedules.

    Args:
      trips: Trip counts of loops that neither the compiler nor `hlo` knows; None counts as 1.
      branch: Branches of conditionals; None selects the branch with the most cycles.
    """
    return list(_Walk(module, trips, branch).through(module.entry.name, 1, (), ""))


@dataclasses.dataclass(frozen=True)
class _Walk:
    module: HloModule
    trips: ControlFlowRule
    branch: ControlFlowRule

    def through(
        self, name: str, times: int, loops: tuple[str, ...], scope: str
    ) -> Iterator[ScheduledOperation]:
        """Yields the operations of a computation that runs `times` times inside `loops`."""
        computation = self.module.computations[name]
        by_name, users = computation.by_name(), computation.users()
        for instruction in computation.instructions:
            if instruction.opcode in _FREE or instruction.name.startswith(_DONE_PREFIX):
                continue
            own_scope = _scope(instruction, by_name, users) or scope
            scoped = dataclasses.replace(instruction, op_name=own_scope)
            if instruction.opcode == "while":
                turns = instruction.trip_count
                turns = turns or hlo.trip_count(self.module, instruction, by_name)
                turns = turns or self.trips(scoped) or 1
                body = instruction.called["body"][0]
                inner_loops = (*loops, instruction.name)
                yield from self.through(body, times * turns, inner_loops, own_scope)
            elif instruction.opcode == "conditional":
                yield from self._conditional(scoped, times, loops)
            elif instruction.opcode == "call":
                yield from self.through(instruction.called["to_apply"][0], times, loops, own_scope)
            else:
                yield self._operation(instruction, by_name, own_scope, times, loops)

    def _conditional(
        self, instruction: Instruction, times: int, loops: tuple[str, ...]
    ) -> Sequence[ScheduledOperation]:
        branches = [
            list(self.through(name, times, loops, instruction.op_name))
            for name in instruction.called["branch_computations"]
        ]
        index = self.branch(instruction)
        if index is not None:
            return branches[index]
        return max(branches, key=lambda branch: sum(op.cycles * op.times for op in branch))

    def _operation(
        self,
        instruction: Instruction,
        by_name: Mapping[str, Instruction],
        scope: str,
        times: int,
        loops: tuple[str, ...],
    ) -> ScheduledOperation:
        read, written = traffic.hbm_bytes(self.module, instruction, by_name)
        return ScheduledOperation(
            instruction=instruction,
            scope=scope,
            times=times,
            flops=traffic.matmul_flops(self.module, instruction, by_name),
            read_bytes=read,
            written_bytes=written,
            cycles=instruction.cycles or 0,
            loops=loops,
            collective=_collective(self.module, instruction),
        )


def _collective(module: HloModule, instruction: Instruction) -> str | None:
    opcodes = [instruction.opcode.removesuffix("-start")]
    if instruction.opcode == "fusion" and instruction.name.startswith(_START_PREFIX):
        fused = module.computations[instruction.called["calls"][0]]
        opcodes = [inner.opcode for inner in fused.instructions]
    return next((opcode for opcode in opcodes if opcode in COLLECTIVES), None)


def _scope(
    instruction: Instruction,
    by_name: Mapping[str, Instruction],
    users: Mapping[str, Sequence[Instruction]],
) -> str:
    """Returns the first non-empty op_name: its own, its nearest reader's, or an operand's."""
    seen, queue = {instruction.name}, [instruction]
    while queue:
        current = queue.pop(0)
        if current.op_name:
            return current.op_name
        for user in users.get(current.name, ()):
            # Skip tuples: they collect values of several scopes for a loop or for the caller.
            if user.name not in seen and user.opcode != "tuple":
                seen.add(user.name)
                queue.append(user)
    operands = [by_name[name].op_name for name in instruction.operands if name in by_name]
    return next((name for name in operands if name), "")
