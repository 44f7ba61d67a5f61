"""Shards: what the flag may say, and the names of files."""

import pytest
from support import failure

from dflash import errors
from dflash.runs import shards
from dflash.runs.shards import Shard


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {"JOB_COMPLETION_INDEX": "1"}, None),
        ("0/1", {}, Shard(0, 1)),
        ("7/128", {}, Shard(7, 128)),
        ("auto", {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETION_COUNT": "4"}, Shard(3, 4)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8"}, Shard(5, 8)),
        ("auto", {"SLURM_ARRAY_TASK_ID": "8", "SLURM_ARRAY_TASK_COUNT": "8",
                  "SLURM_ARRAY_TASK_MIN": "1"}, Shard(7, 8)),
    ],
)  # fmt: skip
def test_the_flag(text, environment, expected):
    assert shards.parse(text, environment) == expected


@pytest.mark.parametrize(
    ("text", "environment", "message"),
    [
        ("8/8", {}, "--shard=8/8: shard 8 of 8 is out of range: the shards are 0 to n - 1"),
        ("0/0", {}, "--shard=0/0: shard 0 of 0 is out of range: the shards are 0 to n - 1"),
        ("-1/8", {}, "--shard: expected i/n, such as 0/8, or auto, got '-1/8'"),
        ("3", {}, "--shard: expected i/n, such as 0/8, or auto, got '3'"),
        ("auto", {}, "--shard=auto: neither JOB_COMPLETION_INDEX nor SLURM_ARRAY_TASK_ID is set: "
         "give --shard=i/n"),
        ("auto", {"JOB_COMPLETION_INDEX": "3"}, "--shard=auto: JOB_COMPLETION_INDEX is set, but "
         "JOB_COMPLETION_COUNT, the number of shards, is not: set it"),
        ("auto", {"JOB_COMPLETION_INDEX": "3", "JOB_COMPLETION_COUNT": "2"},
         "--shard=auto: shard 3 of 2 is out of range: the shards are 0 to n - 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_one_line(text, environment, message):
    assert failure(shards.parse, text, environment, kind=errors.ConfigError) == message


def test_shards_divide_a_list():
    parts = [shard.of(range(11)) for shard in Shard(0, 4).all()]
    assert sorted(item for part in parts for item in part) == list(range(11))
    assert list(parts[1]) == [1, 5, 9]
    assert list(shards.WHOLE.of("abc")) == ["a", "b", "c"]


def test_files_tell_their_shard(tmp_path):
    for shard in (Shard(2, 8), Shard(0, 8), Shard(11, 12)):
        (tmp_path / shard.file("outputs.jsonl")).touch()
    (tmp_path / "outputs.jsonl").touch()
    found = shards.shards_in(tmp_path, "outputs.jsonl")
    assert found == [Shard(0, 8), Shard(2, 8), Shard(11, 12)]
    assert (tmp_path / "outputs.2-of-8.jsonl").exists()
    assert shards.listed(shards.missing(tmp_path, "outputs.jsonl", 8), limit=2) == (
        "1/8, 3/8 and 4 more"
    )
    with pytest.raises(errors.WorkdirError, match="is divided into 12 shards, not 8"):
        shards.check_count(tmp_path, "outputs.jsonl", Shard(0, 8))
