"""JSON bodies of OpenAI's /v1/responses, and the chats that they stand for.

A conversation is a list of items: messages, reasoning, calls and their results. The server stores
nothing, so every request has all of it.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from dflash.serving import validation
from dflash.serving.bodies import (
    Body,
    CacheSalt,
    Limit,
    Minimum,
    SamplingBody,
    StreamOptions,
    listed,
)
from dflash.serving.request_error import RequestError, unsupported
from dflash.serving.validation import Text, invalid, only
from dflash.text import jsonl

# Fields of chats by another name, and their names here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return listed(content)


def _stateless(value: Any) -> Any:
    raise invalid("responses are not stored; send the whole conversation as input", "unsupported")


_NotStored = Annotated[Any, AfterValidator(_stateless)]


class TextItem(Body):
    """Part of a message or of reasoning; other parts than text are not supported."""

    type: only("input_text", "output_text", "text", "summary_text", "reasoning_text")
    text: Text
    annotations: Any = None
    logprobs: Any = None
    parsed: Any = None


TextItems = Annotated[list[TextItem], pydantic.FailFast(), BeforeValidator(_parts)]


class ResponseItem(Body):
    """Fields of items that have no effect."""

    type: Any = None
    id: Any = None
    status: Any = None


class MessageItem(ResponseItem):
    """Message of a conversation."""

    role: Text
    content: TextItems
    phase: Any = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat."""
        message = {"role": self.role, "content": _text(self.content)}
        if self.role == "assistant":
            _answer(messages).update(message)
        else:
            messages.append(message)


class ReasoningItem(ResponseItem):
    """Reasoning of an answer."""

    content: TextItems = ()
    summary: Any = None
    encrypted_content: Any = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat."""
        if self.content:
            _answer(messages)["reasoning_content"] = _text(self.content)


class CallItem(ResponseItem):
    """Call of a function."""

    call_id: Text
    name: Text
    arguments: Text
    parsed_arguments: Any = None
    namespace: Any = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat."""
        function = {"name": self.name, "arguments": self.arguments}
        _answer(messages).setdefault("tool_calls", []).append(
            {"id": self.call_id, "type": "function", "function": function}
        )


class ResultItem(ResponseItem):
    """Result of a call."""

    call_id: Text
    output: TextItems

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat."""
        result = {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        messages.append(result)


_ITEMS: Mapping[str, type[ResponseItem]] = {
    "message": MessageItem,
    "reasoning": ReasoningItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
}


def _text(parts: list[TextItem]) -> str:
    return "\n".join(part.text for part in parts)


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message at the end of a chat, which it begins if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


class Reasoning(Body):
    """Field reasoning."""

    effort: Any = None
    summary: Any = None  # Answers have the reasoning itself.
    generate_summary: Any = None


class TextFormat(Body):
    """Field text.format."""

    type: only("text", "json_object", "json_schema") = "text"
    schema_: Any = Field(None, alias="schema")
    name: Any = None
    description: Any = None
    strict: Any = None


class TextOptions(Body):
    """Field text."""

    format: TextFormat = TextFormat()
    verbosity: only("medium") = None


class ResponsesBody(SamplingBody):
    """Body of /v1/responses."""

    LIMITS, MINIMUM, SEEDS = ("max_output_tokens",), "min_tokens", ("seed",)

    input: Any
    model: Text = None
    instructions: Text = None
    max_output_tokens: Limit = None
    min_tokens: Minimum = None
    n: only(1) = 1
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    tools: list[dict[str, Any]] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning = Reasoning()
    max_thinking_tokens: Any = None
    enable_thinking: Any = None
    chat_template_kwargs: Any = None
    text: TextOptions = TextOptions()
    previous_response_id: _NotStored = None
    conversation: _NotStored = None
    store: only(False) = None
    background: only(False) = None
    truncation: only("disabled") = None
    # Encrypted reasoning is for servers that hide it; this one returns it as it is.
    include: only([], ["reasoning.encrypted_content"]) = None
    top_logprobs: only(0) = None
    service_tier: only("auto", "default") = None
    cache_salt: CacheSalt = None
    priority: Any = None
    metadata: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    user: Any = None


# Fields that chats have under the same name.
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids"),
    *("ignore_eos", "min_tokens", "stream", "parallel_tool_calls", "max_thinking_tokens"),
    *("enable_thinking", "chat_template_kwargs", "cache_salt", "drafting", "priority"),
)


def chat_of(fields: ResponsesBody, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of the chat that a request stands for.

    Args:
      fields: Validated body.
      body: The same body as the client sent it.
    Raises:
      RequestError: An item or a tool is of an unknown kind; the error names it.
    """
    messages: list[dict[str, Any]] = []
    if fields.instructions is not None:
        messages.append({"role": "system", "content": fields.instructions})
    for item in _items(fields.input):
        item.add_to(messages)
    chat = {name: body.get(name) for name in _SAME}
    chat |= {"messages": messages, "max_completion_tokens": body.get("max_output_tokens")}
    chat["tools"] = [_tool(tool, place) for place, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    chat |= {"tool_choice": choice, "reasoning_effort": fields.reasoning.effort}
    form = fields.text.format
    chat["response_format"] = {"type": form.type}
    if form.type == "json_schema":
        chat["response_format"]["json_schema"] = {"schema": form.schema_}
    return chat


def renamed(error: RequestError) -> RequestError:
    """Returns the error of a chat with the names of the fields of /v1/responses."""
    for name, here in _NAMES.items():
        if error.param and error.param.startswith(name):
            message = error.message.replace(error.param, here, 1)
            return RequestError(message, param=here, status=error.status, code=error.code)
    return error


def _items(value: Any) -> Iterator[ResponseItem]:
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        message = f"input: expected a string or a list of items; got {jsonl.quote(value)}"
        raise RequestError(message, param="input")
    for place, item in enumerate(value):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            message = f"{where}: expected an object; got {jsonl.quote(item)}"
            raise RequestError(message, param=where)
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in _ITEMS:
            known = ", ".join(map(jsonl.quote, _ITEMS))
            raise unsupported(f"{where}.type", f"expected {known}; got {jsonl.quote(kind)}")
        yield validation.parse(_ITEMS[kind], item, where)


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        reason = f"only functions are supported, not {jsonl.quote(tool.get('type'))}"
        raise unsupported(f"tools[{place}].type", reason)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
