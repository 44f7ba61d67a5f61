"""A data axis prefills as many prompts at once as it has replicas, and keeps its slots busy."""

import numpy as np
import pytest
from support.engines import completions, engine, expected, make_requests, random_prompts
from support.models import drafter

from dflash.offline.decoding import Usage, decode

PROMPTS = random_prompts([9 + i % 7 for i in range(64)], seed=1)
MESH = (8, 1, 1)


@pytest.fixture(scope="module")
def eight():
    return engine(drafter("none", mesh=MESH), mesh=MESH, batch_size=8, sync_every=2)


def run(eight, limits, prompts=PROMPTS):
    """The outputs of 64 prompts in their order, and how they used the device."""
    usage, found = Usage(), []
    slots = eight.layout.batch_size
    events = decode(
        eight,
        make_requests(prompts, limits),
        lambda stats: found.append(stats) or usage.add(stats, slots=slots, tokens=1, seconds=1.0),
    )
    outputs = [one.output_ids for one in completions(events)]
    return outputs, usage.facts(), found[0]


def test_64_prompts_take_eight_rounds(eight):
    limits = [8] * 64
    outputs, facts, _ = run(eight, limits)
    assert facts["prefill"]["dispatches"] <= 9
    assert facts["prefill"]["prompts"] == 64
    assert outputs == [ids for ids, _ in expected(PROMPTS, limits)]


def test_prompts_of_many_lengths_share_rounds(eight):
    """A lane takes its next prompt as soon as it is free; eight slots take the longest of eight.

    The chunks of all prompts would fit into 17 rounds of eight, had each slot room for its next
    prompt at once; with 64 slots they take 18.
    """
    chunk = eight.layout.longest_chunk
    lengths = np.random.default_rng(0).integers(1, 3 * chunk + 1, 64).tolist()
    chunks = [-(-length // chunk) for length in lengths]
    prompts, limits = random_prompts(lengths), [8] * 64
    outputs, facts, _ = run(eight, limits, prompts)
    assert -(-sum(chunks) // 8) == 17
    assert facts["prefill"]["dispatches"] == sum(max(chunks[i : i + 8]) for i in range(0, 64, 8))
    assert outputs == [ids for ids, _ in expected(prompts, limits)]


def test_slots_are_busy_while_the_queue_lasts(eight):
    """Outputs of many lengths: a slot waits for the end of a dispatch at most."""
    limits = np.random.default_rng(0).integers(16, 33, 64).tolist()
    _, facts, stats = run(eight, limits)
    slots = facts["slots"]
    assert slots["busy_share_while_queued"] >= 0.95
    assert slots["busy_share"] <= slots["busy_share_while_queued"]
    assert stats.slot_cycles == sum(limits) - 64  # a token each, but for the first ones
    assert 0 < slots["stood_still_share"] < 1
