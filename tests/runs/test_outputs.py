import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.runs import outputs


def make_record(index=0, **changes):
    values = {
        "index": index, "prompt": f"prompt {index}", "prompt_ids": (1, 2, index),
        "output_ids": (5, 6, 7, 8, 9), "text": "five", "finish_reason": "length",
        "acceptance_lengths": (3, 1), "prefill_ms": 20.0, "decode_ms": 40.0, "decode_clock_s": 0.04,
        "block_sizes": (4, 4),
    }  # fmt: skip
    return outputs.Record(**{**values, **changes})


@st.composite
def make_records(draw):
    """Draws plausible records of decoded sequences."""
    cycles = draw(st.lists(st.integers(1, 16).flatmap(_committed), max_size=5))
    lengths, sizes = zip(*cycles, strict=True) if cycles else ((), ())
    count, first = 1 + sum(lengths), draw(st.integers(0, 2**31 - 100))
    return outputs.Record(
        index=draw(st.integers(0, 9)), prompt=draw(st.none() | text | st.tuples(message)),
        prompt_ids=draw(st.lists(ids, max_size=5).map(tuple)),
        output_ids=tuple(range(first, first + count)), text=draw(text),
        finish_reason=draw(st.sampled_from(["stop", "length"])), acceptance_lengths=lengths,
        prefill_ms=draw(time), decode_ms=draw(time), decode_clock_s=draw(time),
        block_sizes=draw(st.sampled_from([sizes, ()])),
    )  # fmt: skip


def _committed(size):
    return st.tuples(st.integers(1, size), st.just(size))


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ids = st.integers(0, 2**31 - 1)
time = st.floats(0, 1e9)
message = st.fixed_dictionaries({"role": st.just("user"), "content": text})
records = make_records()


def test_line_has_the_documented_fields():
    line = outputs.encode(make_record(3, text="héllo\nworld"))
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert "héllo".encode() in line  # readable as it stands, not escaped
    assert json.loads(line) == {
        "index": 3, "prompt": "prompt 3", "prompt_ids": [1, 2, 3], "output_ids": [5, 6, 7, 8, 9],
        "text": "héllo\nworld", "finish_reason": "length", "acceptance_lengths": [3, 1], "tau": 2.0,
        "prefill_ms": 20.0, "decode_ms": 40.0, "decode_clock_s": 0.04, "block_sizes": [4, 4],
    }  # fmt: skip


@given(records)
def test_line_round_trip(record):
    line = outputs.encode(record)
    line.decode("utf-8")
    assert line.index(b"\n") == len(line) - 1
    assert outputs.decode(line) == record


@given(records, st.data())
def test_no_beginning_of_a_line_reads_as_a_record(record, data):
    line = outputs.encode(record)
    end = data.draw(st.integers(0, len(line) - 2))  # without the line end and the last brace
    with pytest.raises(ValueError):  # noqa: PT011, JSON's and UTF-8's complaints both are
        outputs.decode(line[:end])


def test_a_line_from_before_block_sizes():
    record = make_record(block_sizes=())
    fields = json.loads(outputs.encode(record))
    del fields["block_sizes"]
    assert outputs.decode(json.dumps(fields).encode()) == record


def test_not_a_number_is_a_defect():
    with pytest.raises(ValueError, match="JSON compliant"):
        outputs.encode(make_record(decode_ms=float("nan")))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: [], "not an object"),
        (lambda fields: {"index": 1, "prompt": None}, "no prompt_ids, output_ids, text"),
        (lambda fields: fields | {"output_ids": 3}, "output_ids: expected a list"),
        (lambda fields: fields | {"output_ids": [5, 6]}, r"acceptance_lengths: sum to 4, not to "),
        (lambda fields: fields | {"output_ids": [5, True, 7, 8, 9]}, "output_ids: expected integ"),
        (lambda fields: fields | {"prompt_ids": [-1]}, "prompt_ids: expected integers >= 0"),
        (lambda fields: fields | {"acceptance_lengths": [4, 0]}, "lengths: expected integers >= 1"),
        (lambda fields: fields | {"acceptance_lengths": [99], "block_sizes": [128]},
         "acceptance_lengths: sum to 99, not to len"),
        (lambda fields: fields | {"block_sizes": [4, 0]}, "block_sizes: expected integers >= 1"),
        (lambda fields: fields | {"block_sizes": [4]}, "block_sizes: 1 items, but 2 acceptance"),
        (lambda fields: fields | {"block_sizes": [2, 4]}, "acceptance_lengths: more tokens than"),
        (lambda fields: fields | {"decode_ms": float("nan")}, "decode_ms: expected a finite num"),
        (lambda fields: fields | {"prefill_ms": -1}, "prefill_ms: expected a finite number >= 0"),
        (lambda fields: fields | {"decode_clock_s": "1"}, "decode_clock_s: expected a finite"),
        (lambda fields: fields | {"index": -1}, "index: expected an integer >= 0, got -1"),
        (lambda fields: fields | {"text": None}, "text: expected text"),
        (lambda fields: fields | {"prompt": 7}, "prompt: expected text, messages or null"),
        (lambda fields: fields | {"prompt": [7]}, "prompt: expected text, messages or null"),
        (lambda fields: fields | {"finish_reason": "end"}, "finish_reason: expected stop or len"),
    ],
)  # fmt: skip
def test_other_json_is_no_record(change, message):
    fields = json.loads(outputs.encode(make_record()))
    with pytest.raises(ValueError, match=message):
        outputs.decode(json.dumps(change(fields)).encode())


def test_summary():
    summary = outputs.summarize(
        [
            make_record(0, acceptance_lengths=(4,), decode_ms=40.0, decode_clock_s=0.05),
            # Beside the first one in a batch: its time runs at the same time.
            make_record(1, acceptance_lengths=(1, 1, 2), prefill_ms=30.0, decode_clock_s=0.08),
            make_record(2, output_ids=(5,), acceptance_lengths=(), prefill_ms=90.0, decode_ms=0.0),
        ],
        block_size=4,
    )
    assert summary == outputs.Summary(
        tau=2.0,  # over cycles; the mean of the prompts' own would be 2.67
        tokens_per_second=8 / 0.08,  # not 8 / (0.05 + 0.08), nor 11 tokens
        ttft_ms=30.0,
        tpot_ms=10.0,
        acceptance_histogram={"1": 2, "2": 1, "3": 0, "4": 1},
        cycles=4,
        prompts=3,
        output_tokens=11,
        decode_seconds=0.08,
        block_size_histogram={"4": 6},
    )


def test_summary_of_nothing():
    summary = outputs.summarize([], block_size=2)
    assert summary.acceptance_histogram == {"1": 0, "2": 0}
    assert summary.tokens_per_second is summary.tau is summary.ttft_ms is summary.tpot_ms is None
    json.dumps(dataclasses.asdict(summary), allow_nan=False)


@settings(max_examples=30)
@given(st.lists(records, max_size=5), st.randoms())
def test_summary_ignores_order_and_accounts_for_every_cycle(found, random):
    summary = outputs.summarize(found, block_size=16)
    histogram = summary.acceptance_histogram
    assert list(histogram) == [str(n) for n in range(1, 17)]
    assert sum(histogram.values()) == summary.cycles
    committed = sum(int(n) * count for n, count in histogram.items())
    assert committed == pytest.approx((summary.tau or 0) * summary.cycles)
    random.shuffle(found)
    assert outputs.summarize(found, block_size=16) == summary


@pytest.mark.parametrize("length", [0, 5])
def test_impossible_acceptance_length(length):
    with pytest.raises(ValueError, match=r"are not in 1 … 4"):
        outputs.summarize([make_record(acceptance_lengths=(2, length))], block_size=4)


def test_comparison():
    records = {0: make_record(0), 1: make_record(1, decode_clock_s=0.08)}
    plain = {
        0: make_record(0, acceptance_lengths=(1,) * 4, decode_clock_s=0.1),
        1: make_record(
            1, output_ids=(5, 6, 7, 8, 1), acceptance_lengths=(1,) * 4, decode_clock_s=0.2
        ),
    }
    found = outputs.compare(records, plain, block_size=4)
    assert (found.identical, found.prompts) == (1, 2)
    assert found.tokens_per_second == pytest.approx(8 / 0.2)
    assert found.speed_up == pytest.approx(0.2 / 0.08)
    with pytest.raises(ValueError, match="different prompts"):
        outputs.compare(records, {0: plain[0]}, block_size=4)
