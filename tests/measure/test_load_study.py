"""The load study: strategies that choose their rows beside the best fixed choice."""

from dflash.measure.roofline import Machine
from dflash.measure.studies import load

MACHINE = Machine("a machine", 1e12, 1e10, "given")


def row(name, batch, task, speed):
    figures = {"tau": 2.0, "tokens_per_second": speed, "speedup": 1.5, "doubts": None}
    return {"drafter": name, "batch": batch, "task": task, **figures}


def test_chosen_rows_are_compared_with_the_best_fixed_choice_of_the_same_cell():
    rows = [
        row("autoregressive", 1, "math", 10.0),
        row("b8", 1, "math", 40.0),
        row("auto", 1, "math", 50.0),
        row("autoregressive", 8, "math", 100.0),
        row("b8", 8, "math", 80.0),
        row("auto", 8, "math", 90.0),
        row("b8", 8, "chat", 1.0),
        row("auto", 8, "chat", None),
    ]
    result = load._result({"auto"}, MACHINE, rows)
    ratios = {
        (one["batch"], one["task"], one["drafter"]): one["over_fixed"]
        for one in result.rows
        if one["over_fixed"] is not None
    }
    assert ratios == {(1, "math", "auto"): 1.25, (8, "math", "auto"): 0.9}
    assert [line.name for line in result.lines] == ["autoregressive", "b8", "auto"]
    assert list(result.lines[1].places) == [1, 8]  # of the first task, since there is no mix
