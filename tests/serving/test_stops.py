"""Stop strings in a text that arrives in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from dflash.serving.stops import StopFinder

LETTERS = st.text("ab", max_size=12)


def whole(text, stops, include=False):
    """Returns the text up to the first stop string, and that stop string, from the whole text."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=3), st.booleans())
def test_output_does_not_depend_on_the_pieces(pieces, stops, include):
    finder, output = StopFinder(stops, include=include), ""
    expected, stop = whole("".join(pieces), stops, include)
    for piece in pieces:
        output += finder.push(piece)
        assert expected.startswith(output)  # nothing has to be taken back
    output += finder.push("", final=True)
    assert (output, finder.found) == (expected, stop)


def test_a_partial_match_is_held_back():
    finder = StopFinder(["</s>", "\n\n"])
    assert finder.push("one<") == "one"
    assert finder.push("/s") == ""
    assert finder.push("x\n") == "</sx"
    assert finder.push("", final=True) == "\n"


def test_text_without_partial_match_is_not_held_back():
    assert StopFinder([]).push("text") == "text"
    assert StopFinder(["z"]).push("text") == "text"
