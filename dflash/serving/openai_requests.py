"""Reads the bodies of OpenAI's endpoints, with the fields that vLLM adds to them."""

from collections.abc import Mapping
from typing import Any

from dflash import errors
from dflash.inference.request import MAX_LOGPROBS
from dflash.serving import ask as asks
from dflash.serving.ask import Ask, Model, Show
from dflash.serving.fields import ANYTHING, Bounds, Fields, as_ids, as_mapping, as_text
from dflash.serving.refusal import Refusal, unsupported
from dflash.text import jsonl

# What clients send though it changes nothing here, at the values at which it changes nothing.
HARMLESS = {
    "best_of": (1,),
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "priority": (0,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "use_beam_search": (False,),
    "user": ANYTHING,
}
_HARMLESS_CHAT = {
    **HARMLESS,
    "modalities": (["text"],),
    "parallel_tool_calls": ANYTHING,
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
_HARMLESS_COMPLETION = {**HARMLESS, "suffix": ("",)}
# Of a message; others go to no template.
_MESSAGE_KEYS = ("role", "content", "name", "reasoning_content")
_LOGPROBS = Bounds(0, MAX_LOGPROBS)


def read_completion(body: Mapping[str, Any], model: Model) -> Ask:
    """The body of /v1/completions.

    Raises:
      Refusal: a field cannot be served; names it.
    """
    fields = Fields(body)
    asks.check_model(fields, model)
    complete = fields.flag("add_special_tokens", True)
    prompts = _prompts(fields.take("prompt"), model, complete=complete)
    logprobs = fields.integer("logprobs", _LOGPROBS)
    show = _show(fields, logprobs, echo=fields.flag("echo"))
    if show.echo and logprobs is not None:
        raise unsupported("echo", "together with logprobs: those of prompts are not computed")
    ask = asks.read_ask(fields, model, asks.OPENAI, prompts, show)
    fields.finish(_HARMLESS_COMPLETION)
    return ask


def read_chat(body: Mapping[str, Any], model: Model) -> Ask:
    """The body of /v1/chat/completions.

    Raises:
      Refusal: a field cannot be served; names it.
    """
    fields = Fields(body)
    asks.check_model(fields, model)
    prompts = (chat_prompt(fields, model),)
    top = fields.integer("top_logprobs", _LOGPROBS)
    wanted = fields.flag("logprobs")
    if top is not None and not wanted:
        raise Refusal("top_logprobs: needs logprobs: true", param="top_logprobs")
    show = _show(fields, (top or 0) if wanted else None)
    ask = asks.read_ask(fields, model, asks.OPENAI, prompts, show)
    fields.finish(_HARMLESS_CHAT)
    return ask


def read_tokenize(body: Mapping[str, Any], model: Model) -> tuple[tuple[int, ...], bool]:
    """The body of vLLM's /tokenize.

    Returns:
      Ids of its prompt, or of its messages; whether the answer is to have their texts.
    Raises:
      Refusal: a field cannot be served; names it.
    """
    fields = Fields(body)
    asks.check_model(fields, model)
    complete, names = fields.flag("add_special_tokens", True), fields.flag("return_token_strs")
    text = fields.text("prompt")
    if text is None:
        ids = chat_prompt(fields, model)
    else:
        ids = asks.prompt_of_text(text, "prompt", model, complete=complete)
    fields.finish()
    return ids, names


def chat_prompt(fields: Fields, model: Model) -> tuple[int, ...]:
    """Ids of the messages of a request in the chat template.

    Raises:
      Refusal: the messages cannot be used, or the template refuses them.
    """
    messages = _messages(fields.take("messages"))
    variables = dict(fields.group("chat_template_kwargs").rest())
    begins = fields.flag("add_generation_prompt", True)
    for name in ("messages", "add_generation_prompt"):
        if name in variables:
            param = f"chat_template_kwargs.{name}"
            raise Refusal(f"{param}: give {name} beside chat_template_kwargs", param=param)
    try:
        ids = model.tokenizer.encode_chat(messages, add_generation_prompt=begins, **variables)
    except (errors.InputError, TypeError) as error:
        raise Refusal(str(error), param="messages") from error
    return asks.checked_prompt(tuple(ids), "messages", model)


def _show(fields: Fields, logprobs: int | None, *, echo: bool = False) -> Show:
    stream = fields.flag("stream")
    options = fields.group("stream_options")
    show = Show(
        stream=stream,
        usage=options.flag("include_usage"),
        running_usage=options.flag("continuous_usage_stats"),
        echo=echo,
        logprobs=logprobs,
        special_tokens=not fields.flag("skip_special_tokens", True),
        stop=fields.flag("include_stop_str_in_output"),
        drafts=fields.flag("show_drafts"),
    )
    options.finish({"include_obfuscation": (False,)})
    if not stream and (show.usage or show.running_usage):
        raise Refusal("stream_options: needs stream: true", param="stream_options")
    return show


def _prompts(value: Any, model: Model, *, complete: bool) -> tuple[tuple[int, ...], ...]:
    """A prompt or several, each a text or token ids."""
    if value is None:
        raise Refusal("prompt: required", param="prompt")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_id(value[0])):
        return (_prompt(value, "prompt", model, complete=complete),)
    if not isinstance(value, list) or not value:
        expected = "a text, a list of token ids, or a list of prompts"
        raise Refusal(f"prompt: expected {expected}; got {jsonl.quote(value)}", param="prompt")
    if len(value) > asks.MAX_CHOICES:
        raise Refusal(f"prompt: expected at most {asks.MAX_CHOICES} prompts", param="prompt")
    return tuple(
        _prompt(one, f"prompt[{place}]", model, complete=complete)
        for place, one in enumerate(value)
    )


def _prompt(value: Any, param: str, model: Model, *, complete: bool) -> tuple[int, ...]:
    if isinstance(value, list):
        ids = as_ids(value, param, model.vocab_size)
    else:
        ids = asks.prompt_of_text(as_text(value, param), param, model, complete=complete)
    return asks.checked_prompt(ids, param, model)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float)


def _messages(value: Any) -> list[dict[str, Any]]:
    if value is None:
        raise Refusal("messages: required", param="messages")
    if not isinstance(value, list) or not value:
        expected = "a list of at least one message"
        raise Refusal(f"messages: expected {expected}; got {jsonl.quote(value)}", param="messages")
    return [_message(one, f"messages[{place}]") for place, one in enumerate(value)]


def _message(value: Any, param: str) -> dict[str, Any]:
    """A message whose content is one text."""
    given = {key: one for key, one in as_mapping(value, param).items() if one not in (None, [])}
    for key in given:
        if key not in _MESSAGE_KEYS:
            raise unsupported(f"{param}.{key}", "not supported")
    for key in ("role", "content"):
        if key not in given:
            raise Refusal(f"{param}.{key}: required", param=f"{param}.{key}")
    content = given["content"]
    if isinstance(content, list):
        given["content"] = "\n".join(
            _part(part, f"{param}.content[{place}]") for place, part in enumerate(content)
        )
    return {key: as_text(one, f"{param}.{key}") for key, one in given.items()}


def _part(value: Any, param: str) -> str:
    """A part of a content, which has to be a text."""
    part = Fields(as_mapping(value, param), param)
    kind = part.text("type")
    if kind != "text":
        raise unsupported(f"{param}.type", f"only 'text' is supported, not {jsonl.quote(kind)}")
    text = part.text("text")
    if text is None:
        raise Refusal(f"{param}.text: required", param=f"{param}.text")
    part.finish()
    return text
