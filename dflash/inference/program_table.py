"""Table of the engine's programs, with the way each is compiled.

Every program is compiled ahead of time for shapes that are known beforehand, so that nothing
compiles inside a measured call. A program is named by its entry in `TABLE`, followed by its sizes,
such as ("prefill", 64).
"""

import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from dflash.inference import program_arguments, programs
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import nonfinite
from dflash.inference.shapes import Shapes, places
from dflash.layers.products import matmul_precision
from dflash.parallel.sharding import zeros
from dflash.runs import cpu_kernels

Name = tuple  # Entry of the table, followed by its sizes.
FOR_GREEDY = "_greedy"  # Ends the names of programs for greedy requests only.
_MAX_THREADS = 4  # Most programs that compile at once.


@dataclasses.dataclass(frozen=True)
class Program:
    """Function with the way it is compiled; all fields but the last two take shapes and sizes.

    Attributes:
      function: Returns the pure function, bound to what is static.
      arguments: Returns its abstract arguments.
      results: Returns the shardings of its results, or a pytree prefix of them.
      donated: Indices of the arguments whose buffers the results take over, so that caches are
        updated in place rather than copied.
      loops: The function loops over cycles and needs the compiler options for loops.
    """

    function: Callable[..., Callable]
    arguments: Callable[..., tuple]
    results: Callable[..., Any]
    donated: tuple[int, ...] = ()
    loops: bool = False

    def compile(self, shapes: Shapes, *sizes: int) -> jax.stages.Compiled:
        """Compiles the function for the shapes of an engine."""
        if shapes.sharding.platform == "cpu":
            cpu_kernels.tune_malloc()
        jitted = jax.jit(
            self.function(shapes, *sizes),
            donate_argnums=self.donated,
            out_shardings=self.results(shapes, *sizes),
        )
        options = shapes.loop_options if self.loops else None
        with jax.default_matmul_precision(matmul_precision(shapes.dtype)):
            lowered = jitted.lower(*self.arguments(shapes, *sizes))
            return lowered.compile(compiler_options=options or None)


class Programs:
    """Programs of one engine, each compiled at its first use."""

    def __init__(self, shapes: Any, table: Mapping[str, Program]):
        """Starts with the programs of a table, none of them compiled.

        Args:
          shapes: Argument of the fields of every `Program`.
          table: Programs by name.
        """
        self._shapes = shapes
        self._table = dict(table)
        self._compiled: dict[Name, jax.stages.Compiled] = {}

    def add(self, name: str, function: Callable) -> None:
        """Adds a program over the models and the state; see `Engine.add_program`.

        Raises:
          ValueError: A program of `TABLE` has this name.
        """
        if name in TABLE:
            raise ValueError(f"program {name!r} is built in; give the added program another name")
        self._table[name] = over_state(self._shapes, function)

    def get(self, kind: str, *sizes: int) -> jax.stages.Compiled:
        """Returns the compiled program of this name."""
        name = (kind, *sizes)
        if name not in self._compiled:
            self._compiled[name] = self._table[kind].compile(self._shapes, *sizes)
        return self._compiled[name]

    def for_requests(self, kind: str, *sizes: int, greedy: bool) -> jax.stages.Compiled:
        """Returns the program `kind`, or the one for greedy requests if they all are.

        Where only the program for all requests is compiled, it serves greedy ones too.
        """
        every, special = (kind, *sizes), (kind + FOR_GREEDY, *sizes)
        compiled = every in self._compiled and special not in self._compiled
        return self.get(*(special if greedy and not compiled else every))

    def missing(self, names: Iterable[Name]) -> list[Name]:
        """Returns the names of the programs that are not compiled yet."""
        return [name for name in names if name not in self._compiled]

    def compile_all(self, names: Sequence[Name], progress: Callable[[int, int], None]) -> None:
        """Compiles programs in parallel threads; the compiler works while others are traced.

        Args:
          names: Names of the programs.
          progress: Called before the first and after each program with the number of programs that
            are ready, and of all.
        """
        if names:
            progress(0, len(names))
        # All processes of a run must compile in the same order.
        threads = min(_MAX_THREADS, os.cpu_count() or 1) if jax.process_count() == 1 else 1
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            started = [pool.submit(self.get, *name) for name in names]
            try:
                for ready, one in enumerate(concurrent.futures.as_completed(started), start=1):
                    one.result()
                    progress(ready, len(names))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise


def names(
    shapes: Shapes,
    prompt_lengths: Iterable[int],
    *,
    grammars: bool = False,
    greedy: bool = False,
) -> list[Name]:
    """Returns the names of the programs that prompts of some lengths need.

    Args:
      shapes: Shapes of the engine.
      prompt_lengths: Lengths of the prompts, in tokens.
      grammars: Include the programs of sequences with grammars.
      greedy: Whether all requests are greedy, see `Engine.generate`.
    """
    layout, suffix = shapes.layout, FOR_GREEDY if greedy else ""
    buckets = [(), *((bucket,) for bucket in layout.bucket_sizes[:-1])]
    chunks = layout.chunks(prompt_lengths)
    needed: list[Name] = [
        ("new_state",),
        ("new_prefill_state",),
        *(("prefill", rows) for rows in chunks),
    ]
    needed += [("unconstrained", count) for count in sorted({1, shapes.num_prefill_slots})]
    generate = (("generate" + suffix, *bucket) for bucket in buckets)
    needed += [("insert",), *generate, ("release",)]
    if grammars:
        needed += [("draft",), ("conclude",)]
    if layout.overcommits:
        needed.append(("set_pages",))
    if keeps_rows(shapes):
        needed += [("new_context",), ("store",), ("restore",)]
    if replays(shapes):
        needed += [("replay", rows) for rows in chunks]
    if len(shapes.block_sizes) > 1:
        needed.append(("occupied",))
    return needed


def keeps_rows(shapes: Shapes) -> bool:
    """Returns whether rows of the drafter are kept beside cached pages of the target."""
    return shapes.layout.prefix_cache and bool(jax.tree.leaves(shapes.context()))


def replays(shapes: Shapes) -> bool:
    """Returns whether the drafter observes cached tokens again."""
    return shapes.layout.prefix_cache and shapes.drafter.prefix_cache_mode == "tokens"


def over_state(shapes: Shapes, function: Callable) -> Program:
    """Returns the program of a function of (target, drafter, state); see `Engine.add_program`."""
    arguments = *shapes.weights, shapes.state()
    program = shapes.over_models(function)

    def place(result):
        return places(shapes.state()) if _is_state(result) else shapes.replicated

    results = jax.eval_shape(program, *arguments)
    consumes = any(map(_is_state, jax.tree.leaves(results, is_leaf=_is_state)))
    return Program(
        lambda _: program,
        lambda _: arguments,
        lambda _: jax.tree.map(place, results, is_leaf=_is_state),
        donated=(2,) if consumes else (),
        loops=True,
    )


def _is_state(x: Any) -> bool:
    return isinstance(x, DecodeState)


def _state_and_report(shapes: Shapes, *_: int) -> tuple:
    return places(shapes.state()), shapes.replicated


def _conclude(shapes: Shapes) -> Callable:
    return shapes.over_models(functools.partial(dispatch.conclude, rules=shapes.rules))


def _prefill_results(shapes: Shapes, rows: int) -> tuple:
    replicated = shapes.replicated
    return places(shapes.state().cache), places(shapes.prefill_state()), replicated, replicated


def _store(shapes: Shapes) -> Callable:
    function = functools.partial(programs.store, shapes)
    return _per_device(shapes, function, program_arguments.store(shapes), places(shapes.context()))


def _restore(shapes: Shapes) -> Callable:
    function = functools.partial(programs.restore, shapes)
    return _per_device(
        shapes, function, program_arguments.restore(shapes), places(shapes.prefill_state())
    )


def _per_device(shapes: Shapes, function: Callable, arguments: tuple, results: Any) -> Callable:
    """Returns a function that each device runs on its own shards."""
    if shapes.sharding.mesh.size == 1:
        return function
    in_specs, out_specs = jax.tree.map(lambda sharding: sharding.spec, (places(arguments), results))
    return jax.shard_map(
        function,
        mesh=shapes.sharding.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=False,
    )


def _generate(**how: bool) -> Program:
    """Returns the program of a dispatch; its size is a batch bucket, or missing for all slots."""
    return Program(
        lambda shapes, *bucket: shapes.over_models(programs.generate(shapes, *bucket, **how)),
        lambda shapes, *_: (*shapes.weights, shapes.state(), shapes.scalar()),
        _state_and_report,
        donated=(2,),
        loops=True,
    )


TABLE: dict[str, Program] = {
    "new_state": Program(
        lambda shapes: functools.partial(programs.new_state, shapes),
        lambda shapes: (shapes.seconds(),),
        lambda shapes: places(shapes.state()),
    ),
    "insert": Program(
        lambda shapes: functools.partial(programs.insert, shapes.drafter),
        program_arguments.insert,
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "generate": _generate(),
    "generate" + FOR_GREEDY: _generate(greedy=True),
    "release": Program(
        lambda shapes: programs.release,
        lambda shapes: (shapes.state().occupancy, shapes.scalar()),
        lambda shapes: places(shapes.state().occupancy),
        donated=(0,),
    ),
    "set_pages": Program(
        lambda shapes: programs.set_pages,
        lambda shapes: (
            shapes.state(),
            shapes.whole((shapes.layout.batch_size, shapes.layout.pages_per_sequence)),
        ),
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    "occupied": Program(
        programs.occupied,
        lambda shapes: (shapes.state(), shapes.seconds(), shapes.scalar()),
        lambda shapes: places(shapes.state()),
        donated=(0,),
    ),
    # Grammars: the host reads the proposal and answers with masks.
    "draft": Program(
        Shapes.propose,
        lambda shapes: (*shapes.weights, shapes.state()),
        lambda shapes: places((shapes.state(), shapes.proposal(shapes.propose()))),
        donated=(2,),
    ),
    "conclude": Program(
        _conclude, program_arguments.conclude, _state_and_report, donated=(2,), loops=True
    ),
    # Prompts.
    "new_prefill_state": Program(
        lambda shapes: lambda: zeros(shapes.prefill_state()),
        lambda shapes: (),
        lambda shapes: places(shapes.prefill_state()),
    ),
    "unconstrained": Program(
        lambda shapes, count: functools.partial(programs.unconstrained, shapes, count),
        lambda shapes, count: (),
        lambda shapes, count: shapes.replicated,
    ),
    "prefill": Program(
        lambda shapes, rows: shapes.over_models(programs.prefill),
        program_arguments.prefill,
        _prefill_results,
        donated=(2, 3),
    ),
    # The prefix cache.
    "new_context": Program(
        lambda shapes: lambda: zeros(shapes.context()),
        lambda shapes: (),
        lambda shapes: places(shapes.context()),
    ),
    "store": Program(
        _store, program_arguments.store, lambda shapes: places(shapes.context()), donated=(0,)
    ),
    "restore": Program(
        _restore,
        program_arguments.restore,
        lambda shapes: places(shapes.prefill_state()),
        donated=(0,),
    ),
    "replay": Program(
        lambda shapes, rows: shapes.over_models(programs.replay),
        lambda shapes, rows: (*shapes.weights, shapes.prefill_state(), shapes.chunk(rows)),
        lambda shapes, rows: places(shapes.prefill_state()),
        donated=(2,),
    ),
    # Non-finite logits: one sequence runs again, alone.
    "new_examined": Program(
        lambda shapes: functools.partial(programs.new_examined, shapes),
        lambda shapes: (),
        lambda shapes: places(shapes.examined()),
    ),
    "examine": Program(
        lambda shapes, rows: shapes.over_target(nonfinite.examine_chunk),
        program_arguments.examine,
        lambda shapes, rows: (places(shapes.examined()), shapes.replicated),
        donated=(1,),
    ),
}
