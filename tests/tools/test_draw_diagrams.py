"""The diagrams of the pages are what the tool draws, and nothing in them is cut off."""

import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest
from support import scripts

ROOT = pathlib.Path(__file__).parents[2]
draw_diagrams = scripts.load("tools/draw_diagrams.py")
_SOURCES = ("tiny_family", "smollm2", "tpu_compile")


@pytest.mark.parametrize("name", draw_diagrams.DIAGRAMS)
def test_a_drawing_is_current_and_whole(name):
    svg = draw_diagrams.DIAGRAMS[name]()
    assert svg == (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    picture = ElementTree.fromstring(svg)
    width, height = float(picture.get("width")), float(picture.get("height"))
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        if text.get("text-anchor") == "start":  # Letters are about half as wide as high.
            length = 0.5 * float(text.get("font-size")) * len(text.text)
            assert float(text.get("x")) + length < width, text.text
        assert float(text.get("y")) < height, text.text


def test_a_drawing_is_shown_on_a_page():
    pages = "".join(path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md"))
    for name in draw_diagrams.DIAGRAMS:
        assert f"(pictures/{name}.svg)" in pages, name


def test_measured_and_forecast_figures_are_those_of_the_results():
    page = (ROOT / "docs" / "measuring.md").read_text(encoding="utf-8")
    rows = draw_diagrams.speed_rows(page)
    assert {kind for _, _, kind in rows} == {"measured", "forecast", "published"}
    results = [(ROOT / "docs/results" / f"{name}.md").read_text("utf-8") for name in _SOURCES]
    figures = set(re.findall(r"\d+\.\d+", "".join(results)))
    for name, value, kind in rows:
        assert kind == "published" or f"{value:.2f}" in figures, name
    published = page.partition("### Published")[2].partition("### What")[0]
    for line in re.findall(r"^\| .* × .*$", published, re.MULTILINE):
        assert re.search(r"arXiv \d{4}\.\d{5}|#\d+", line), line
