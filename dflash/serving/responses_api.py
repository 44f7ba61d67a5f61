"""OpenAI's /v1/responses: bodies, the chats that they stand for, and the answers.

A conversation is a list of items: messages, reasoning, calls and their results. The server stores
nothing, so every request has all of it. Answers are items too, and events stream them.
"""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Annotated, Any

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from dflash.serving import responses, validation
from dflash.serving.bodies import OF_CHATS, Body, Limit, OpenAIBody, listed
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.output import Output, OutputDelta
from dflash.serving.responses import Json
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.serving.validation import RequestError, Text, invalid, only, unsupported
from dflash.text import jsonl
from dflash.text.chat_formats.reader import Kind, OutputPart

# Fields of chats by another name, and their names here.
_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# Status of a response and its items by the finish reason of its output.
_STATUSES = {"length": "incomplete", "error": "failed"}
_TEXTS = {"content": "output_text", "reasoning": "reasoning_text"}


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return listed(content)


def _stateless(value: Any) -> Any:
    raise invalid("responses are not stored; send the whole conversation as input", "unsupported")


_NotStored = Annotated[Any, AfterValidator(_stateless)]


class TextItem(Body):
    """Part of a message or of reasoning; other parts than text are not supported."""

    type: only(
        *("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"),
    )
    text: Text = Field(validation_alias=pydantic.AliasChoices("text", "refusal"))
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
    content: TextItems = ()
    phase: Any = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat."""
        if self.role == "assistant":
            _extend(messages, "content", self.content)
        else:
            messages.append({"role": self.role, "content": _text(self.content)})


class ReasoningItem(ResponseItem):
    """Reasoning of an answer."""

    content: TextItems = ()
    summary: TextItems = ()
    encrypted_content: Any = None

    def add_to(self, messages: list[dict[str, Any]]) -> None:
        """Adds the item to the messages of a chat; a summary counts where nothing else is."""
        if self.content or self.summary:
            _extend(messages, "reasoning_content", self.content or self.summary)


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
    output: TextItems = ()

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


def _text(parts: Sequence[TextItem]) -> str:
    return "\n".join(part.text for part in parts)


def _answer(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the assistant's message at the end of a chat, which it begins if there is none."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _extend(messages: list[dict[str, Any]], name: str, parts: Sequence[TextItem]) -> None:
    """Adds texts to a field of the assistant's message at the end of a chat."""
    answer = _answer(messages)
    if parts:
        answer[name] = "\n".join(filter(None, (answer.get(name), _text(parts))))


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


class ResponsesBody(OpenAIBody):
    """Body of /v1/responses."""

    LIMITS = ("max_output_tokens",)

    input: Any
    instructions: Text = None
    max_output_tokens: Limit = None
    n: only(1) = 1
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
    background: only(False) = None
    truncation: only("disabled") = None
    # Encrypted reasoning is for servers that hide it; this one returns it as it is.
    include: only([], ["reasoning.encrypted_content"]) = None
    top_logprobs: only(0) = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None


# Fields that chats have under the same name.
_SAME = (*OF_CHATS, "stop", "parallel_tool_calls", "max_thinking_tokens", "enable_thinking")


def chat_of(fields: ResponsesBody, body: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the body of the chat that a request stands for.

    Args:
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
            return error.renamed(error.message.replace(error.param, here, 1), here)
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


class ItemsAnswer(responses.Answer):
    """Response of /v1/responses, built from the parts of its only output."""

    def __init__(
        self, id: str, request: CompletionRequest, model: ServedModel, fields: ResponsesBody
    ):
        super().__init__(f"resp_{id}", request, model)
        self._items: list[Json] = []
        self._kind: Kind | None = None  # Kind of the last item while it is open.
        self._num_events = 0
        self._head = _head(self._id, fields, request, model)

    def body(self, outputs: Sequence[Output], deltas: Sequence[OutputDelta]) -> Json:
        *_, last = *self._push(deltas[0]), *self._end(outputs[0])
        return last["response"]

    async def stream(self, group: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[Json]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))
        async for deltas in responses.follow(group, outputs):
            for event in self._push(deltas[0]):
                yield event
        for event in self._end(outputs[0]):
            yield event

    def _push(self, delta: OutputDelta) -> Iterator[Json]:
        """Appends a part of the output; yields its events."""
        for part in self.parts_of(delta):
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._kind:
                yield from self._close("completed")
                yield from self._open(part)
            if part.kind != "call":
                yield from self._append(part.text)

    def _end(self, output: Output) -> Iterator[Json]:
        """Ends the response; yields the last events."""
        status = _STATUSES.get(output.finish_reason, "completed")
        yield from self._close("incomplete" if status == "incomplete" else "completed")
        counts = responses.usage(self.request, [output])
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        response = self._response(status)
        response["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "failed":
            message = "the output ended before it matched its grammar"
            response["error"] = {"code": "server_error", "message": message}
        yield self._event(f"response.{status}", response=response)

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status, "output": list(self._items)}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _item_event(self, kind: str, **fields: Any) -> Json:
        """Returns an event of the open item, or of its only part."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        if self._kind in _TEXTS:
            place["content_index"] = 0
        return self._event(f"response.{kind}", **place, **fields)

    def _open(self, part: OutputPart) -> Iterator[Json]:
        self._kind = "call" if part.kind == "arguments" else part.kind
        item = _new_item(part)
        self._items.append(item)
        # Clients append to what the events have, which must not be what is appended to here.
        shown = {**item, **{name: [] for name in ("content",) if name in item}}
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=shown
        )
        if self._kind in _TEXTS:
            yield self._item_event("content_part.added", part=dict(item["content"][0]))

    def _append(self, text: str) -> Iterator[Json]:
        if self._kind not in _TEXTS:
            self._items[-1]["arguments"] += text
            yield self._item_event("function_call_arguments.delta", delta=text)
            return
        part = self._items[-1]["content"][0]
        part["text"] += text
        logprobs = {"logprobs": []} if self._kind == "content" else {}
        yield self._item_event(f"{part['type']}.delta", delta=text, **logprobs)

    def _close(self, status: str) -> Iterator[Json]:
        if self._kind is None:
            return
        item = self._items[-1]
        item["status"] = status
        if self._kind in _TEXTS:
            part = item["content"][0]
            logprobs = {"logprobs": []} if self._kind == "content" else {}
            yield self._item_event(f"{part['type']}.done", text=part["text"], **logprobs)
            yield self._item_event("content_part.done", part=part)
        else:
            yield self._item_event(
                "function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        self._kind = None
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)


def _new_item(part: OutputPart) -> Json:
    number = uuid.uuid4().hex
    if part.kind in _TEXTS:
        text = {"type": _TEXTS[part.kind], "text": ""}
        if part.kind == "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [text]}
        else:
            text |= {"annotations": [], "logprobs": []}
            item = {
                "id": f"msg_{number}",
                "type": "message",
                "role": "assistant",
                "content": [text],
            }
        return item | {"status": "in_progress"}
    call = responses.call_of(part)
    return {
        "id": f"fc_{number}",
        "type": "function_call",
        "call_id": call["id"],
        "name": part.text,
        "arguments": "",
        "status": "in_progress",
    }


def _head(id: str, fields: ResponsesBody, request: CompletionRequest, model: ServedModel) -> Json:
    form = fields.text.format
    return {
        "id": id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model.served_names[request.adapter],
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": False,
        "temperature": request.sampling.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) | {"type": form.type}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": list(fields.tools),
        "top_p": request.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }
