"""The page holds its data whatever the text, and nothing from elsewhere."""

import json
import re

from dflash.measure import report
from dflash.measure.report import Frame, Replay

NASTY = '</script><script>alert("x")</script><!-- \u2028 "\\'


def test_text_of_a_model_cannot_leave_its_place():
    frames = (Frame(tokens=2, accepted=(NASTY,), bonus=NASTY, rejected=(NASTY,)),)
    timed = report.TimedReplay(Replay(NASTY, frames), ttft_ms=1.0, cycle_ms=2.0)
    text = report.render_page(
        {"cells": []},
        notes=[NASTY],
        plots={"light": {"a": b"png"}},
        replays={"t": (NASTY, {"s": timed})},
    )
    assert text.count("<script") == 2
    found = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert found["notes"] == [NASTY]
    lane = found["replays"]["t"]["strategies"]["s"]
    assert lane["frames"][0]["accepted"] == [NASTY]
    assert (lane["ttft_ms"], lane["cycle_ms"]) == (1.0, 2.0)


def test_the_page_asks_for_nothing_else():
    text = report.render_page({}, notes=[], plots={}, replays={})
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(""", text)
