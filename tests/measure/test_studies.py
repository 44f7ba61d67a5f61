"""Studies go step by step: calls in turns, and what is known after each turn."""

import pytest

from dflash.measure.plots import Line
from dflash.measure.studies import result as studies


def test_calls_take_turns_and_the_first_turn_does_not_count():
    made, times = [], iter(range(100))

    def call(name):
        made.append(name)
        return next(times)

    def result(found):
        rows = [
            studies.with_warnings({"name": name, "all": tuple(some)}, ())
            for name, some in found.items()
        ]
        return studies.StudyResult("title", rows, [Line("a", (1,), (1.0,))], "x", "y")

    calls = {name: lambda name=name: call(name) for name in ("a", "b")}
    steps = list(studies.in_turns(calls, 2, lambda name: f"call {name}", result))
    assert made == ["a", "b"] * 3
    said = [(step.what, step.done) for step in steps if step.result is None]
    assert said[0] == ("warming up, call a", 0)
    assert said[-1] == ("turn 2 of 2, call b", pytest.approx(5 / 6))
    assert [done for _, done in said] == sorted(done for _, done in said)
    saved = [step.result for step in steps if step.result is not None]
    assert [[row["all"] for row in one.rows] for one in saved] == [[(2,), (3,)], [(2, 4), (3, 5)]]
    assert steps[-1].done == 1
    half = steps[-1].within(0.5, 0.25)
    assert (half.done, half.result) == (0.75, steps[-1].result)


def test_a_narrow_terminal_gets_the_columns_that_fit():
    row = studies.with_warnings({"name": "a", "tau": 2.5, "a_long_column": 1.0}, ())
    line = Line("a", (1,), (1.0,))
    found = studies.StudyResult("title", [row], [line], "x", "y", narrow=("name", "tau"))
    assert found.text()[2:4] == ["name  tau", "a     2.500"]
    assert "a_long_column" in found.text(wide=True)[2]
