"""Refused drafts, as events tell of them."""

import pytest
from support.engines import make_requests, random_prompts, shared_engine

from dflash.inference.request import RequestOutput, Tokens
from dflash.offline import decoding


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_was_drafted_was_accepted_or_rejected(tree):
    run = shared_engine("dflash", tree=tree)
    drafts = run.drafter.block_size - 1
    each = [{"rejected": True}, {}]
    curious, other = make_requests(random_prompts([5, 9]), 14, each=each, temperature=0.8)
    events = decoding.decode(run, [curious, other])
    told = {one.id: [] for one in (curious, other)}
    sizes = {one.id: [] for one in (curious, other)}
    for event in events:
        if isinstance(event, Tokens) and event.acceptance_lengths:
            told[event.id] += zip(_cycles(event), event.rejected, strict=False)
            sizes[event.id] += event.block_sizes
        elif isinstance(event, RequestOutput):
            assert tuple(sizes[event.id]) == event.block_sizes
    assert told[other.id] == []
    whole = told[curious.id][:-1]  # the last cycle may end within its draft
    assert whole
    for committed, rejected in whole:
        assert len(committed) - 1 + len(rejected) == drafts
        if not tree and rejected:
            assert rejected[0] != committed[-1]


def _cycles(event: Tokens):
    """The tokens of each cycle."""
    ids = iter(event.ids)
    return [[next(ids) for _ in range(length)] for length in event.acceptance_lengths]


def test_an_origin_does_not_depend_on_where_the_output_ends():
    """An output that ends within an accepted draft ends with a draft, at a limit and a stop."""
    run = shared_engine("dflash")
    (prompt,) = random_prompts([6])

    def origins(limit, **how):
        drafted, ids = [], []
        asked = make_requests([prompt], limit, temperature=0.8, **how)
        for event in decoding.decode(run, asked):
            if isinstance(event, Tokens):
                ids += event.ids
                for length, accepted in zip(event.acceptance_lengths, event.accepted, strict=True):
                    assert length - accepted in (0, 1)
                    drafted += [True] * accepted + [False] * (length - accepted)
        return drafted, ids

    whole, ids = origins(40)
    assert any(whole)
    for limit in range(2, 20):  # Within and between accepted drafts.
        assert origins(limit) == (whole[: limit - 1], ids[:limit])
    drafts = [
        i + 1 for i, drafted in enumerate(whole) if drafted and ids[i + 1] not in ids[: i + 1]
    ]
    for end in drafts:
        assert origins(40, stop_ids=(ids[end],)) == (whole[:end], ids[: end + 1])
