"""The page holds its data whatever the text, and nothing from elsewhere."""

import json
import re

import pytest

from dflash.measure import report

NASTY = '</script><script>alert("x")</script><!-- \u2028 "\\'


def test_text_of_a_model_cannot_leave_its_place():
    frame = {"tokens": 2, "accepted": [NASTY], "bonus": NASTY, "rejected": [NASTY]}
    replay = {"first": NASTY, "frames": [frame]}
    text = report.render_page(
        {"cells": []},
        notes=[NASTY],
        pictures={"a": b"png"},
        replays={"t": {"prompt": NASTY, "strategies": {"s": replay}}},
    )
    assert text.count("<script") == 2
    found = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert found["notes"] == [NASTY]
    lane = found["replays"]["t"]["strategies"]["s"]
    assert lane["frames"][0]["accepted"] == [NASTY]


def test_the_page_asks_for_nothing_else():
    text = report.render_page({}, notes=[], pictures={}, replays={})
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", text)


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
