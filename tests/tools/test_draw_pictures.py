"""The picture of drafting shows every committed token once."""

import pytest
from support import scripts

draw_pictures = scripts.load("tools/draw_pictures.py")


def test_each_token_has_a_cell():
    drafted = {"output_ids": [1, 2, 3, 4, 5, 6], "acceptance_lengths": [3, 2]}
    plain = {"output_ids": [1, 2, 3, 4, 5, 6], "acceptance_lengths": [1] * 5}
    svg = draw_pictures.picture(drafted, plain)
    assert "5 tokens in 2 cycles" in svg
    # The legend has one cell of each of the first three kinds.
    assert [svg.count(f'fill="{color}"') for color in draw_pictures._COLORS.values()] == [
        4,
        2,
        2,
        5,
    ]


def test_outputs_that_differ_are_an_error():
    drafted = {"output_ids": [1], "acceptance_lengths": []}
    with pytest.raises(ValueError, match="differ"):
        draw_pictures.picture(drafted, {**drafted, "output_ids": [2]})
