"""Evaluations: a mean over everything held out, and what two scores must share to compare."""

import pytest
from support import write_lines

from dflash.config import loader, train_schema
from dflash.training import evaluation, train_job
from dflash.training.evaluation import Evaluation

TARGET = (
    "target.checkpoint=random",
    "target.name=qwen3",
    "target.architecture={vocab_size: 256, hidden_size: 16, intermediate_size: 16, "
    "num_hidden_layers: 1, num_attention_heads: 1, num_key_value_heads: 1, head_dim: 16, "
    "max_position_embeddings: 512}",
)


def make_job(*overrides, dry) -> train_job.TrainJob:
    always = [*TARGET, "train.steps=10", "data.length=256", "evaluation.decode.max_new_tokens=8"]
    config = loader.load(None, [*always, *overrides], train_schema.TrainRun)
    return train_job.prepare(config, dry=dry)


def test_the_held_out_loss_is_a_mean_over_tokens_not_over_batches(tmp_path):
    lines = [{"prompt": f"{n}", "response": "ab" * (1 + n % 13)} for n in range(40)]
    write_lines(tmp_path / "data.jsonl", lines)
    found = []
    for batches, rows in ((1, 4), (2, 2), (4, 1)):
        job = make_job(
            "task=target", f"data.files={tmp_path / 'data.jsonl'}", f"data.data_dir={tmp_path}",
            "data.held_out_percent=30", "data.length=32", f"train.batch_size={rows}",
            f"evaluation.batches={batches}", dry=False,
        )  # fmt: skip
        evaluation = Evaluation(job, (), None)
        assert (evaluation.goal, evaluation.measures_something) == ("loss", True)
        found.append(evaluation(job.task.fresh_params())["loss"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


@pytest.fixture
def fingerprint(tmp_path):
    """The fingerprint of a run's evaluations, by its options and its prompts."""

    def find(*overrides, prompts=("one", "two")) -> str:
        file = write_lines(tmp_path / "prompts.jsonl", [{"prompt": text} for text in prompts])
        options = f"evaluation.prompts_file={file}", "evaluation.batches=0", "data.files=[a.jsonl]"
        heads = "drafter={name: medusa, checkpoint: random, architecture: {block_size: 8}}"
        job = make_job(heads, *options, *overrides, dry=True)
        evaluation = Evaluation(job, (), lambda params: {})
        assert (evaluation.goal, evaluation.measures_something) == ("tau", True)
        return evaluation.fingerprint

    return find


def test_scores_compare_whatever_the_cadence(fingerprint):
    options = "evaluation.every=7", "train.log_every=3", "train.keep_last=9"
    assert fingerprint(*options) == fingerprint()


@pytest.mark.parametrize(
    ("overrides", "prompts"),
    [
        (("evaluation.decode.max_new_tokens=9",), ("one", "two")),
        (("evaluation.decode.temperature=0.5",), ("one", "two")),
        (("evaluation.prompts=1",), ("one", "two")),
        ((), ("one", "three")),
    ],
    ids=["limit", "temperature", "number", "prompts"],
)
def test_scores_of_other_settings_or_prompts_do_not_compare(fingerprint, overrides, prompts):
    assert fingerprint(*overrides, prompts=prompts) != fingerprint()


def history(*rows):
    """Evaluations of (loss, τ), a hundred steps apart."""
    return [
        evaluation.entry(100 * (i + 1), tau, {"loss": loss, "tau": tau})
        for i, (loss, tau) in enumerate(rows)
    ]


def test_the_speed_up_to_expect_is_at_most_tau_over_what_is_read():
    metrics = {"loss": 1.0, "tau": 3.0}
    assert evaluation.forecast(metrics, 1.2) == {"speedup_bound": pytest.approx(2.5)}
    assert evaluation.forecast({"loss": 1.0}, 1.2) == {}
    assert evaluation.forecast(metrics, None) == {}


@pytest.mark.parametrize(
    ("scores", "patience", "stalled"),
    [
        ((1, 2, 2, 1), 2, True),
        ((1, 2, 1, 3), 2, False),
        ((3, 2, 1), 3, False),  # the first one counts as a new best
        ((3, 2, 1, 1), 3, True),
        ((3, 2, 1, 1), 0, False),
        ((), 1, False),
    ],
)
def test_it_has_stalled_when_patience_is_at_its_end(scores, patience, stalled):
    entries = [evaluation.entry(i, score, {}) for i, score in enumerate(scores)]
    assert evaluation.has_stalled(entries, patience) is stalled


def test_a_loss_that_falls_while_tau_does_not_is_called_out():
    rows = [(2.0, 3.0), (1.9, 3.01), (1.8, 2.9), (1.7, 3.0)]
    (line,) = evaluation.warnings(history(*rows))
    assert line.startswith("the held-out loss falls (2.000 to 1.700 since step 100), but τ does")
    assert evaluation.warnings(history(*rows[:3])) == [], "too early to say"
    assert evaluation.warnings(history(*rows[:3], (1.7, 3.2))) == []
    assert evaluation.warnings(history(*((2.0, 3.0),) * 4)) == []


def test_a_target_has_no_tau_and_no_warnings():
    assert evaluation.warnings([evaluation.entry(1, -2.0, {"loss": 2.0})] * 5) == []
    assert evaluation.warnings([]) == []
