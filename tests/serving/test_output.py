"""Texts, ends and counts of outputs, made from events of the engine."""

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.trained_tokenizers import train_metaspace, train_sentencepiece, train_unigram

import dflash
from dflash.inference.request import Request, RequestOutput, TokenLogprobs, Tokens
from dflash.serving.completion_request import CompletionRequest, ResponseOptions
from dflash.serving.output import Output, StopFinder
from dflash.text.tokenizer_loading import load_tokenizer

ASSETS = pathlib.Path(dflash.__file__).parent / "assets"
QUESTION = [{"role": "user", "content": "Tom has 3 pens and finds 4 more. How many is that?"}]
LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(LETTERS.filter(bool), max_size=3)


@pytest.fixture(scope="module")
def tokenizer():
    """Returns the tiny target's tokenizer, after its chat template was compiled."""
    loaded = load_tokenizer(ASSETS / "tiny_target")
    assert loaded.encode_chat(QUESTION)
    return loaded


def make_output(
    tokenizer, *, stop=(), stop_ids=(), min_new_tokens=0, prompt=None, include=False, **options
):
    """Returns an output without tokens."""
    prompt = tuple(tokenizer.encode_chat(QUESTION)) if prompt is None else tuple(prompt)
    request = Request(0, prompt, 64, stop_ids=stop_ids, min_new_tokens=min_new_tokens)
    completion_request = CompletionRequest(
        (prompt,), request.sampling, min_new_tokens=min_new_tokens, stop=stop, stop_ids=stop_ids,
        options=ResponseOptions(stop=include, **options),
    )  # fmt: skip
    return Output(0, request, completion_request, tokenizer)


def cycle(*ids, accepted=None, size=8, **fields):
    """Returns the event of one cycle."""
    accepted = len(ids) - 1 if accepted is None else accepted
    return Tokens(0, ids, (len(ids),), (accepted,), block_sizes=(size,), **fields)


def done(output, reason):
    """Returns the completion of an output."""
    return RequestOutput(0, tuple(output.ids), reason, (), (), 0.0, 0.0, 0.0, 0.0)


def test_rejected_drafts_are_shown_with_a_real_chat_template(tokenizer):
    output = make_output(tokenizer, drafts=True)
    words, others = tokenizer.encode("Tom has 7 pens."), tokenizer.encode(" 12 pencils")
    output.push(Tokens(0, tuple(words[:1])))
    delta = output.push(cycle(*words[1:], rejected=(tuple(others),)))
    assert "".join(text for text, origin in delta.pieces if origin == "refused") == " 12 pencils"
    assert output.text == "Tom has 7 pens."


def test_an_output_that_ends_within_the_draft_has_only_drafts(tokenizer):
    output = make_output(tokenizer, drafts=True)
    first, *drafts = tokenizer.encode("Tom has 7 pens.")
    events = Tokens(0, (first,)), cycle(*drafts, accepted=len(drafts))
    shown = [piece for event in events for piece in output.push(event).pieces]
    assert [origin for _, origin in shown] == ["own", "drafted"]
    statistics = output.statistics
    assert (statistics.accepted, statistics.tau) == (len(drafts), len(drafts))


def test_counts_end_at_a_stop_string(tokenizer):
    """Whatever was decoded after it belongs to no count, cycles included."""
    output = make_output(tokenizer, stop=("12",))
    first, *rest = tokenizer.encode("Tom has 12 pens and 34 pencils. ")
    output.push(Tokens(0, (first,)))
    lengths = len(rest), 3, 3
    accepted = tuple(n - 1 for n in lengths)
    output.push(Tokens(0, (*rest, *rest[:6]), lengths, accepted, block_sizes=(32, 4, 4)))
    assert (output.text, output.stop_reason) == ("Tom has ", "12")
    statistics = output.statistics
    assert (statistics.cycles, statistics.drafted) == (1, 31)
    assert statistics.accepted == statistics.committed == len(output.ids) - 1 < len(rest)


@pytest.mark.parametrize("count", range(1, 8))
def test_the_first_tokens_of_an_event(count):
    logprobs = tuple(TokenLogprobs(-1.0, (), ()) for _ in range(7))
    event = Tokens(0, tuple(range(7)), (3, 1, 3), (2, 0, 3), logprobs, (4, 1, 4), ((9,), (), ()))
    first = event.first(count)
    assert first.ids == event.ids[:count]
    assert sum(first.acceptance_lengths) == count == len(first.logprobs)
    assert all(first.acceptance_lengths)
    cycles = len(first.acceptance_lengths)
    assert cycles == len(first.accepted) == len(first.block_sizes) == len(first.rejected)
    assert first.accepted == ((min(count, 2),), (2, 0), (2, 0, count - 4))[cycles - 1]
    assert event.first(7) == event


def test_the_text_of_a_stop_token_is_left_out(tokenizer):
    *words, last = tokenizer.encode("Tom has 7")
    (end,) = tokenizer.encode("<|end|>", special_tokens=True)
    for stop_id, options in ((last, {}), (end, {"special_tokens": True})):
        for include in (False, True):
            output = make_output(tokenizer, stop_ids=(stop_id,), include=include, **options)
            text = output.push(Tokens(0, (*words, stop_id))).text
            text += output.finish(done(output, "stop")).text
            ending = tokenizer.decode([*words, stop_id], **options) if include else "Tom has"
            assert (text.rstrip(), output.stop_reason) == (ending, stop_id)
            assert output.ids == [*words, stop_id]


@pytest.mark.parametrize(
    ("stop", "minimum", "text", "found"),
    [
        ("has 7", 2, "Tom ", "has 7"),  # Begins within the first tokens and ends after them.
        ("Tom has", 2, "Tom has 7 pens.", None),  # Ends within the first tokens.
        ("Tom", 3, "Tom has 7 pens.", None),
        ("pens", 3, "Tom has 7 ", "pens"),
    ],
)
def test_stop_strings_end_after_the_minimum(tokenizer, stop, minimum, text, found):
    output = make_output(tokenizer, stop=(stop,), min_new_tokens=minimum)
    words = tokenizer.encode("Tom has 7 pens.")
    assert tokenizer.decode(words[:2]) == "Tom has"
    shown = ""
    for word in words:
        if not output.ended:
            shown += output.push(Tokens(0, (word,))).text
    shown += output.finish(done(output, "length")).text
    assert (shown, output.stop_reason) == (text, found)


@pytest.mark.parametrize("stop", ["<|end|>", "pens<|end|>", "<|end|>\n", "<|end|> Tom"])
def test_stop_strings_may_contain_special_tokens_that_the_text_leaves_out(tokenizer, stop):
    (end,) = tokenizer.encode("<|end|>", special_tokens=True)
    words = tokenizer.encode("Tom has 7 pens")
    for after in ("\n and", " Tom and"):
        output = make_output(tokenizer, stop=(stop,))
        output.push(Tokens(0, (*words, end, *tokenizer.encode(after))))
        output.finish(done(output, "length"))
        if (whole := f"Tom has 7 pens<|end|>{after}").find(stop) < 0:
            assert output.text == whole.replace("<|end|>", "")
            continue
        assert output.text == whole[: whole.index(stop)].replace("<|end|>", "")
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("train", [train_metaspace, train_sentencepiece, train_unigram])
def test_the_first_token_keeps_its_space(train, tmp_path):
    options = {"add_dummy_prefix": True} if train is train_sentencepiece else {}
    train(tmp_path, **options)
    spaced = load_tokenizer(tmp_path)
    prompt, whole = spaced.encode("Hello"), spaced.encode("Hello are")
    ids = whole[len(prompt) :]
    assert spaced.decode(whole) == "Hello are"
    output = make_output(spaced, prompt=prompt)
    text = output.push(Tokens(0, tuple(ids))).text + output.finish(done(output, "length")).text
    assert text == " are"
    output = make_output(spaced, prompt=prompt, stop=(" are",))
    output.push(Tokens(0, tuple(ids)))
    assert (output.text, output.stop_reason) == ("", " are")


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
    assert (output, finder.stop) == (expected, stop)


@given(st.lists(LETTERS, max_size=6), st.lists(LETTERS, max_size=6), STOPS)
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
    assert (output, finder.stop) == (text[: end + length], stop)


@given(st.lists(st.tuples(LETTERS, LETTERS), max_size=6), STOPS)
def test_hidden_text_matches_and_is_not_shown(pieces, stops):
    finder = StopFinder(stops)
    expected, stop = whole("".join(text + hidden for text, hidden in pieces), stops)
    visible = "".join("1" * len(text) + "0" * len(hidden) for text, hidden in pieces)
    output = "".join(finder.push(text, hidden=hidden) for text, hidden in pieces)
    output += finder.push("", final=True)
    shown = [character for character, bit in zip(expected, visible, strict=False) if bit == "1"]
    assert (output, finder.stop) == ("".join(shown), stop)
