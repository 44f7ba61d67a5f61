"""Tests of what the host reads from reports."""

import dataclasses

import numpy as np
import pytest

from dflash.inference.cycle.state import Report
from dflash.inference.in_flight import stays_plain


def report_of(sizes: list[int], next_choice: int, *, slots: int = 2, most: int = 8) -> Report:
    """Report of a dispatch of at most `most` cycles, whose slots verified this many rows each."""
    rows = np.zeros((most, slots), np.int32)
    rows[: len(sizes)] = np.array(sizes, np.int32).reshape(-1, 1)
    names = (field.name for field in dataclasses.fields(Report))
    known = {"cycles": len(sizes), "block_sizes": rows, "next_choice": next_choice}
    return Report(**{name: known.get(name) for name in names})


@pytest.mark.parametrize(
    ("sizes", "next_choice", "stays"),
    [
        ([1] * 8, 0, True),
        ([1], 0, True),
        ([8, 1, 1, 1, 1, 1, 1, 1], 0, True),  # A trial at the beginning.
        ([8, 8, 1, 1], 0, True),
        ([1] * 8, 2, False),  # A trial is due.
        ([1, 1, 1, 8], 0, False),
        ([8], 0, False),
        ([], 0, False),  # The plain program ended at once, since sequences that entered may draft.
    ],
)
def test_the_next_dispatch_is_plain_if_the_later_cycles_and_the_next_one_are(
    sizes, next_choice, stays
):
    assert stays_plain(report_of(sizes, next_choice)) is stays


def test_one_of_several_sequences_that_drafts_is_enough():
    report = report_of([1] * 4, 0)
    report.block_sizes[3, 1] = 2
    assert not stays_plain(report)
