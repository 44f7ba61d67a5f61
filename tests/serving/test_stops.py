"""Stop strings in a text that arrives in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from dflash.serving.output import StopFinder

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(LETTERS.filter(bool), max_size=3)


def whole(text, stops, include=False):
    """Returns the text up to the first stop string, and that stop string, from the whole text."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), STOPS, st.booleans())
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


@given(
    st.lists(LETTERS, max_size=6),
    st.lists(LETTERS, max_size=6),
    STOPS,
)
def test_no_stop_string_ends_within_an_exempt_beginning(exempt, rest, stops):
    finder, begin = StopFinder(stops), "".join(exempt)
    text = begin + "".join(rest)
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(len(begin) + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    end, length, stop = min(ends, default=(len(text), 0, None))
    output = "".join(finder.push(piece, exempt=True) for piece in exempt)
    output += "".join(finder.push(piece) for piece in rest) + finder.push("", final=True)
    assert (output, finder.found) == (text[: end + length], stop)


@given(st.lists(st.tuples(LETTERS, LETTERS), max_size=6), STOPS)
def test_hidden_text_matches_and_is_not_shown(pieces, stops):
    finder = StopFinder(stops)
    expected, stop = whole("".join(text + hidden for text, hidden in pieces), stops)
    visible = "".join("1" * len(text) + "0" * len(hidden) for text, hidden in pieces)
    output = "".join(finder.push(text, hidden=hidden) for text, hidden in pieces)
    output += finder.push("", final=True)
    shown = [character for character, bit in zip(expected, visible, strict=False) if bit == "1"]
    assert (output, finder.found) == ("".join(shown), stop)
