"""Plots of results show the figures of their tables."""

import pytest
from support import scripts

plot_results = scripts.load("tools/plot_results.py")

TABLE = """Text.

| chip | rows | cost |
|---|---|---|
| v5p | 16 | 1.00 × |
| | 32 | 1.28 × |
| v6e | 16 | 1.00 × |

More text."""
PLOT = plot_results.TablePlot(
    "page.md", "| chip |", place=1, values={2: ""}, groups=(0,), labels={}
)


def test_a_curve_has_the_figures_of_its_rows():
    rows = plot_results.read_table(TABLE, "| chip |")
    one, other = plot_results.lines(PLOT, rows)
    assert (one.name, one.places, one.values) == ("v5p", (16, 32), (1.0, 1.28))
    assert (other.name, other.places, other.values) == ("v6e", (16,), (1.0,))


@pytest.mark.parametrize("page", ["Text.", f"{TABLE}\n\n{TABLE}"])
def test_a_missing_or_repeated_table_is_an_error(page):
    with pytest.raises(ValueError, match="expected one table"):
        plot_results.read_table(page, "| chip |")


@pytest.mark.parametrize("name", list(plot_results.PLOTS))
def test_each_plot_is_drawn_and_shown_on_its_page(name, tmp_path):
    assert plot_results.draw(name).startswith(b"\x89PNG")
    assert (plot_results.RESULTS / name).exists()
    page = (plot_results.RESULTS / plot_results.PLOTS[name].page).read_text(encoding="utf-8")
    assert f"]({name})" in page
