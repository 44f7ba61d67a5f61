"""Conversations in a benchmark: what later turns answer to, and that it is the same for all."""

import dataclasses

import pytest
from support import write_lines
from support.engines import completions
from support.models import make_architecture

from dflash.config import benchmark_schema, schema
from dflash.inference.request import RequestOutput
from dflash.measure import bench as benches
from dflash.measure import workload
from dflash.measure.samples import Sample, TaskRound
from dflash.offline.decoding import decode
from dflash.text.prompts import Prompt


def make_config(raw_dir) -> benchmark_schema.BenchmarkRun:
    shape = make_architecture(vocab_size=256, num_hidden_layers=1, head_dim=8)
    return benchmark_schema.BenchmarkRun(
        target=schema.TargetConfig(name="qwen3", checkpoint="random", architecture=shape),
        tasks=("mt-bench",),
        raw_dir=str(raw_dir),
        decode=schema.DecodeConfig(max_new_tokens=5, page_size=16, prefill_chunk=16),
        dtype="float32",
    )


@pytest.fixture
def load(tmp_path):
    """Returns a benchmark of these conversations."""

    def load_rows(rows):
        write_lines(tmp_path / "mt_bench" / "question.jsonl", rows)
        bench = benches.prepare(make_config(tmp_path))
        bench.load()
        return bench

    return load_rows


def test_differing_outputs_are_explained(load):
    """A token of another strategy's output is changed, as a fault would change it."""
    bench = load([{"turns": ["What?"]}, {"turns": ["Why?"]}])
    requests = [bench.request(item) for item in bench.workload.items[:2]]
    events = decode(bench.jobs["none"].engine(), requests)
    first, second = completions(events)
    wrong = (*second.output_ids[:-1], second.output_ids[-1] ^ 1)
    other = dataclasses.replace(second, output_ids=wrong)
    samples = [
        Sample("mt-bench", strategy, 0, outputs, (0, 0))
        for strategy, outputs in {"none": (first, second), "dflash": (first, other)}.items()
    ]
    ((where, found),) = bench.differences([TaskRound("mt-bench", 0, tuple(samples), {})]).items()
    assert where == "dflash, mt-bench, prompt 1"
    assert (found.position, found.tokens[1], found.is_fault) == (4, wrong[-1], True)


def test_later_turns_follow_what_the_baseline_has_said(load):
    bench = load([{"turns": ["What?", "Why is it so?", "Oh."]}, {"turns": ["One turn only."]}])
    bench.decode_later_turns()
    items = bench.workload.items
    assert [(item.prompt.index, item.turn) for item in items] == [(0, 0), (1, 1), (2, 2), (3, 0)]
    job = bench.jobs["none"]
    assert job.max_length == len(items[2].prompt.ids) + 5
    requests = job.requests([item.prompt for item in items[:2]])
    said = [
        job.tokenizer.decode(event.output_ids).encode("utf-8", "replace").decode("utf-8")
        for event in decode(job.engine(), requests)
        if isinstance(event, RequestOutput)
    ]
    assert [dict(message)["content"] for message in items[2].prompt.messages] == [
        "What?", said[0], "Why is it so?", said[1], "Oh.",
    ]  # fmt: skip
    bench.decode_later_turns()  # there is nothing left to be said
    assert bench.workload.items == items


@pytest.mark.parametrize(
    ("lengths", "longest", "wanted"),
    [
        (None, 4, []),
        ((3, 1), 4, [3, 1]),  # ends with its recording
        ((3, 4, 1), 4, [3, 4, 1]),
        ((9, 1), 4, [4, 1, 4, 1, 4, 1, 4]),  # cut, so it begins again
    ],
)
def test_a_script_is_cut_to_the_block_and_lasts(lengths, longest, wanted):
    item = workload.Item(Prompt(0, (1,)), max_new_tokens=7, lengths=lengths)
    assert benches.script(item, longest) == wanted


def test_a_benchmark_asks_for_reasoning_where_it_is_told_to(tmp_path):
    config = dataclasses.replace(make_config(tmp_path), thinking=True)
    assert config.decode_run(schema.DrafterConfig()).prompts.thinking
