"""Measurements of one setting: a cycle and its parts, or the equality of outputs.

Every part of a cycle runs alone in a loop on the device, once per turn, and what a turn computes
determines the next one's tokens, so XLA can neither drop nor hoist it. An empty loop is timed too;
its time, the cost of a dispatch, is subtracted from that of every part.
"""

import dataclasses
import functools
import itertools
import statistics
import time
import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config.schema import DecodeConfig
from dflash.drafters.base import Drafter, Proposal
from dflash.drafters.none import NoDrafter
from dflash.inference import difference
from dflash.inference.cycle import cycle
from dflash.inference.cycle.block import Block
from dflash.inference.engine import NO_STOP
from dflash.inference.pages import Slot
from dflash.inference.program_table import FOR_GREEDY
from dflash.inference.request import Request, RequestSampling
from dflash.inference.shapes import places
from dflash.kernels.argmax import argmax
from dflash.measure import roofline
from dflash.measure.engine import MeasuredEngine, seconds_of
from dflash.measure.forced import FixedDrafter
from dflash.measure.roofline import ForwardWork, Machine
from dflash.models.decoder import Decoder
from dflash.runs import compilation_cache

MOST_ADVANCED = 16  # Tokens per turn for which a timed dispatch has room.
MOST_EXPLAINED = 4  # Differing outputs of a setting whose first difference is explained.
_WRONG = 5  # One in so many drafts of the oracle is wrong.


def fixed_drafter(rows: int, batch: int, vocab_size: int) -> FixedDrafter:
    """Returns a drafter of a chain that costs nothing and fills `rows` rows."""
    tokens = jnp.broadcast_to(jnp.arange(rows - 1) % vocab_size, (batch, rows - 1))
    form = types.SimpleNamespace(
        feature_layers=(), num_draft_tokens=rows - 1, has_probs=False, longest_path=rows
    )
    return FixedDrafter(Proposal(tokens.astype(jnp.int32)), form)


# --- a cycle and its parts ----------------------------------------------------------------------


def time_cycle(
    target: Decoder,
    drafter: Drafter,
    config: DecodeConfig,
    machine: Machine,
    *,
    context: int,
    repeats: int,
) -> dict:
    """Times a cycle after `context` tokens and its parts; returns figures in ms and GB.

    Raises:
      RuntimeError: A sequence ended within a timed dispatch.
    """
    turns, drafts = config.sync_every, not isinstance(drafter, NoDrafter | FixedDrafter)
    room = 1 + context + drafter.block_size + turns * min(drafter.longest_path, MOST_ADVANCED)
    engine = MeasuredEngine(target, drafter, config, max_length=room)
    names = ["empty", "forward", "unembed", "judge", *(["draft_alone", "commit"] if drafts else [])]
    for name, body in _bodies(engine).items():
        engine.add_program(name, functools.partial(_loop, body, turns))
    cycle_name = "generate" + (FOR_GREEDY if engine.is_greedy else "")
    compiled = {name: _compile_s(engine, name) for name in (cycle_name, *names)}
    runs = {name: functools.partial(engine.run, name) for name in names}
    times = _times(engine, {"cycle": engine.dispatch, **runs}, context, repeats)
    sizes = {"batch": config.batch_size, "rows": drafter.block_size, "context": context}
    compiled["cycle"] = compiled.pop(cycle_name)
    analysis = engine.program(cycle_name).memory_analysis()
    return {
        "rows": drafter.block_size,
        "ms": _parts({name: statistics.median(taken) for name, taken in times.items()}),
        "dispatch_ms": turns * statistics.median(times["empty"]),
        "cycle_range_ms": [min(times["cycle"]), max(times["cycle"])],
        "floor_ms": _floors(target, drafter if drafts else None, machine, sizes),
        "compile": compiled,
        "memory_gb": _memory() | {"temporary": getattr(analysis, "temp_size_in_bytes", 0) / 1e9},
    }


def _times(
    engine: MeasuredEngine, runs: dict[str, Callable], context: int, repeats: int
) -> dict[str, list[float]]:
    """Returns the ms per turn of each run, which take turns; the first round is not counted."""
    state = engine.standing(context)
    requested = state.sampling.filled(engine.config), jnp.full_like(state.stop_ids, NO_STOP)
    requested = jax.tree.map(jax.device_put, requested, places((state.sampling, state.stop_ids)))
    state = dataclasses.replace(state, sampling=requested[0], stop_ids=requested[1])
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            seconds, result = seconds_of(run, engine.at_length(state, context))
            state, report = result if isinstance(result, tuple) else (result, None)
            times[name].append(1e3 * seconds / engine.turns)
            if report is not None and not report.active.all():
                raise RuntimeError("a sequence ended within the dispatch; use fewer --turns")
    return {name: taken[1:] for name, taken in times.items()}


def _parts(loops: dict[str, float]) -> dict[str, float]:
    """Returns the ms of a cycle's parts from those of the loops."""
    alone = {name: ms - loops["empty"] for name, ms in loops.items()}
    parts = {
        "draft": alone.get("draft_alone", 0.0),
        "forward": alone["forward"],
        "unembed": alone["unembed"],
        "sampling": alone["judge"] - alone["unembed"],
        "commit": alone.get("commit", 0.0),
    }
    rest = loops["cycle"] - sum(parts.values())
    return {"cycle": loops["cycle"], **parts, "rest": rest}


def _compile_s(engine: MeasuredEngine, name: str) -> dict:
    """Compiles a program; returns the seconds, and whether jax's cache on disk had it."""
    begin = time.perf_counter()
    with compilation_cache.count_hits() as hits:
        engine.program(name)
    return {"seconds": time.perf_counter() - begin, "cached": bool(hits)}


def _loop(body: Callable, turns: int, target, drafter, state):
    return jax.lax.fori_loop(0, turns, lambda _, state: body(target, drafter, state), state)


def _bodies(engine: MeasuredEngine) -> dict[str, Callable]:
    """Returns the parts of a cycle by name: functions (target, drafter, state) -> state."""
    vocab_size = engine.vocab_size
    rules = engine.rules.for_greedy() if engine.is_greedy else engine.rules

    def after(state, *results, **changes):
        """Returns the state with other anchors, which depend on every element of the results."""
        sums = (leaf.astype(jnp.float32).reshape(leaf.shape[0], -1).sum(1) for leaf in results)
        anchor = (state.anchor + 1 + sum(total.astype(jnp.int32) for total in sums)) % vocab_size
        return dataclasses.replace(state, anchor=anchor, **changes)

    def block_of(drafter, state) -> Block:
        """Returns a block whose tokens depend on the anchors; a tree has the form of a heap."""
        drafts = jnp.arange(drafter.num_draft_tokens, dtype=jnp.int32)
        tokens = (state.anchor[:, None] + 1 + drafts) % vocab_size
        parents = jnp.broadcast_to((drafts + 1) // 2, tokens.shape)
        proposal = Proposal(tokens, parents if drafter.drafts_trees else None)
        return Block.of(proposal, state.anchor, state.length - 1, drafter.longest_path)

    def empty(target, drafter, state):
        return after(state)

    def forward(target, drafter, state):
        block, layers = block_of(drafter, state), drafter.feature_layers
        rows = block.tokens, block.positions, state.cache
        output = target(*rows, feature_layers=layers, tree_mask=block.ancestry)
        return after(state, output.hidden, output.features, cache=output.cache)

    def unembed(target, drafter, state):
        return after(state, argmax(target.unembed(target.embed(block_of(drafter, state).tokens))))

    def judge(target, drafter, state):
        block = block_of(drafter, state)
        logits = target.unembed(target.embed(block.tokens))
        result, finite = cycle.judge(state, block, logits, rules)
        return after(state, result.next_token, result.num_accepted, finite)

    def commit(target, drafter, state):
        rows = jnp.arange(drafter.longest_path + 1, dtype=jnp.int32)
        tokens = (state.anchor[:, None] + rows) % vocab_size
        features = jnp.tile(target.embed(tokens[:, :-1]), len(drafter.feature_layers))
        position, count, cache = state.length - 1, jnp.ones_like(state.length), state.cache
        if drafter.drafts_trees:
            path = rows[:-1] * (1 + state.anchor[:, None] % 2) % drafter.block_size
            cache = cache.commit(position, count, path, target.sharding)
        observed = drafter.observe(state.drafter, position, tokens, count, features, target)
        return after(state, cache=cache, drafter=observed)

    bodies = (empty, forward, unembed, judge, commit)
    return {body.__name__: body for body in bodies}


def _floors(
    target: Decoder, drafter: Drafter | None, machine: Machine, sizes: dict[str, int]
) -> dict[str, float]:
    """Returns the least ms of a cycle, the draft, the forward and the unembedding."""
    rows = sizes["batch"] * sizes["rows"]
    unread = () if target.lm_head is None else ("embed_tokens.",)
    head = "embed_tokens." if target.lm_head is None else "lm_head."
    head = _less(
        roofline.products(target, rows, unread), roofline.products(target, rows, (*unread, head))
    )
    forward = _less(roofline.target_work(target, **sizes), head)
    draft = ForwardWork(0, 0)
    if drafter is not None:
        draft = roofline.draft_work(target, drafter, batch=sizes["batch"])
    works = {"draft": draft, "forward": forward, "unembed": head}
    floors = {name: work.ideal_ms(machine) for name, work in works.items()}
    return {"cycle": floors["draft"] + (forward + head).ideal_ms(machine), **floors}


def _less(work: ForwardWork, part: ForwardWork) -> ForwardWork:
    return ForwardWork(work.flops - part.flops, work.size_bytes - part.size_bytes)


def _memory() -> dict[str, float]:
    """Returns the memory of the first device in GB; an empty dict if it does not report any."""
    stats = jax.devices()[0].memory_stats() or {}
    names = {"peak": "peak_bytes_in_use", "in use": "bytes_in_use"}
    return {name: stats[key] / 1e9 for name, key in names.items() if key in stats}


# --- equality -----------------------------------------------------------------------------------


class Oracle(Drafter):
    """Drafter that knows the output and drafts it, with a wrong token here and there.

    Random weights accept almost nothing. These drafts are accepted in all numbers, so that blocks
    begin at all positions.
    """

    def __init__(self, texts: Sequence[Sequence[int]], drafts: int, vocab_size: int):
        """Initializes the drafter with the prompt and the output of every slot."""
        self.texts = nnx.Variable(jnp.asarray(texts, jnp.int32))
        self.num_draft_tokens, self.vocab_size = drafts, vocab_size

    def init_state(self, batch, max_length):
        return ()

    def draft(self, state, anchor, position, sampler, heads):
        texts = self.texts.get_value()
        places = position[:, None] + 1 + jnp.arange(self.num_draft_tokens)
        tokens = jnp.take_along_axis(texts, jnp.minimum(places, texts.shape[1] - 1), axis=1)
        wrong = (places.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 16
        wrong = (wrong + jnp.arange(len(texts), dtype=jnp.uint32)[:, None]) % _WRONG == 0
        return Proposal(jnp.where(wrong, (tokens + 1) % self.vocab_size, tokens)), state

    def observe(self, state, position, tokens, num_committed, features, heads):
        return state


def compare(
    target: Decoder,
    drafter: Drafter | None,
    config: DecodeConfig,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
) -> dict:
    """Decodes prompts plainly and with a drafter, and counts identical outputs.

    An exact run decodes plainly by the programs that also verify; see `DecodeConfig.exact`.

    Args:
      drafter: Drafter; None is an `Oracle` of 15 drafts.
      prompts: Prompts of one length, a multiple of the batch size.
    """
    length, batch = len(prompts[0]) + new_tokens, config.batch_size
    requests = [
        Request(
            index % batch, tuple(prompt), new_tokens, RequestSampling.from_config(config, index)
        )
        for index, prompt in enumerate(prompts)
    ]
    groups = [requests[start : start + batch] for start in range(0, len(requests), batch)]
    oracle = functools.partial(Oracle, drafts=15, vocab_size=target.arch.vocab_size)
    idle = drafter or oracle(np.zeros((batch, length))) if config.exact else NoDrafter()
    plain = MeasuredEngine(target, idle, config, max_length=length)
    plain.decode_plainly()
    expected = [_decode(plain, group)[0] for group in groups]
    oracles = [
        oracle([[*each.prompt, *text] for each, text in zip(group, texts, strict=True)])
        for group, texts in zip(groups, expected, strict=True)
    ]
    engine = MeasuredEngine(target, drafter or oracles[0], config, max_length=length)
    outputs, cycles = [], 0
    for group, oracle in zip(groups, oracles, strict=True):
        engine.set_drafter(drafter or oracle)
        decoded, more = _decode(engine, group)
        outputs, cycles = outputs + decoded, cycles + more
    pairs = zip(requests, itertools.chain(*expected), outputs, strict=True)
    unequal = [(request, text, other) for request, text, other in pairs if text != other]
    explained = [difference.explain(target, config, *each) for each in unequal[:MOST_EXPLAINED]]
    return {
        "identical": len(requests) - len(unequal),
        "of": len(requests),
        "new_tokens": new_tokens,
        "acceptance_length": len(requests) * (new_tokens - 1) / max(cycles, 1),
        "differences": list(map(str, explained)),
        "faults": sum(each.is_fault for each in explained),
        "memory_gb": _memory(),
    }


def _decode(engine: MeasuredEngine, requests: Sequence[Request]) -> tuple[list[list[int]], int]:
    """Returns the output of each slot, and the number of cycles summed over slots."""
    state, cycles = engine.new_state(), 0
    for request in requests:
        pages = engine.layout.standing_pages(request.id)
        state = engine.admit(state, Slot(request.id, pages), request)
    outputs = [[token] for token in np.asarray(state.anchor).tolist()]
    while np.asarray(state.active).any():
        state, report = engine.dispatch(state)
        counts, tokens = np.asarray(report.num_committed), np.asarray(report.tokens)
        for slot, output in enumerate(outputs):
            for row, count in zip(tokens[:, slot], counts[:, slot], strict=True):
                output += row[:count].tolist()
        cycles += int((counts > 0).sum())
    return outputs, cycles
