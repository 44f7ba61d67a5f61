"""Tests of SPEED-Bench, with invented files in its two layouts."""

import pyarrow
import pytest
from pyarrow import parquet
from support import write_lines

from dflash import errors
from dflash.config import registry
from dflash.data import datasets

ROWS = [
    {
        "question_id": f"{category}-{number}", "category": category, "sub_category": "made_up",
        "turns": [f"{category} {number}?", "And then?"][: 1 + number % 2], "source": "here",
        "src_id": str(number), "difficulty": "easy", "multiturn": bool(number % 2),
    }
    for category in ("coding", "math", "qa")
    for number in range(3)
]  # fmt: skip


def write_parquet(directory, config="qualitative", rows=ROWS):
    path = directory / "speed" / config / "test.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def examples(directory, name="speed-bench", **options):
    return datasets.task_examples(name, raw_dir=str(directory), **options)


def questions(found) -> list[str]:
    return [one.question for one in found]


def test_a_prepared_parquet_file(tmp_path):
    write_parquet(tmp_path)
    found = examples(tmp_path)
    assert questions(found) == [row["question_id"] for row in ROWS]
    assert [one.category for one in found] == [row["category"] for row in ROWS]
    assert [len(one.later_turns) for one in found] == [0, 1, 0] * 3
    assert found[4].opening[0]["content"] == "math 1?"


def test_prepared_lines_with_one_turn_each(tmp_path):
    rows = [{**row, "category": "high_entropy", "turns": row["turns"][0]} for row in ROWS]
    write_lines(tmp_path / "speed" / "throughput_2k.jsonl", rows)
    found = examples(tmp_path, "speed-bench-2k")
    assert [one.opening[0]["content"] for one in found] == [row["turns"] for row in rows]
    assert {one.category for one in found} == {"high_entropy"}


def test_fewer_are_taken_from_each_category_in_turn(tmp_path):
    write_parquet(tmp_path)
    assert questions(examples(tmp_path, limit=4)) == ["coding-0", "coding-1", "math-0", "qa-0"]


def test_every_config_has_a_name():
    names = [name for name in registry.DATASETS if name.startswith("speed-bench")]
    kinds = [registry.load(registry.DATASETS[name]) for name in names]
    assert [kind.name for kind in kinds] == names
    configs = ["qualitative", *(f"throughput_{n}k" for n in (1, 2, 8, 16, 32))]
    assert [kind.config for kind in kinds] == configs
    assert [kind.raw_file.folder for kind in kinds] == [f"speed/{one}" for one in configs]


@pytest.mark.parametrize("prepared", [False, True])
def test_what_was_not_prepared_is_told_how_to(tmp_path, prepared):
    if prepared:
        text = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
        write_parquet(tmp_path, rows=[{**ROWS[0], "turns": [text]}])
    with pytest.raises(errors.InputError, match=r"test.parquet: .*prepare_data.py") as caught:
        examples(tmp_path)
    assert "\n" not in str(caught.value)
