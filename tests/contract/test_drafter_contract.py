"""The contract of drafters, over all that are registered: a new entry is tested from here on.

What a drafter drafts may be good or bad; what comes out must be what plain decoding gives.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import (
    ARCHITECTURE,
    decode,
    drafter,
    engine,
    expected,
    random_prompts,
    resampled,
    takes_block_size,
    target,
)

from dflash import registry
from dflash.inference.engine import Engine, Slot
from dflash.inference.pages import PagePool
from dflash.inference.sampling import SamplingParams, SequenceSampler
from dflash.inference.scheduler import Completion

NAMES = sorted(registry.DRAFTERS)
PREFILL_CHUNK = 16
SHORT = (1, 15, 16, 17, 9, 3, 12)
LONG = (31, 1, 32, 33, 16, 17, 50)  # past every bucket edge, and of several chunks
LIMITS = [20, 1, 32, 7, 2, 13, 25]


@dataclasses.dataclass(frozen=True)
class Case:
    """How to decode."""

    block_size: int | None
    batch_size: int
    sync_every: int
    lengths: tuple[int, ...]
    stop_ids: tuple[int, ...] = ()

    def __str__(self):
        block = f"block{self.block_size}-" if self.block_size else ""
        stops = "-stops" if self.stop_ids else ""
        return f"{block}batch{self.batch_size}-sync{self.sync_every}-to{max(self.lengths)}{stops}"


CASES = [
    Case(2, 5, 8, LONG),
    Case(3, 1, 1, SHORT),
    Case(5, 5, 1, SHORT, stop_ids=(2, 9)),
    Case(8, 1, 8, SHORT, stop_ids=(3,)),
    Case(11, 5, 1, SHORT),
    Case(16, 5, 8, SHORT),
]


def cases() -> list:
    """Every case for drafters of any block size; for others what differs without it."""
    found = []
    for name in NAMES:
        mine = CASES
        if not takes_block_size(name):
            mine = list(dict.fromkeys(dataclasses.replace(case, block_size=None) for case in CASES))
        found += [pytest.param(name, case, id=f"{name}-{case}") for case in mine]
    return found


@pytest.mark.parametrize(("name", "case"), cases())
def test_output_is_that_of_plain_decoding(name, case):
    run = engine(
        drafter(name, block_size=case.block_size),
        batch_size=case.batch_size,
        sync_every=case.sync_every,
        prefill_chunk=PREFILL_CHUNK,
        max_length=max(case.lengths) + 32,
        stop_ids=case.stop_ids,
    )
    prompts = random_prompts(case.lengths)
    reasons = set()
    for temperature, seed in [(0.0, 0), (0.8, 0), (0.8, 1), (0.8, 2**32 - 1)]:
        how = {"temperature": temperature, "seed": seed}
        done = decode(resampled(run, **how), prompts, LIMITS)
        wanted = expected(prompts, LIMITS, stop_ids=case.stop_ids, **how)
        assert [(one.output_ids, one.finish_reason) for one in done] == wanted
        check_acceptance_lengths(done, run.layout.block_size)
        reasons |= {one.finish_reason for one in done}
    assert reasons == ({"stop", "length"} if case.stop_ids else {"length"})


def check_acceptance_lengths(done: Sequence[Completion], block_size: int) -> None:
    for one in done:
        assert sum(one.acceptance_lengths) == len(one.output_ids) - 1
        assert all(1 <= length <= block_size for length in one.acceptance_lengths)


@functools.cache
def default_engine(name: str, batch_size: int, verify: str = "coupled") -> Engine:
    block_size = 4 if takes_block_size(name) else None
    model = drafter(name, block_size=block_size)
    return engine(model, batch_size=batch_size, sync_every=2, max_length=64, verify=verify)


class Watch:
    """An engine that counts what its dispatches did."""

    def __init__(self, run: Engine):
        self._run = run
        self.cycles = 0
        self.busy: list[int] = []  # slots at work in the first cycle of each dispatch

    def __getattr__(self, name):
        return getattr(self._run, name)

    def generate(self, state):
        state, report = self._run.generate(state)
        self.cycles += int(report.cycles)
        self.busy.append(int((report.num_committed[0] > 0).sum()))
        return state, report


@pytest.mark.parametrize("name", NAMES)
def test_a_hundred_prompts_keep_eight_slots_busy(name):
    rng = np.random.default_rng(7)
    prompts = random_prompts(rng.integers(1, 17, 100).tolist())
    limits = rng.integers(1, 25, 100).tolist()
    watch = Watch(default_engine(name, 8))
    done = decode(watch, prompts, limits)
    wanted = expected(prompts, limits, temperature=0.0)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted

    slot_cycles = sum(len(one.acceptance_lengths) for one in done)
    longest = max(len(one.acceptance_lengths) for one in done)
    ideal = slot_cycles / 8
    # A slot waits for at most the rest of its dispatch (one cycle here), and at the end for others.
    assert ideal <= watch.cycles <= ideal + 100 / 8 + longest
    full = [count == 8 for count in watch.busy]
    drained = full.index(False)
    assert not any(full[drained:]), "a slot stayed empty while others were waiting"
    assert len(watch.busy) - drained <= longest


@pytest.mark.parametrize("name", NAMES)
def test_greedy_rejection_is_plain_greedy_decoding(name):
    prompts = random_prompts(SHORT)
    done = decode(default_engine(name, 5, "rejection"), prompts, LIMITS)
    wanted = expected(prompts, LIMITS, temperature=0.0)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    check_acceptance_lengths(done, default_engine(name, 5, "rejection").layout.block_size)


@pytest.mark.parametrize("name", NAMES)
def test_top_k_and_top_p_apply_alike(name):
    prompts = random_prompts(SHORT)
    how = {"temperature": 1.5, "top_k": 6, "top_p": 0.8}
    done = decode(resampled(default_engine(name, 5), **how), prompts, LIMITS)
    wanted = expected(prompts, LIMITS, **how)
    assert [(one.output_ids, one.finish_reason) for one in done] == wanted
    assert wanted != expected(prompts, LIMITS, temperature=1.5), "the filters took nothing away"


def make_sampler(batch: int, *, with_probs: bool = False) -> SequenceSampler:
    keys = jax.random.split(jax.random.key(3, impl="threefry2x32"), batch)
    temperature = jnp.where(jnp.arange(batch) % 2 == 0, 0.8, 0.0)
    params = SamplingParams(
        jax.random.key_data(keys),
        temperature,
        jnp.zeros(batch, jnp.int32),
        jnp.ones(batch, jnp.float32),
    )
    return SequenceSampler(params, with_probs)


@functools.cache
def propose(name: str, with_probs: bool = False):
    """The proposal of drafter `name` for a state, jitted."""
    model, heads = default_engine(name, 5)._abstract_drafter, target()

    def draft(state, anchor, position):
        sampler = make_sampler(anchor.shape[0], with_probs=with_probs)
        return model.draft(state, anchor, position, sampler, heads)

    return jax.jit(draft)


@pytest.mark.parametrize("name", NAMES)
def test_live_state_drafts_as_a_freshly_prefilled_one(name):
    """State commits in `observe` alone, and holds the committed tokens and nothing else."""
    run = default_engine(name, 5)
    prompts = random_prompts([1, 16, 9, 17, 5])
    limits = [20, 15, 25, 12, 20]
    whole = expected(prompts, limits, temperature=0.0)
    texts = [(*prompt, *ids) for prompt, (ids, _) in zip(prompts, whole, strict=True)]

    def start(sequences, ends):
        pool, state = PagePool(1, run.layout.pages_per_share), run.new_state()
        for i, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            slot = Slot(i, pool.take(0, run.layout.pages_for(end)))
            state = run.insert(state, run.prefill(sequence, i), slot, end)
        return state

    ends = [len(text) for text in texts]
    live = start(prompts, ends)
    for _ in range(3):
        live, _ = run.generate(live)
    lengths = np.asarray(live.length).tolist()
    assert all(len(prompt) + 3 < n for prompt, n in zip(prompts, lengths, strict=True))
    fresh = start([text[: n - 1] for text, n in zip(texts, lengths, strict=True)], ends)
    np.testing.assert_array_equal(live.anchor, fresh.anchor)
    position = live.length - 1
    mine, after = propose(name)(live.drafter, live.anchor, position)
    wanted, _ = propose(name)(fresh.drafter, fresh.anchor, position)
    jax.tree.map(np.testing.assert_array_equal, mine, wanted)
    again, _ = propose(name)(after, live.anchor, position)
    jax.tree.map(np.testing.assert_array_equal, mine, again)


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_proposals_are_well_formed(name, with_probs):
    model = default_engine(name, 5)._abstract_drafter
    abstract = model.init_state(5, 64)
    assert all(leaf.sharding is not None for leaf in jax.tree.leaves(abstract))
    state = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    anchor = jnp.arange(5, dtype=jnp.int32)
    proposal, after = propose(name, with_probs)(state, anchor, jnp.zeros(5, jnp.int32))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), (state, after))
    assert shapes[0] == shapes[1]
    tokens = np.asarray(proposal.tokens)
    assert tokens.shape == (5, model.num_draft_tokens)
    assert tokens.dtype == np.int32
    assert ((tokens >= 0) & (tokens < ARCHITECTURE.vocab_size)).all()
    assert all(0 <= i < ARCHITECTURE.num_hidden_layers for i in model.feature_layers)
    if proposal.parents is not None:
        parents = np.asarray(proposal.parents)
        assert ((parents >= 0) & (parents <= np.arange(tokens.shape[1]))).all()
        siblings = {(b, parents[b, g], tokens[b, g]) for b, g in np.ndindex(tokens.shape)}
        assert len(siblings) == tokens.size, "siblings share a token"
    if proposal.probs is not None:
        assert with_probs, "probabilities that nobody asked for"
        assert proposal.parents is None, "rejection takes chains"
        probs = np.asarray(proposal.probs)
        np.testing.assert_allclose(probs.sum(axis=-1), 1.0, atol=1e-5)
        assert (np.take_along_axis(probs, tokens[..., None], axis=-1) > 0).all()


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_plain_decoding_is_what_one_forward_says(temperature):
    """The baseline itself, against all logits of the whole text at once, drawn in one go."""
    prompts, seed = random_prompts([1, 17, 40]), 1
    outputs = expected(prompts, [32] * 3, temperature=temperature, seed=seed)
    model = target()
    for index, (prompt, (ids, _)) in enumerate(zip(prompts, outputs, strict=True)):
        text = np.array([[*prompt, *ids]], np.int32)
        text = np.pad(text, ((0, 0), (0, 80 - text.shape[1])))
        sampled = draw_all(model, text, temperature, seed, index)
        begin = len(prompt) - 1
        assert sampled[begin : begin + len(ids)].tolist() == list(ids)


@functools.partial(jax.jit, static_argnums=0)
def draw_all(model, text, temperature, seed, index):
    """The token that the target draws after each token of one text, int32 [T]."""
    cache = model.new_cache(batch=1, pages_per_sequence=1, num_pages=1, page_size=text.shape[1])
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), cache)
    positions = jnp.arange(text.shape[1])[None]
    logits = model.unembed(model(text, positions, cache).hidden)[0]
    sequence = jax.random.fold_in(jax.random.key(seed), index)
    keys = jax.vmap(lambda position: jax.random.fold_in(sequence, position))(positions[0] + 1)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    scale = jnp.where(temperature > 0, temperature, 1.0)
    return jnp.argmax(logits / scale + jnp.where(temperature > 0, noise, 0.0), axis=-1)
