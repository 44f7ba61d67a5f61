"""Texts, ends and counts of outputs, made from events of the engine."""

import pathlib

import pytest

import dflash
from dflash.inference.request import Request, Tokens
from dflash.serving.completion_request import CompletionRequest, ResponseOptions
from dflash.serving.output import Output
from dflash.text.tokenizer_loading import load_tokenizer

ASSETS = pathlib.Path(dflash.__file__).parent / "assets"
QUESTION = [{"role": "user", "content": "Tom has 3 pens and finds 4 more. How many is that?"}]


@pytest.fixture(scope="module")
def tokenizer():
    """Returns the tiny target's tokenizer, after its chat template was compiled."""
    loaded = load_tokenizer(ASSETS / "tiny_target")
    assert loaded.encode_chat(QUESTION)
    return loaded


def make_output(tokenizer, *, stop=(), stop_ids=(), min_new_tokens=0, prompt=None, **options):
    """Returns an output without tokens."""
    prompt = tuple(tokenizer.encode_chat(QUESTION)) if prompt is None else tuple(prompt)
    request = Request(0, prompt, 64, stop_ids=stop_ids, min_new_tokens=min_new_tokens)
    completion_request = CompletionRequest(
        (prompt,),
        request.sampling,
        min_new_tokens=min_new_tokens,
        stop=stop,
        stop_ids=stop_ids,
        options=ResponseOptions(**options),
    )
    return Output(0, request, completion_request, tokenizer)


def test_rejected_drafts_are_shown_with_a_real_chat_template(tokenizer):
    output = make_output(tokenizer, drafts=True)
    words, others = tokenizer.encode("Tom has 7 pens."), tokenizer.encode(" 12 pencils")
    output.push(Tokens(0, tuple(words[:1])))
    delta = output.push(Tokens(0, tuple(words[1:]), (len(words) - 1,), (), (8,), (tuple(others),)))
    assert ("".join(text for text, origin in delta.pieces if origin == "refused")) == " 12 pencils"
    assert output.text == "Tom has 7 pens."
