"""Tests of the programs of a run and of their lower bounds."""

import pytest
from support.models import make_target

from dflash.compiler import programs
from dflash.compiler.components import ATTENTION, DRAFTER, MLP, REST, UNEMBED
from dflash.compiler.report import RunAssumptions
from dflash.config.schema import DecodeConfig


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_reads_its_weights_and_the_context_of_all_sequences(tied):
    """Checks a float32 target of 3 layers with D 32, F 48, V 48, N/K/H 4/2/16."""
    target = make_target(tie_word_embeddings=tied)
    cache = target.new_cache(batch=2, pages_per_sequence=4, num_pages=9, page_size=8)
    found = programs.target_ideals(target, 4, 10, cache)
    projections, norms = 32 * (2 * 4 + 2 * 2) * 16, 32 + 2 * 16
    context = 10 * 2 * 2 * 2 * 16  # rows × sequences × keys and values × kv heads × H
    assert found[ATTENTION] == pytest.approx(4 * 3 * (projections + norms + context))
    assert found[MLP] == 4 * 3 * (3 * 32 * 48 + 32)
    assert found[UNEMBED] == 4 * 48 * 32  # the head, once, tied or not
    assert found[REST] == 4 * 32


def test_a_drafter_reads_its_weights_and_the_context_in_use():
    target = make_target()
    cache = target.new_cache(batch=2, pages_per_sequence=4, num_pages=9, page_size=8)
    arguments = {"drafter weights": 1000, "draft KV": 640}
    found = programs.cycle_ideals(target, arguments, 4, 8, cache, capacity=32)
    assert found[DRAFTER] == 1000 + 640 / 4
    assert found[MLP] == programs.target_ideals(target, 4, 8, cache)[MLP]


@pytest.mark.parametrize(
    ("changes", "assumptions"),
    [
        ({}, RunAssumptions(7)),
        ({"temperature": 0.5}, RunAssumptions(7, sampled=True)),
        ({"temperature": 0.5, "top_k": 3}, RunAssumptions(7, sampled=True, filtered=True)),
        ({"temperature": 0.5, "top_p": 0.9}, RunAssumptions(7, sampled=True, filtered=True)),
        ({"temperature": 0.5, "min_p": 0.1}, RunAssumptions(7, sampled=True, filtered=True)),
        ({"presence_penalty": 0.5}, RunAssumptions(7, shaped=True)),
        ({"repetition_penalty": 1.5}, RunAssumptions(7, shaped=True)),
    ],
)
def test_assumptions_follow_from_the_config(changes, assumptions):
    assert RunAssumptions.of(7, DecodeConfig(**changes)) == assumptions
