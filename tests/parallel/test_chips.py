"""Tests of the chip table against the figures that are quoted from it."""

import pytest

from dflash import errors
from dflash.parallel import chips


@pytest.mark.parametrize(
    ("name", "rows"),
    [("v4", 225), ("v5p", 166), ("v5e", 240), ("v6e", 560), ("h100", 295), ("h200", 206)],
)
def test_the_ridge_is_where_it_is_said_to_be(name, rows):
    assert chips.find(name).ridge_rows == pytest.approx(rows, rel=0.01)


def test_a_device_has_its_share_of_the_chip():
    chip = chips.find("tpu7x")
    assert chip.ideal_ms(0, 7380e6 / 2) == chip.ideal_ms(2307e9 / 2, 0) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("cpu", None),
    ],
)
def test_devices_are_recognised(kind, name):
    assert getattr(chips.of_device_kind(kind), "name", None) == name


def test_an_unknown_chip_is_named_with_the_nearest():
    with pytest.raises(errors.ConfigError, match=r"unknown chip 'v5q'; did you mean 'v5[pe]'"):
        chips.find("v5q")
