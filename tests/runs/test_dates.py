"""A run's date: today at its first start, and the same at every later one."""

import datetime

import pytest

from dflash import errors
from dflash.runs import dates


def test_a_new_run_has_the_date_of_today(tmp_path):
    for directory in (None, tmp_path, tmp_path / "to be made"):
        assert dates.find(directory) == datetime.date.today()


def test_a_continued_run_keeps_its_date(tmp_path):
    (tmp_path / dates.FILE).write_text("2024-02-29\n")
    assert dates.find(tmp_path) == datetime.date(2024, 2, 29)


@pytest.mark.parametrize("content", [b"yesterday", b"", b"\xff", b"2024-02-30"])
def test_a_damaged_date_is_one_line(tmp_path, content):
    (tmp_path / dates.FILE).write_bytes(content)
    with pytest.raises(errors.WorkdirError, match=r"date\.txt: not a date such as 2026-01-31"):
        dates.find(tmp_path)
