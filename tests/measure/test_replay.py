"""Accepted and rejected drafts are told apart, in chains and in trees."""

import pytest

from dflash.measure import report


@pytest.mark.parametrize(
    ("drafted", "parents", "committed", "num_accepted", "rejected"),
    [
        ([5, 6, 7], None, [5, 6, 9], 2, [7]),
        ([5, 6, 7], None, [9], 0, [5, 6, 7]),
        ([5, 6, 7], None, [5, 6, 7, 8], 3, []),
        ([5, 6, 7], None, [5, 6], 2, [7]),  # cut by a limit: no token of the target's own
        ([], None, [4], 0, []),
        # Rows: anchor 0; drafts 5 and 6 continue it, 7 continues 5, 8 continues 6.
        ([5, 6, 7, 8], [0, 0, 1, 2], [6, 8, 3], 2, [5, 7]),
        ([5, 6, 7, 8], [0, 0, 1, 2], [5, 8], 1, [6, 7, 8]),
    ],
)
def test_split(drafted, parents, committed, num_accepted, rejected):
    assert report.split(drafted, parents, committed) == (num_accepted, rejected)
