"""The cost of each scheduled operation of a compiled program, loops multiplied by their trips.

All figures are per device.
"""

import dataclasses
from collections.abc import Callable, Iterator

from dflash.compiler import loops as loops_lib
from dflash.compiler import traffic
from dflash.compiler.hlo import COLLECTIVES, HloModule, Instruction

# Opcodes that move nothing and take no time of their own.
_FREE = frozenset(
    """parameter constant get-tuple-element tuple bitcast after-all partition-id replica-id
    optimization-barrier add-dependency copy-done async-done async-update slice-done
    dynamic-slice-done all-gather-done all-reduce-done collective-permute-done send-done
    recv-done""".split()
)
# Fusions by which a collective that runs within others, mostly products, begins and ends.
_BEGINS, _ENDS = "async-collective-start", "async-collective-done"

# (a loop or a conditional, with its scope as op_name) -> turns of the loop, or index of the
# branch; None where unknown.
ControlFlowRule = Callable[[Instruction], int | None]


@dataclasses.dataclass(frozen=True)
class ScheduledOperation:
    """One scheduled operation; figures are those of one run.

    Attributes:
      instruction: of the program.
      scope: the jax scopes that it belongs to; for what the compiler added, those of its reader.
      times: number of runs, loops multiplied by their trips.
      flops: multiplications and additions of its matrix products.
      read_bytes: from main memory.
      written_bytes: to main memory.
      cycles: the compiler's estimate; 0 without one.
      loops: names of the loops around it, outermost first.
      collective: the kind of collective that it is, or that it begins; None: it is none.
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
        """Read and written."""
        return self.read_bytes + self.written_bytes

    @property
    def is_async(self) -> bool:
        """It runs beside other operations; the compiler gives it no cycles."""
        opcode, name = self.instruction.opcode, self.instruction.name
        return opcode.endswith("-start") or name.startswith(_BEGINS)


def operations(
    module: HloModule, *, trips: ControlFlowRule, branch: ControlFlowRule
) -> list[ScheduledOperation]:
    """Every operation that a run of the program schedules.

    Args:
      module: the program.
      trips: of loops whose number of turns the compiler does not know; None counts as 1.
      branch: which branch of a conditional runs; None: the one of most cycles.
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
        """Operations of a computation that runs `times` times inside `loops`."""
        computation = self.module.computations[name]
        by_name, users = computation.by_name(), computation.users()
        for one in computation.instructions:
            if one.opcode in _FREE or one.name.startswith(_ENDS):
                continue
            around = _scope(one, by_name, users) or scope
            scoped = dataclasses.replace(one, op_name=around)
            if one.opcode == "while":
                turns = one.trip_count or loops_lib.trip_count(self.module, one, by_name)
                turns = turns or self.trips(scoped) or 1
                yield from self.through(
                    one.called["body"][0], times * turns, (*loops, one.name), around
                )
            elif one.opcode == "conditional":
                yield from self._conditional(scoped, times, loops)
            elif one.opcode == "call":
                yield from self.through(one.called["to_apply"][0], times, loops, around)
            else:
                yield self._operation(one, by_name, around, times, loops)

    def _conditional(self, one, times, loops):
        names = one.called["branch_computations"]
        options = [list(self.through(name, times, loops, one.op_name)) for name in names]
        index = self.branch(one)
        if index is None:
            return max(options, key=lambda found: sum(op.cycles * op.times for op in found))
        return options[index]

    def _operation(self, one, by_name, scope, times, loops) -> ScheduledOperation:
        read, written = traffic.hbm_bytes(self.module, one, by_name)
        return ScheduledOperation(
            instruction=one,
            scope=scope,
            times=times,
            flops=traffic.matmul_flops(self.module, one, by_name),
            read_bytes=read,
            written_bytes=written,
            cycles=one.cycles or 0,
            loops=loops,
            collective=_collective(self.module, one),
        )


def _collective(module: HloModule, one: Instruction) -> str | None:
    opcodes = [one.opcode.removesuffix("-start")]
    if one.opcode == "fusion" and one.name.startswith(_BEGINS):
        opcodes = [
            inner.opcode for inner in module.computations[one.called["calls"][0]].instructions
        ]
    return next((opcode for opcode in opcodes if opcode in COLLECTIVES), None)


def _scope(one: Instruction, by_name, users) -> str:
    """Its own op_name, or that of the nearest reader, or that of what it reads."""
    seen, todo = {one.name}, [one]
    while todo:
        now = todo.pop(0)
        if now.op_name:
            return now.op_name
        for user in users.get(now.name, ()):
            # A tuple feeds a loop or leaves the computation: ambiguous, so skipped.
            if user.name not in seen and user.opcode != "tuple":
                seen.add(user.name)
                todo.append(user)
    read = [by_name[name].op_name for name in one.operands if name in by_name]
    return next((name for name in read if name), "")
