"""The study of recorded answers: one row per strategy, on the same file."""

import pytest
from support import write_lines
from support.models import BYTE_TARGET

from dflash import errors
from dflash.config import loader
from dflash.config.benchmark_schema import BenchmarkRun
from dflash.measure.studies import STUDIES

SIZES = "{block_size: 4, num_hidden_layers: 1, num_attention_heads: 4, head_dim: 16}"
DRAFTER = f"{{name: dflash, checkpoint: random, architecture: {SIZES}}}"


def run(answers, *overrides):
    options = f"target={BYTE_TARGET}", "study.name=answers", "dtype=float32"
    file = [] if answers is None else [f"study.answers={answers}"]
    config = loader.load(None, [*options, *file, *overrides], BenchmarkRun)
    return list(STUDIES["answers"](config))


@pytest.fixture
def answers(tmp_path):
    return lambda *lines: write_lines(tmp_path / "a.jsonl", lines)


def test_each_strategy_is_scored_on_the_same_answers(answers):
    lines = [{"prompt_ids": [1, 2, n], "output_ids": [7, 8, n, 9] * 3} for n in range(3)]
    steps = run(answers(*lines), f"strategies={{one: {DRAFTER}, two: {DRAFTER}}}")
    assert [step.what for step in steps if step.result] == ["one, done", "two, done"]
    result = steps[-1].result
    assert result.title.endswith("on 3 recorded answers")
    one, two = result.rows
    assert (one["strategy"], two["strategy"]) == ("one", "two")
    assert 1 <= one["tau"] == two["tau"] <= 4


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt_ids": [1]}, "a.jsonl:1: output_ids: expected a list, not null"),
        ({"prompt_ids": [], "output_ids": [1]}, "a.jsonl:1: empty prompt: no prompt_ids"),
        ({"prompt_ids": [1], "output_ids": [300]}, "answer 0: token 300 is outside the vocabulary"),
    ],
)
def test_unusable_answers(answers, line, message):
    with pytest.raises(errors.InputError, match=message):
        run(answers(line), f"strategies.one={DRAFTER}")


def test_what_it_needs(answers):
    with pytest.raises(errors.ConfigError, match=r"study\.answers: required"):
        run(None, f"strategies.one={DRAFTER}")
    with pytest.raises(errors.InputError, match="no answers"):
        run(answers(), f"strategies.one={DRAFTER}")
    with pytest.raises(errors.ConfigError, match=r"strategies: .* needs at least one"):
        run(answers({"prompt_ids": [1], "output_ids": [2]}))
