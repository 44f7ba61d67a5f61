"""Stop strings in a text that arrives in pieces."""

from hypothesis import given
from hypothesis import strategies as st

from dflash.serving.stops import StopFinder

LETTERS = st.text("ab", max_size=12)


def whole(text, stops, include=False):
    """What a client is to get of a text that is there at once, and the stop string."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS, max_size=8), st.lists(LETTERS.filter(bool), max_size=3), st.booleans())
def test_pieces_do_not_matter(pieces, stops, include):
    finder, said = StopFinder(stops, include=include), ""
    wanted, stop = whole("".join(pieces), stops, include)
    for piece in pieces:
        said += finder.push(piece)
        assert wanted.startswith(said)  # nothing has to be taken back
    said += finder.push("", final=True)
    assert (said, finder.found) == (wanted, stop)


def test_a_half_match_is_held_back_and_comes_later():
    finder = StopFinder(["</s>", "\n\n"])
    assert finder.push("one<") == "one"
    assert finder.push("/s") == ""
    assert finder.push("x\n") == "</sx"
    assert finder.push("", final=True) == "\n"


def test_nothing_is_held_back_for_nothing():
    assert StopFinder([]).push("text") == "text"
    assert StopFinder(["z"]).push("text") == "text"
