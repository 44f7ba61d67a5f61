"""Tests of prefill and decoding on engines of their own: outputs are those of one engine."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np
import pytest
from support import models
from support.engines import decode, engine, expected, make_requests, random_prompts
from support.models import (
    ARCHITECTURE,
    EMPHASIS,
    FAVOURITES,
    drafter,
    family_architecture,
    make_sharding,
    move,
)

from dflash import errors
from dflash.config import registry
from dflash.inference.request import Request, RequestOutput, Tokens
from dflash.inference.roles import handover
from dflash.inference.roles.decoding import DecodeScheduler
from dflash.inference.roles.local import LocalPrefiller
from dflash.inference.scheduler import Scheduler
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

LENGTHS = (16, 9, 31, 12, 33, 3)
LIMITS = (20, 1, 32, 31, 25, 32)
PROMPTS = random_prompts(LENGTHS)
STOP_IDS = (8, 2)
HOW = ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4, "stop_ids": STOP_IDS})
# Three sequences begin, but do not all end, without giving way to each other.
FEW_PAGES = {"batch_size": 3, "sync_every": 2, "max_length": 64, "num_pages": 7}
PREFILL = {"batch_size": 1, "max_length": 64, "prefix_cache": True}


def drain(scheduler: Scheduler, requests: list[Request]) -> list:
    for request in requests:
        scheduler.submit(request)
    events = []
    while not scheduler.idle:
        events += scheduler.step()
    return events


def outputs(events) -> list[tuple[tuple[int, ...], str]]:
    done = sorted((e for e in events if isinstance(e, RequestOutput)), key=lambda one: one.id)
    return [(one.output_ids, one.finish_reason) for one in done]


class Awaited(LocalPrefiller):
    """Prefills whose results all arrive at once, so that no test depends on times."""

    missing = 0

    def order(self, order) -> None:
        self.missing += 1
        super().order(order)

    def results(self, wait_s) -> list:
        found = []
        while self.missing:
            arrived = super().results(60.0)
            self.missing -= len(arrived)
            found += arrived
        return found


@pytest.fixture
def never_prefills(monkeypatch):
    """Returns a function after which an engine cannot prefill."""
    return lambda run: monkeypatch.setattr(run, "prefill", None)


@pytest.mark.parametrize(
    "name", ["ngram", "autoregressive", "dflash", "dflash2", "eagle3", "medusa", "lookahead"]
)
def test_output_is_that_of_one_engine(name, never_prefills):
    """Greedy and drawn, with a prefix cache there, and preemption here."""
    model = drafter(name, block_size=4)
    decoding, preemptions = engine(model, **FEW_PAGES), 0
    never_prefills(decoding)
    with Awaited(engine(model, **PREFILL)) as prefiller:
        for how in HOW:
            scheduler = DecodeScheduler(decoding, prefiller)
            events = drain(scheduler, make_requests(PROMPTS, LIMITS, **how))
            assert outputs(events) == expected(PROMPTS, LIMITS, **how)
            preemptions += scheduler.stats().preemptions
            assert scheduler.stats().pages_used == 0
    assert preemptions > 0


def make_target(family: str, sharding: Sharding) -> Decoder:
    changes = {}
    if family == "gemma3":
        changes = {"sliding_window": 7, "layer_types": ("sliding_attention", "full_attention")}
    arch = family_architecture(family, ARCHITECTURE, **changes)
    kind = registry.load(registry.TARGETS[family].implementation)
    return kind(arch, dtype=np.dtype("float32"), sharding=sharding)


@functools.cache
def initialized(family: str) -> Decoder:
    model = make_target(family, make_sharding())
    parameters.initialize(model, jax.random.key(0))
    kernel = model.lm_head.kernel
    emphasis = np.where(np.arange(ARCHITECTURE.vocab_size) < FAVOURITES, EMPHASIS, 1.0)
    kernel.set_value(kernel.get_value() * emphasis.astype(np.float32))
    return model


def on_other_devices(tensor: int) -> Sharding:
    """A mesh that has no device in common with `make_sharding()`."""
    whole = make_sharding(tensor=tensor)
    devices = np.array(jax.devices()[1 : 1 + tensor]).reshape(whole.mesh.devices.shape)
    mesh = jax.sharding.Mesh(devices, whole.mesh.axis_names, axis_types=whole.mesh.axis_types)
    return Sharding(mesh, whole.rules)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_rows_travel_between_submeshes(family, kv_dtype, never_prefills):
    """Pages, rings and latent rows, from two devices to another one."""
    if family == "deepseek_v3" and kv_dtype:
        pytest.skip("one kind of rows at a time")
    there = on_other_devices(2)
    first = move(initialized(family), make_target(family, there))
    options = {"max_length": 128, "page_size": 8, "sync_every": 2}
    options |= {"kv_dtype": kv_dtype} if kv_dtype else {}
    prompts, limits = random_prompts((70, 9, 33)), (40, 1, 25)
    model = drafter("ngram", block_size=4)
    with mock.patch.object(models, "make_sharding", return_value=there):
        its_model = drafter("ngram", block_size=4)
    # A target with rings there too, since a prefix cache would rule them out.
    prefilling = engine(its_model, on=first, **options)
    decoding = engine(model, on=initialized(family), batch_size=2, **options)
    never_prefills(decoding)
    plain = engine(on=initialized(family), batch_size=2, **options)
    wanted = decode(plain, prompts, limits, temperature=0.8, seed=1)
    with LocalPrefiller(prefilling) as prefiller:
        scheduler = DecodeScheduler(decoding, prefiller)
        events = drain(scheduler, make_requests(prompts, limits, temperature=0.8, seed=1))
    assert outputs(events) == [(one.output_ids, one.finish_reason) for one in wanted]


def test_controls_logprobs_and_cancellation(never_prefills):
    """First tokens follow biases, minimal lengths and log-probabilities of their requests."""
    model = drafter("ngram", block_size=4)
    whole, prefilling, decoding = (
        engine(model, **(FEW_PAGES | options)) for options in ({}, PREFILL, {})
    )
    controls = {"min_new_tokens": 3, "logprobs": 2, "frequency_penalty": 0.5, "seed": 1}
    controls |= {"temperature": 0.8, "logit_bias": ((1, 5.0),)}
    requests = make_requests(PROMPTS, 20, stop_ids=STOP_IDS, **controls)
    wanted = drain(Scheduler(whole), requests)
    never_prefills(decoding)
    with LocalPrefiller(prefilling) as prefiller:
        scheduler = DecodeScheduler(decoding, prefiller)
        (cancelled,) = make_requests(PROMPTS[:1], 20)
        scheduler.submit(dataclasses.replace(cancelled, id=99))
        assert scheduler.cancel(99)
        assert not scheduler.cancel(99)
        events = drain(scheduler, requests)
    assert outputs(events) == outputs(wanted)
    assert logprobs(events) == {
        id: [pytest.approx(one, abs=1e-4) for one in values]
        for id, values in logprobs(wanted).items()
    }


def logprobs(events) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, Tokens):
            found.setdefault(event.id, []).extend(one.sampled_logprob for one in event.logprobs)
    return found


def test_only_the_pages_of_a_prompt_travel():
    """A page has 16 tokens, and a block past the prompt's end belongs to it too."""
    requests = make_requests(random_prompts((9, 31)), 4)
    orders = [handover.PrefillOrder(one.id, one, (), None) for one in requests]
    with Awaited(engine(drafter("ngram", block_size=4), **PREFILL)) as prefiller:
        for order in orders:
            prefiller.order(order)
        found = {one.id: one.rows for one in prefiller.results(0.0)}
    pages = {
        id: {leaf.shape[1] for leaf in jax.tree.leaves(rows.layers)} for id, rows in found.items()
    }
    assert pages == {0: {1}, 1: {3}}


def test_what_does_not_fit_is_an_error_of_its_request():
    model = drafter("ngram", block_size=4)
    small = engine(model, batch_size=1, max_length=32)
    with LocalPrefiller(small) as prefiller:
        scheduler = DecodeScheduler(engine(model, **FEW_PAGES), prefiller)
        events = drain(scheduler, make_requests(PROMPTS[:2], (20, 1)))
    done = {one.id: one for one in events if isinstance(one, RequestOutput)}
    assert done[1].error is None
    assert "cache holds 32" in str(done[0].error)


def test_what_cannot_travel_is_refused():
    with pytest.raises(errors.ConfigError, match=r"mesh has 2; set mesh.data=1"):
        handover.check_target(
            move(initialized("qwen3"), make_target("qwen3", make_sharding(data=2)))
        )
    with pytest.raises(errors.ConfigError, match="Qwen3Next, which keeps recurrent state"):
        handover.check_target(make_target("qwen3_next", make_sharding()))
