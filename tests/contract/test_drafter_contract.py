"""The contract of engines with each registered drafter: a new entry is tested from here on.

Strategies meet theirs in test_strategy_contract.py. What a drafter drafts may be good or bad; what
comes out must be what plain decoding gives.
"""

import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import grammars
from support.engines import (
    all_logits,
    check_plain,
    completions,
    decode,
    engine,
    expected,
    make_requests,
    outcomes,
    random_prompts,
    shared_engine,
    watch_dispatches,
    without_prefix_cache,
)
from support.forms import FORMS, KINDS, Form, each_form, each_kind
from support.models import ARCHITECTURE, drafter, make_sampling, takes, target

from dflash.inference.engine import Engine
from dflash.inference.logits.sampling import SequenceSampler
from dflash.inference.request import Request, RequestOutput
from dflash.inference.scheduler import Scheduler
from dflash.text.token_rules import TokenRules

SHORT = (1, 15, 16, 17, 9, 3, 12)
LONG = (31, 1, 32, 33, 16, 17, 50)  # past every bucket edge, and of several chunks
ONE_BUCKET = (16, 9, 31, 12, 13, 32, 11)  # ragged, and a single prefill program to compile
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
    Case(5, 5, 1, SHORT, stop_ids=(2, 9)),
    Case(8, 1, 1, SHORT, stop_ids=(3,)),
    Case(16, 5, 8, SHORT),
]


# Every case is one more program to compile. The loop is the same for all, so one drafter meets all
# of them, every form a ragged batch, which all further tests use too, and each way to draft a
# single slot.
THOROUGH = Form("dflash")
RAGGED = Case(4, 5, 2, ONE_BUCKET)  # that of `shared_engine`
ALONE = Case(8, 1, 8, ONE_BUCKET, stop_ids=(3,))


def cases() -> list:
    """The cases of each form; for drafters without a block size what differs without it."""
    found = []
    for form in FORMS:
        alone = [ALONE] if form in KINDS else []
        mine = [RAGGED, *(CASES if form == THOROUGH else alone)]
        mine = dict.fromkeys(fitting(form, case) for case in mine)
        found += [pytest.param(form, case, id=f"{form}-{case}") for case in mine]
    return found


def fitting(form: Form, case: Case) -> Case:
    """The case without what the form's drafter does not take."""
    if takes(form.name, "block_size"):
        return case
    return dataclasses.replace(case, block_size=None)


def case_engine(form: Form, case: Case) -> Engine:
    if case == fitting(form, RAGGED):
        return ragged_engine(form)
    return engine(
        drafter(form.name, block_size=case.block_size, tree=form.tree),
        batch_size=case.batch_size,
        sync_every=case.sync_every,
        max_length=max(case.lengths) + 32,
    )


def ragged_engine(form: Form, verify: str = "coupled") -> Engine:
    return shared_engine(form.name, tree=form.tree, verify=verify)


@pytest.mark.parametrize(("form", "case"), cases())
def test_output_is_that_of_plain_decoding(form, case):
    run = case_engine(form, case)
    prompts = random_prompts(case.lengths)
    reasons = set()
    for temperature, seed in [(0.0, 0), (0.8, 0), (0.8, 1), (0.8, 2**32 - 1)]:
        how = {"temperature": temperature, "seed": seed, "stop_ids": case.stop_ids}
        done = check_plain(run, prompts, LIMITS, **how)
        check_acceptance_lengths(done, run.drafter.longest_path)
        reasons |= {one.finish_reason for one in done}
    assert reasons == ({"stop", "length"} if case.stop_ids else {"length"})


def check_acceptance_lengths(done: Sequence[RequestOutput], longest: int) -> None:
    for one in done:
        assert sum(one.acceptance_lengths) == len(one.output_ids) - 1
        assert all(1 <= length <= longest for length in one.acceptance_lengths)


@pytest.mark.parametrize("form", [Form("none"), THOROUGH], ids=str)
def test_sixty_prompts_keep_five_slots_busy(form):
    rng = np.random.default_rng(7)
    prompts = random_prompts(rng.integers(1, 13, 60).tolist())
    limits = rng.integers(1, 21, 60).tolist()
    run, dispatches = watch_dispatches(
        ragged_engine(form),
        lambda report, *_, **__: (int(report.cycles), int((report.num_committed[0] > 0).sum())),
    )
    done = check_plain(run, prompts, limits)
    cycles, busy = zip(*dispatches, strict=True)  # And slots at work in the first cycle of each.

    slot_cycles = sum(len(one.acceptance_lengths) for one in done)
    longest = max(len(one.acceptance_lengths) for one in done)
    ideal = slot_cycles / 5
    # A slot waits for at most the rest of its dispatch (one cycle here), and at the end for others.
    assert ideal <= sum(cycles) <= ideal + 60 / 5 + longest
    drained = len(busy) - busy[::-1].index(5)
    empty = sum(5 - count for count in busy[:drained])
    # The device alone knows that a sequence has ended with its first token, for one dispatch.
    at_once = sum(len(one.output_ids) == 1 for one in done)
    assert empty <= at_once, "a slot stayed empty while others were waiting"
    assert len(busy) - drained <= longest


@each_kind
def test_a_sequence_that_gives_way_says_what_it_would_have_said(form):
    """Too few pages for all slots: sequences are interrupted and prefilled again."""
    # What they have said counts again when they come back.
    how = {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.4, "repetition_penalty": 1.2}
    prompts, limits = random_prompts([31, 30, 29, 28, 27, 5]), [32, 32, 31, 32, 32, 20]
    done = check_plain(without_prefix_cache(ragged_engine(form)), prompts, limits, **how)
    assert sum(one.preemptions for one in done) > 0, "nothing was interrupted"


def finish(scheduler: Scheduler, request: Request) -> tuple[RequestOutput, dict]:
    """Decodes one request; and what is drafted for it in slot 0, by its length."""
    scheduler.submit(request)
    drafts, events = {}, []
    form = scheduler.form
    while not scheduler.idle:
        events += scheduler.step()
        state = scheduler._batch.state
        if state.active[0]:
            proposal, _ = propose(form)(state.drafter, state.anchor, state.length - 1)
            drafts[int(state.length[0])] = np.asarray(proposal.tokens[0]).tolist()
    (done,) = completions(events)
    return done, drafts


@each_form
def test_a_cached_prefix_changes_no_token_no_draft_and_no_acceptance(form):
    """The same prompt again, the next turn of its chat, and another prompt that begins alike."""
    run = ragged_engine(form)
    cached, alone = Scheduler(run), Scheduler(without_prefix_cache(run))
    cached.form = alone.form = form
    (text,) = random_prompts([32])
    how = {"temperature": 0.8, "seed": 2}
    (first,) = make_requests([text], 17, **how)
    whole, _ = finish(cached, first)
    assert (whole.cached_tokens, whole.output_ids) == (0, finish(alone, first)[0].output_ids)
    turns = [
        (first, 16),  # a token at least is left to compute
        (
            dataclasses.replace(first, prompt=(*text, *whole.output_ids, 3, 1), max_new_tokens=12),
            48,
        ),
        (dataclasses.replace(first, prompt=(*text[:17], *text[5:17])), 16),
    ]
    # It differs right after a page, whose rows may depend on that token.
    other = (*text[:16], (text[16] + 7) % ARCHITECTURE.vocab_size, *text[9:13])
    turns.append((dataclasses.replace(first, prompt=other), 0 if run.drafter.rows_ahead else 16))
    if run.drafter.prefix_cache_mode == "never":
        turns = [(request, 0) for request, _ in turns]
    for request, hit in turns:
        mine, drafts = finish(cached, request)
        wanted, plain_drafts = finish(alone, request)
        assert (mine.cached_tokens, wanted.cached_tokens) == (hit, 0)
        assert mine.output_ids == wanted.output_ids
        assert mine.acceptance_lengths == wanted.acceptance_lengths
        assert drafts == plain_drafts
    stats = cached.stats()
    assert (stats.pages_used, stats.waiting, stats.running) == (0, 0, 0)
    assert stats.prefix_hits_tokens == sum(hit for _, hit in turns)
    cached.flush_prefix_cache()
    assert finish(cached, first)[0].cached_tokens == 0


@each_kind
def test_greedy_rejection_is_plain_greedy_decoding(form):
    prompts = random_prompts(ONE_BUCKET)
    if not weighs_drafts(form.build()):
        with pytest.raises(ValueError, match="a proposal without probabilities"):
            ragged_engine(form, "rejection")
        return
    run = ragged_engine(form, "rejection")
    check_acceptance_lengths(check_plain(run, prompts, LIMITS), run.drafter.longest_path)


def weighs_drafts(model) -> bool:
    """Whether rejection verification can serve a drafter."""
    return model.has_probs or model.num_draft_tokens == 0


@each_kind
def test_top_k_and_top_p_apply_alike(form):
    prompts = random_prompts(ONE_BUCKET)
    how = {"temperature": 1.5, "top_k": 6, "top_p": 0.8}
    done = check_plain(ragged_engine(form), prompts, LIMITS, **how)
    unfiltered = expected(prompts, LIMITS, temperature=1.5)
    assert outcomes(done) != unfiltered, "the filters took nothing away"


# What a request may ask for; neighbors in the batch ask for different things.
CONTROLS = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.6, "temperature": 0.8},
    {"repetition_penalty": 1.6},
    {"logit_bias": ((3, 2.0), (0, -100.0)), "temperature": 0.8},
    {"min_new_tokens": 5, "stop_ids": (0, 1, 2, 3)},
    {"temperature": 1.2, "min_p": 0.3, "repetition_penalty": 0.8, "frequency_penalty": -0.1},
    {"presence_penalty": -0.5, "logit_bias": ((5, 1.0),), "min_new_tokens": 3, "stop_ids": (5,)},
]


def controlled(run: Engine, prompts, *, greedy: bool = False) -> list[tuple]:
    """Output ids and reasons of prompts under the controls, one after the other."""
    each = [
        how
        | ({"temperature": 0.0} if greedy else {})
        | {"min_new_tokens": min(how.get("min_new_tokens", 0), limit)}
        for how, limit in zip(CONTROLS, LIMITS, strict=True)
    ]
    return outcomes(decode(run, prompts, LIMITS, each=each))


@functools.cache
def plain_controlled(prompts, *, greedy: bool = False) -> list[tuple]:
    return controlled(ragged_engine(Form("none")), prompts, greedy=greedy)


@each_kind
def test_controls_apply_alike(form):
    """Penalties, biases and least lengths count drafts as said in the rows after them."""
    prompts = tuple(random_prompts(ONE_BUCKET))
    assert controlled(ragged_engine(form), prompts) == plain_controlled(prompts)
    assert plain_controlled(prompts, greedy=True) != expected(prompts, LIMITS, temperature=0.0)
    for (ids, reason), how, limit in zip(plain_controlled(prompts), CONTROLS, LIMITS, strict=True):
        assert len(ids) >= min(how.get("min_new_tokens", 0), limit)
        assert reason == "length" or ids[-1] in how["stop_ids"]


@each_kind
def test_controls_apply_alike_in_rejection(form):
    if weighs_drafts(form.build()):
        prompts, run = tuple(random_prompts(ONE_BUCKET)), ragged_engine(form, "rejection")
        assert controlled(run, prompts, greedy=True) == plain_controlled(prompts, greedy=True)


def constrained(run: Engine, *, greedy: bool = False) -> list[tuple]:
    """Output ids and reasons of prompts, of which some have grammars."""
    schema = grammars.flat_object(
        a={"type": "array", "items": {"type": "integer"}}, b={"type": "boolean"}
    )
    asked = [
        grammars.json_schema(schema),
        None,
        grammars.regex("(a|b){3,12}"),
        grammars.regex("1(2|0)*|null"),
        None,
        grammars.json_schema(schema),
        grammars.regex("(12|tru)+e"),
    ]
    limits = [32, 20, 32, 9, 6, 32, 4]
    prompts = random_prompts(ONE_BUCKET)
    how = {"temperature": 0.0 if greedy else 1.5, "stop_ids": (grammars.END,), "seed": 5}
    each = [{"grammar": grammar, "min_new_tokens": 2 if grammar else 0} for grammar in asked]
    return outcomes(decode(run, prompts, limits, each=each, **how))


@functools.cache
def plain_constrained(*, greedy: bool = False) -> list[tuple]:
    return constrained(ragged_engine(Form("none")), greedy=greedy)


@each_kind
def test_grammars_apply_alike(form):
    """Beside sequences without one, whose outputs stay what they are."""
    run = ragged_engine(form)
    for greedy in (True, False):
        assert constrained(run, greedy=greedy) == plain_constrained(greedy=greedy)
    for ids, reason in (found := plain_constrained()):
        assert reason == ("stop" if ids[-1] == grammars.END else "length")
    assert re.fullmatch("[ab]{3,12}", grammars.text_of(found[2][0]))
    if found[0][1] == "stop":
        assert json.loads(grammars.text_of(found[0][0])).keys() == {"a", "b"}


@each_kind
def test_grammars_apply_alike_in_rejection(form):
    """Masks are given to a program of its own."""
    if weighs_drafts(form.build()):
        run = ragged_engine(form, "rejection")
        assert constrained(run, greedy=True) == plain_constrained(greedy=True)
        assert ruled(run, greedy=True) == plain_ruled(greedy=True)


def ruled(run, *, greedy: bool) -> list[tuple]:
    """Output ids and reasons of prompts, of which some have rules, and one a grammar, too."""
    allowed = (*range(12), grammars.END)
    rules = [
        TokenRules(allowed[:6]), None, TokenRules(bad=((0,), (3, 1), (2, 2, 4))),
        TokenRules(allowed, ((1,), (5, 5))),
        TokenRules(allowed[:4], tuple((token,) for token in allowed[:4])), None,
        TokenRules(bad=((0,),)),
    ]  # fmt: skip
    prompts = random_prompts(ONE_BUCKET)
    how = {"temperature": 0.0 if greedy else 1.5, "stop_ids": (grammars.END,), "seed": 5}
    each = [{"token_rules": rule, "min_new_tokens": 2} if rule else {} for rule in rules]
    each[-1]["grammar"] = grammars.regex("(a|b){3,12}")
    return outcomes(decode(run, prompts, [32, 20, 32, 32, 6, 6, 12], each=each, **how))


@functools.cache
def plain_ruled(*, greedy: bool) -> list[tuple]:
    return ruled(ragged_engine(Form("none")), greedy=greedy)


@each_kind
def test_rules_of_tokens_apply_alike(form):
    """Beside sequences without them; where no token is left, the output is an error."""
    run = ragged_engine(form)
    for greedy in (True, False):
        outputs = plain_ruled(greedy=greedy)
        assert ruled(run, greedy=greedy) == outputs
        ids = [output for output, _ in outputs]
        assert {*ids[0]} <= {*range(6)}
        assert 0 not in ids[2]
        assert (3, 1) not in itertools.pairwise(ids[2])
        assert (2, 2, 4) not in [ids[2][at : at + 3] for at in range(len(ids[2]))]
        assert {*ids[3]} <= {0, *range(2, 12), grammars.END}
        assert (5, 5) not in itertools.pairwise(ids[3])
        assert outputs[4] == ((grammars.END,), "error")
        assert re.fullmatch("b{3,12}", grammars.text_of(ids[6]))


@functools.cache
def propose(form: Form):
    """The proposal of a drafter for a state, jitted."""
    model, heads = ragged_engine(form).drafter, target()

    def draft(state, anchor, position):
        temperatures = [0.8 * (i % 2 == 0) for i in range(anchor.shape[0])]
        sampler = SequenceSampler(make_sampling(temperatures, seed=3))
        return model.draft(state, anchor, position, sampler, heads)

    return jax.jit(draft)


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
    logits = all_logits(model, text)
    sequence = jax.random.fold_in(jax.random.key(seed), index)
    following = jnp.arange(text.shape[1]) + 1
    keys = jax.vmap(lambda position: jax.random.fold_in(sequence, position))(following)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
    scale = jnp.where(temperature > 0, temperature, 1.0)
    return jnp.argmax(logits / scale + jnp.where(temperature > 0, noise, 0.0), axis=-1)
