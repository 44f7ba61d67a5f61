"""Engines over the tiny family, and the token sequences that they must produce."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dflash.config import schema
from dflash.drafters.base import Drafter
from dflash.drafters.none import NoDrafter
from dflash.inference.cycle.state import DecodeState
from dflash.inference.engine import Engine
from dflash.inference.pages import Slot
from dflash.inference.request import Request, RequestOutput, RequestSampling
from dflash.inference.scheduler import Scheduler
from dflash.inference.timing import only
from dflash.models.decoder import Decoder
from dflash.offline import decoding
from support.forms import Form
from support.models import ARCHITECTURE, ONE_DEVICE, target

_ASKED = ("min_new_tokens", "logprobs", "grammar", "token_rules", "rejected")
COMPILATION = "/jax/core/compile/backend_compile_duration"


def engine(
    model: Drafter | None = None,
    *,
    mesh: tuple[int, int, int] = ONE_DEVICE,
    max_length: int = 64,
    on: Decoder | None = None,
    adaptive_blocks: bool = False,
    **options,
) -> Engine:
    """An engine over the tiny target; `options` are DecodeConfig's. Nothing is compiled yet."""
    config = schema.DecodeConfig(**{"page_size": 16, "prefill_chunk": 16} | options)
    model = NoDrafter() if model is None else model
    return Engine(
        on or target(mesh), model, config, max_length=max_length, adaptive_blocks=adaptive_blocks
    )


@functools.cache
def shared_engine(name: str, *, tree: bool = False, verify: str = "coupled") -> Engine:
    """Returns the engine of a strategy that all tests share, so that it compiles once.

    Its 15 pages hold 5 sequences of up to 48 tokens; 5 longer ones give way to each other.
    """
    run = engine(
        Form(name, tree).build(), batch_size=5, sync_every=2, max_length=96, num_pages=16,
        prefix_cache=True, verify=verify,
    )  # fmt: skip
    # It serves greedy requests too, which would otherwise compile a program of their own.
    run.program("generate")
    return run


def without_prefix_cache(base: Engine) -> Engine:
    """`base` without its prefix cache; both share all programs."""
    twin = copy.copy(base)
    twin.prefix_cache = False
    return twin


def with_programs(base: Engine, names: Iterable[tuple]) -> Engine:
    """`base` without its prefix cache, as if no other programs were compiled."""
    twin, programs = without_prefix_cache(base), copy.copy(base._programs)
    programs._table = dict(programs._table)
    programs._compiled = {name: base.program(*name) for name in names}
    twin._programs = programs
    return twin


def untraced_cycles(
    name: str, prompts: Sequence[Sequence[int]], *, tree: bool = False, greedy: bool = False
) -> Engine:
    """Returns the shared engine of a strategy, without its programs of cycles."""
    base = shared_engine(name, tree=tree)
    names = base.program_names(map(len, prompts), greedy=greedy)
    return with_programs(base, [each for each in names if not each[0].startswith("generate")])


def retargeted(base: Engine, target: Decoder) -> Engine:
    """`base` with another target of the same shapes; both share all programs."""
    twin = copy.copy(base)
    twin.target, twin.target_params = target, nnx.state(target)
    return twin


def redrafted(base: Engine, model: Drafter) -> Engine:
    """`base` with other weights in its drafter; both share all programs."""
    twin = copy.copy(base)
    twin.set_drafter(model)
    return twin


def watch_dispatches(base: Engine, note: Callable) -> tuple[Engine, list]:
    """Returns `base`, and a list that grows by `note(report, *arguments, **options)` of each."""
    twin, seen = copy.copy(base), []

    def generate(state, *arguments, **options):
        state, report = base.generate(state, *arguments, **options)
        seen.append(note(report, *arguments, **options))
        return state, report

    twin.generate = generate
    return twin, seen


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Yields a list that grows by one entry with every compilation while the context lasts."""
    found: list[str] = []

    def listen(event, seconds, **_):
        if event == COMPILATION:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        jax.jit(lambda x: x + 1)(np.float32(1))
        assert found, "compilations are not being counted"
        found.clear()
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def divide_always(run: Engine) -> None:
    """Lets every cycle divide two rows per slot."""
    run.cycle_seconds = tuple(only(len(run.block_sizes), len(run.rules.choices)).tolist())


def change_often(run: Engine) -> None:
    """Lets plain cycles, whole blocks and divided rows win in turns."""
    sizes, means = len(run.block_sizes), len(run.rules.choices.mean_rows)
    whole, divided = 1.0 + 0.25 * np.arange(sizes), 1.2 + 0.25 * np.arange(means)
    run.cycle_seconds = (*whole.tolist(), *divided.tolist())


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts of these lengths, whose first tokens tell them apart while there are enough."""
    rng = np.random.default_rng(seed)
    prompts = []
    for i, length in enumerate(lengths):
        rest = rng.integers(0, ARCHITECTURE.vocab_size, length - 1).tolist()
        prompts.append((i % ARCHITECTURE.vocab_size, *rest))
    return prompts


def make_requests(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int] | int,
    *,
    each: Sequence[Mapping] | None = None,
    first_index: int = 0,
    **options,
) -> list[Request]:
    """Requests whose ids count from 0.

    Args:
      limits: max_new_tokens, of each prompt or of all.
      each: options of each prompt, beside those of all.
      first_index: number of the first sequence under the seed; another one means other noise.
      options: those of `RequestSampling`, or of `Request`.
    """
    if isinstance(limits, int):
        limits = [limits] * len(prompts)
    requests = []
    for prompt, limit, own in zip(prompts, limits, each or [{}] * len(prompts), strict=True):
        sampling, i = options | own, len(requests)
        asked = {name: sampling.pop(name) for name in _ASKED if name in sampling}
        stop_ids = tuple(sampling.pop("stop_ids", ()))
        sampling = RequestSampling(sequence=first_index + i, **sampling)
        requests.append(Request(i, tuple(prompt), limit, sampling, stop_ids, **asked))
    return requests


def occupied(run: Engine, requests: Sequence[Request]) -> DecodeState:
    """A batch with one request in each slot, prefilled, with its part of all pages."""
    state, layout = run.new_state(), run.layout
    count = min(layout.pages_per_sequence, (layout.pages_per_replica - 1) // layout.batch_size)
    for index, request in enumerate(requests):
        first = 1 + index * count  # Page 0 is scratch.
        state = run.admit(state, Slot(index, tuple(range(first, first + count))), request)
    return state


def decode(
    run: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int] | int, **options
) -> list[RequestOutput]:
    """Completions of all prompts, in their order; `options` as for `make_requests`."""
    return decode_all(run, make_requests(prompts, limits, **options))


def decode_all(run: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Returns the completions of requests, in the order of their ids."""
    done = completions(decoding.decode(run, requests))
    assert [one.id for one in done] == sorted(request.id for request in requests)
    return done


def completions(events: Iterable) -> list[RequestOutput]:
    """Returns the completions among events, in the order of their ids."""
    return sorted((e for e in events if isinstance(e, RequestOutput)), key=lambda e: e.id)


def outcomes(done: Iterable[RequestOutput]) -> list[tuple[tuple[int, ...], str]]:
    """Returns output ids and finish reasons, as `expected` does."""
    return [(one.output_ids, one.finish_reason) for one in done]


def drain(scheduler: Scheduler, requests: Iterable[Request] = ()) -> list:
    """Submits requests, and returns the events until nothing is left to do."""
    for request in requests:
        scheduler.submit(request)
    events = []
    while not scheduler.idle:
        events += scheduler.step()
    return events


@functools.partial(jax.jit, static_argnums=0)
def all_logits(model: Decoder, text: jax.Array) -> jax.Array:
    """The target's logits [T, V] after each token of one text [1, T], by one forward pass."""
    cache = model.new_cache(batch=1, pages_per_sequence=1, num_pages=1, page_size=text.shape[1])
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    return model.unembed(model(text, jnp.arange(text.shape[1])[None], cache).hidden)[0]


def logits_before(
    model: Decoder, prompt: Sequence[int], output_ids: Sequence[int], length: int = 64
) -> np.ndarray:
    """The target's logits [n, V] before each output id, by a pass over `length` tokens."""
    text = np.zeros((1, length), np.int32)
    text[0, : len(prompt) + len(output_ids)] = (*prompt, *output_ids)
    begin = len(prompt) - 1
    return np.asarray(all_logits(model, text))[begin : begin + len(output_ids)]


def check_plain(
    run: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int], **options
) -> list[RequestOutput]:
    """Asserts that an engine's outputs are those of plain decoding, and returns them."""
    done = decode(run, prompts, limits, **options)
    assert outcomes(done) == expected(prompts, limits, **options)
    return done


def check_plain_outputs(
    run: Engine, prompts: Sequence[Sequence[int]], limits: Sequence[int], stop_ids: Sequence[int]
) -> None:
    """Asserts that an engine's outputs are those of plain decoding, greedy and drawn."""
    for temperature in (0.0, 0.8):
        check_plain(run, prompts, limits, temperature=temperature, seed=4, stop_ids=stop_ids)


def expected(
    prompts: Sequence[Sequence[int]],
    limits: Sequence[int],
    *,
    first_index: int = 0,
    stop_ids: Sequence[int] = (),
    **sampling,
) -> list[tuple[tuple[int, ...], str]]:
    """Output ids and finish reasons as plain decoding has them, cut at limits and stop tokens."""
    results = []
    whole = _plain_outputs(tuple(prompts), 32, first_index, **sampling)
    for ids, limit in zip(whole, limits, strict=True):
        ids = ids[:limit]
        stops = [i for i, token in enumerate(ids) if token in stop_ids]
        ids = ids[: stops[0] + 1] if stops else ids
        results.append((ids, "stop" if stops else "length"))
    return results


@functools.cache
def plain_engine() -> Engine:
    """Returns the engine without a drafter that tells what others must decode."""
    run = engine(batch_size=8, sync_every=8, max_length=128)
    run.program("generate")  # As in `shared_engine`.
    return run


@functools.cache
def _plain_outputs(prompts, num_tokens, first_index, **sampling):
    done = decode(plain_engine(), prompts, num_tokens, first_index=first_index, **sampling)
    return [one.output_ids for one in done]
