"""Reads the body of SGLang's /generate."""

from collections.abc import Mapping
from typing import Any

from dflash.inference.request import MAX_LOGPROBS
from dflash.serving import ask as asks
from dflash.serving.ask import Ask, Model, Show
from dflash.serving.fields import ANYTHING, Bounds, Fields, as_ids, as_text
from dflash.serving.refusal import Refusal
from dflash.text import jsonl

_HARMLESS = {
    "logprob_start_len": (-1,),
    "lora_path": ("",),
    "return_hidden_states": (False,),
    "return_text_in_logprobs": ANYTHING,  # texts are always there
    "log_metrics": ANYTHING,
    "image_data": ([],),
    "rid": ANYTHING,
}
_HARMLESS_SAMPLING = {
    "best_of": (1,),
    "no_stop_trim": (False,),
    "spaces_between_special_tokens": ANYTHING,  # no tokenizer here puts spaces there
}


def read_generate(body: Mapping[str, Any], model: Model) -> tuple[Ask, bool]:
    """The body of /generate.

    Returns:
      What is asked for; whether the answer is a list, as the prompts were.
    Raises:
      Refusal: a field cannot be served; names it.
    """
    fields = Fields(body)
    prompts, several = _prompts(fields, model)
    sampling = fields.group("sampling_params")
    top = fields.integer("top_logprobs_num", Bounds(0, MAX_LOGPROBS)) or 0
    logprobs = top if fields.flag("return_logprob") else None
    show = Show(
        stream=fields.flag("stream"),
        logprobs=logprobs,
        special_tokens=not sampling.flag("skip_special_tokens", True),
    )
    ask = asks.read_ask(sampling, model, asks.SGLANG, prompts, show)
    sampling.finish(_HARMLESS_SAMPLING)
    fields.finish(_HARMLESS)
    if show.stream and (several or ask.choices > 1):
        raise Refusal("stream: one output at a time, please", param="stream")
    return ask, several or ask.choices > 1


def _prompts(fields: Fields, model: Model) -> tuple[tuple[tuple[int, ...], ...], bool]:
    text, ids = fields.take("text"), fields.take("input_ids")
    if (text is None) == (ids is None):
        raise Refusal("text: give either text or input_ids", param="text")
    param, value = ("text", text) if ids is None else ("input_ids", ids)
    several = isinstance(value, list) and bool(value) and not isinstance(value[0], int)
    if text is not None and not isinstance(text, str) and not several:
        expected = "a text, or a list of texts"
        raise Refusal(f"text: expected {expected}; got {jsonl.quote(text)}", param="text")
    values = value if several else [value]
    if len(values) > asks.MAX_CHOICES:
        raise Refusal(f"{param}: expected at most {asks.MAX_CHOICES} prompts", param=param)
    prompts = []
    for place, one in enumerate(values):
        where = f"{param}[{place}]" if several else param
        if ids is None:
            found = asks.prompt_of_text(as_text(one, where), where, model)
        else:
            found = as_ids(one, where, model.vocab_size)
        prompts.append(asks.checked_prompt(found, where, model))
    return tuple(prompts), several
