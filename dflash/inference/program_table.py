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
import jax.numpy as jnp

from dflash.inference import first_token, programs
from dflash.inference.cycle import dispatch
from dflash.inference.cycle.state import DecodeState
from dflash.inference.logits import nonfinite
from dflash.inference.shapes import Shapes, places
from dflash.layers.products import matmul_precision
from dflash.parallel import host
from dflash.parallel.compiler_options import loop_options
from dflash.parallel.sharding import Sharding, zeros
from dflash.runs import cpu_kernels

Name = tuple  # Entry of the table, followed by its sizes.
FOR_GREEDY = "_greedy"  # Ends the names of programs for greedy requests only.
_MAX_THREADS = 4  # Most programs that compile at once.


@dataclasses.dataclass(frozen=True)
class Program:
    """Pure function over arrays of known shapes, with the way it is compiled.

    Attributes:
      function: Function, bound to what is static.
      results: Shardings of the results, or a pytree prefix of them. None: the results are the
        donated arguments, changed, with one more result for each of `extra`.
      donated: Indices of the arguments whose buffers the results take over, so that caches are
        updated in place rather than copied.
      extra: Number of results behind the donated arguments, which every device holds whole.
      loops: The function loops over cycles and needs the compiler options for loops.
    """

    function: Callable
    arguments: tuple
    results: Any = None
    donated: tuple[int, ...] = ()
    extra: int = 0
    loops: bool = False

    def compile(self, sharding: Sharding, dtype: jnp.dtype) -> jax.stages.Compiled:
        """Compiles the function for a mesh; the models' dtype decides the precision of products."""
        if sharding.platform == "cpu":
            cpu_kernels.tune_malloc()
        results = self.results
        if results is None:
            changed = (places(self.arguments[i]) for i in self.donated)
            results = *changed, *(sharding.replicated(),) * self.extra
            results = results if len(results) > 1 else results[0]
        jitted = jax.jit(self.function, donate_argnums=self.donated, out_shardings=results)
        options = loop_options(sharding, dtype) if self.loops else None
        with jax.default_matmul_precision(matmul_precision(dtype)):
            lowered = jitted.lower(*self.arguments)
            return lowered.compile(compiler_options=options or None)


class Programs:
    """Programs of one engine, each compiled at its first use."""

    def __init__(self, shapes: Any, table: Mapping[str, Callable[..., Program]]):
        """Starts with the programs of a table, none of them compiled.

        Args:
          shapes: First argument of the functions in the table.
          table: Functions by name that return a program for the sizes behind its name.
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
        self._table[name] = functools.partial(_over_state, function)

    def get(self, kind: str, *sizes: int) -> jax.stages.Compiled:
        """Returns the compiled program of this name."""
        name = (kind, *sizes)
        if name not in self._compiled:
            program = self._table[kind](self._shapes, *sizes)
            self._compiled[name] = program.compile(self._shapes.sharding, self._shapes.dtype)
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

    def compile_all(
        self,
        names: Sequence[Name],
        progress: Callable[[int, int], None] = lambda ready, total: None,
    ) -> None:
        """Compiles programs in parallel threads; the compiler works while others are traced.

        Args:
          progress: Called before the first and after each program with the number of programs that
            are ready, and of all.
        """
        if names:
            progress(0, len(names))
        # All processes of a run must compile in the same order.
        threads = min(_MAX_THREADS, os.cpu_count() or 1) if jax.process_count() == 1 else 1
        pool = concurrent.futures.ThreadPoolExecutor(threads, host.COMPILING)
        try:
            started = [pool.submit(self.get, *name) for name in names]
            for ready, future in enumerate(concurrent.futures.as_completed(started), start=1):
                future.result()
                progress(ready, len(names))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def names(
    shapes: Shapes,
    prompt_lengths: Iterable[int],
    *,
    grammars: bool = False,
    greedy: bool = False,
) -> list[Name]:
    """Returns the names of the programs that prompts of some lengths need.

    Args:
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
    if len(shapes.rules.block_sizes) > 1:
        needed.append(("occupied",))
    return needed


def keeps_rows(shapes: Shapes) -> bool:
    """Returns whether rows of the drafter are kept beside cached pages of the target."""
    return shapes.layout.prefix_cache and bool(jax.tree.leaves(shapes.context()))


def replays(shapes: Shapes) -> bool:
    """Returns whether the drafter observes cached tokens again."""
    return shapes.layout.prefix_cache and shapes.drafter.prefix_cache_mode == "tokens"


def _over_state(function: Callable, shapes: Shapes) -> Program:
    """Returns the program of a function of (target, drafter, state); see `Engine.add_program`."""
    arguments = *shapes.weights, shapes.state()
    run = shapes.over_models(function)

    def place(result):
        return places(shapes.state()) if _is_state(result) else shapes.replicated

    results = jax.eval_shape(run, *arguments)
    consumes = any(map(_is_state, jax.tree.leaves(results, is_leaf=_is_state)))
    placed = jax.tree.map(place, results, is_leaf=_is_state)
    return Program(run, arguments, placed, donated=(2,) if consumes else (), loops=True)


def _is_state(x: Any) -> bool:
    return isinstance(x, DecodeState)


# --- the table ----------------------------------------------------------------------------------


def zeros_of(abstract: Any) -> Program:
    """Returns the program that creates zeros in place of abstract arrays."""
    return Program(lambda: zeros(abstract), (), places(abstract))


def _new_state(shapes: Shapes) -> Program:
    function = functools.partial(programs.new_state, shapes)
    return Program(function, (shapes.seconds(),), places(shapes.state()))


def _insert(shapes: Shapes) -> Program:
    number, anchors = shapes.scalar(), shapes.array((shapes.num_prefill_slots,))
    stop_ids = shapes.array((shapes.num_stop_ids,))
    where = number, number, shapes.table_row(), number, number, stop_ids
    default = shapes.constraints(1).controls
    of_request = default, shapes.one_sampling(), number if shapes.target.adapters else None
    arguments = shapes.state(), shapes.prefill_state(), anchors, *where, *of_request
    return Program(functools.partial(programs.insert, shapes.drafter), arguments, donated=(0,))


def _generate(shapes: Shapes, *bucket: int, greedy: bool = False) -> Program:
    """Returns the program of a dispatch; its size is a batch bucket, or missing for all slots."""
    function = shapes.over_models(programs.generate(shapes, *bucket, greedy=greedy))
    arguments = *shapes.weights, shapes.state(), shapes.scalar()
    return Program(function, arguments, donated=(2,), extra=1, loops=True)


def _release(shapes: Shapes) -> Program:
    return Program(programs.release, (shapes.state().occupancy, shapes.scalar()), donated=(0,))


def _set_pages(shapes: Shapes) -> Program:
    table = shapes.array((shapes.layout.batch_size, shapes.layout.pages_per_sequence))
    return Program(programs.set_pages, (shapes.state(), table), donated=(0,))


def _occupied(shapes: Shapes) -> Program:
    arguments = shapes.state(), shapes.seconds(), shapes.scalar()
    return Program(programs.occupied(shapes), arguments, donated=(0,))


def _draft(shapes: Shapes) -> Program:
    """Returns the first half of a cycle with grammars: the host reads the proposal."""
    results = places((shapes.state(), shapes.proposal(shapes.propose())))
    return Program(shapes.propose(), (*shapes.weights, shapes.state()), results, donated=(2,))


def _conclude(shapes: Shapes) -> Program:
    """Returns the second half of a cycle with grammars: the host has answered with masks."""
    function = shapes.over_models(functools.partial(dispatch.conclude, rules=shapes.rules))
    layout, words = shapes.layout, first_token.num_words(shapes.vocab_size)
    allowed = shapes.array((layout.batch_size, layout.block_size, words))
    ready = shapes.array((layout.batch_size,), jnp.bool_)
    proposal = shapes.proposal(shapes.propose())
    arguments = *shapes.weights, shapes.state(), proposal, allowed, ready
    return Program(function, arguments, donated=(2,), extra=1, loops=True)


def _unconstrained(shapes: Shapes, count: int) -> Program:
    return Program(functools.partial(programs.unconstrained, shapes, count), (), shapes.replicated)


def _prefill(shapes: Shapes, rows: int) -> Program:
    count = shapes.num_prefill_slots
    of_prompts = shapes.chunk(rows), shapes.constraints(count), shapes.sampling(count)
    arguments = *shapes.weights, shapes.state().cache, shapes.prefill_state(), *of_prompts
    return Program(shapes.over_models(programs.prefill), arguments, donated=(2, 3), extra=2)


def _store(shapes: Shapes) -> Program:
    slot = shapes.scalar(), shapes.table_row(), shapes.scalar()
    arguments = shapes.context(), shapes.state().drafter, *slot
    return _per_device(shapes, functools.partial(programs.store, shapes), arguments)


def _restore(shapes: Shapes) -> Program:
    slot = shapes.scalar(), shapes.table_row(), shapes.scalar()
    arguments = shapes.prefill_state(), shapes.context(), *slot
    return _per_device(shapes, functools.partial(programs.restore, shapes), arguments)


def _per_device(shapes: Shapes, function: Callable, arguments: tuple) -> Program:
    """Returns a program that each device runs on its own shards, and that changes the first one."""
    if shapes.sharding.mesh.size > 1:
        specs = jax.tree.map(lambda sharding: sharding.spec, places(arguments))
        function = jax.shard_map(
            function,
            mesh=shapes.sharding.mesh,
            in_specs=specs,
            out_specs=specs[0],
            check_vma=False,
        )
    return Program(function, arguments, donated=(0,))


def _replay(shapes: Shapes, rows: int) -> Program:
    arguments = *shapes.weights, shapes.prefill_state(), shapes.chunk(rows)
    return Program(shapes.over_models(programs.replay), arguments, donated=(2,))


def _new_examined(shapes: Shapes) -> Program:
    function = functools.partial(programs.new_examined, shapes)
    return Program(function, (), places(shapes.examined()))


def _examine(shapes: Shapes, rows: int) -> Program:
    """Returns the program that runs one sequence again, alone, to find non-finite logits."""
    number, tokens = shapes.scalar(), shapes.array((1, rows))
    arguments = shapes.weights[0], shapes.examined(), tokens, number, number, number
    function = shapes.over_target(nonfinite.examine_chunk)
    return Program(function, arguments, donated=(1,), extra=1)


TABLE: dict[str, Callable[..., Program]] = {
    "new_state": _new_state,
    "insert": _insert,
    "generate": _generate,
    "generate" + FOR_GREEDY: functools.partial(_generate, greedy=True),
    "release": _release,
    "set_pages": _set_pages,
    "occupied": _occupied,
    "draft": _draft,
    "conclude": _conclude,
    "new_prefill_state": lambda shapes: zeros_of(shapes.prefill_state()),
    "unconstrained": _unconstrained,
    "prefill": _prefill,
    # The prefix cache.
    "new_context": lambda shapes: zeros_of(shapes.context()),
    "store": _store,
    "restore": _restore,
    "replay": _replay,
    # Non-finite logits.
    "new_examined": _new_examined,
    "examine": _examine,
}
