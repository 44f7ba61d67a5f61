"""Anthropic's /v1/messages: bodies, the chats that they stand for, and the answers.

Clients add fields with each release, so that unknown ones have no effect; those that would change
an answer and cannot be honoured are errors.
"""

import contextlib
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import pydantic
from pydantic import Field

from dflash import errors
from dflash.serving import responses
from dflash.serving.bodies import OF_CHATS, Body, Limit, Stops
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.output import Output, OutputDelta
from dflash.serving.responses import Json
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.serving.validation import RequestError, only, unsupported
from dflash.text import jsonl
from dflash.text.chat_formats.reader import Kind, OutputPart

PATH = "/v1/messages"
# Fields of chats by another name, and their names here.
NAMES = {
    "stop": "stop_sequences",
    "max_thinking_tokens": "thinking.budget_tokens",
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "response_format": "output_config.format",
    "continue_final_message": "messages",
}
# Line of Claude Code that differs in each request, after which no cached prefix would be found.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n*")
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORT = "reasoning_effort"


class MessagesBody(Body):
    """Body of /v1/messages and of /v1/messages/count_tokens."""

    model_config = pydantic.ConfigDict(extra="ignore", strict=True, frozen=True)

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: Limit = None
    system: str | list[dict[str, Any]] = ""
    stop_sequences: Stops = ()
    tools: list[dict[str, Any]] = ()
    tool_choice: dict[str, Any] = Field(default_factory=dict)
    thinking: dict[str, Any] = Field(default_factory=dict)
    output_config: dict[str, Any] = Field(default_factory=dict)
    container: only({}) = None
    mcp_servers: only([]) = None


def chat_of(fields: MessagesBody, body: Mapping[str, Any], model: ServedModel) -> dict[str, Any]:
    """Returns the body of the chat that a request stands for.

    Args:
      body: The same body as the client sent it.
    Raises:
      RequestError: A block or a tool is of a kind that is not supported; the error names it.
    """
    messages = _messages(fields)
    chat = {name: body.get(name) for name in (*OF_CHATS, "max_tokens")}
    chat |= {"messages": messages, "stop": list(fields.stop_sequences)}
    if messages and messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    chat["tools"] = [_tool(tool, place) for place, tool in enumerate(fields.tools)]
    choice = fields.tool_choice
    if chat["tools"] and choice:
        kind, kinds = _field(choice, "type", "tool_choice"), ("tool", *_CHOICES)
        if kind not in kinds:
            message = f"tool_choice.type: expected one of {', '.join(kinds)}; got "
            raise RequestError(message + jsonl.quote(kind), param="tool_choice.type")
        name = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _CHOICES.get(kind, name)
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    if fields.output_config.get("format") is not None:
        form = _field(fields.output_config, "format", "output_config", dict)
        schema = {"schema": form.get("schema")}
        chat["response_format"] = {"type": form.get("type"), "json_schema": schema}
    return chat | _reasoning(fields, model)


def _reasoning(fields: MessagesBody, model: ServedModel) -> dict[str, Any]:
    """Returns the fields of a chat about reasoning, as far as the model has a choice."""
    settings: dict[str, Any] = {}
    thinks = fields.thinking.get("type", "disabled") != "disabled"
    if model.tokenizer.switches_thinking and not model.chat_format.has_unknown_reasoning:
        settings["enable_thinking"] = thinks
    budget = fields.thinking.get("budget_tokens")
    if thinks and budget is not None and model.chat_format.reasons:
        settings["max_thinking_tokens"] = budget
    effort = fields.output_config.get("effort")
    reasons = settings.get("enable_thinking", thinks or model.chat_format.reasons)
    if reasons and effort is not None and _EFFORT in model.tokenizer.chat_template:
        settings[_EFFORT] = effort
    return settings


def _messages(fields: MessagesBody) -> list[dict[str, Any]]:
    """Returns the messages of a chat."""
    system = _texts(fields.system, "system")
    system = [rest for text in system if (rest := _BILLING.sub("", text))]
    messages, later = [], []
    for place, message in enumerate(fields.messages):
        where = f"messages[{place}]"
        role, content = _field(message, "role", where), message.get("content")
        if role == "system":
            (later if messages else system).extend(_texts(content, f"{where}.content"))
        elif role == "assistant":
            messages.append(_answer(content, f"{where}.content"))
        else:
            messages += _questions(content, f"{where}.content")
        # A system message within a conversation stays where it is, at the end of the text or the
        # result before it: at the head, it would change all that follows, and templates drop
        # reasoning before the last turn of a user.
        if later and messages[-1]["role"] != "assistant":
            messages[-1]["content"] = "\n\n".join([messages[-1]["content"], *later])
            later = []
    if later:
        messages.append({"role": "user", "content": "\n\n".join(later)})
    head = [{"role": "system", "content": "\n\n".join(system)}] if system else []
    return [*head, *messages]


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Yields type, block and place of the parts of a content; a text counts as one."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        expected = f"expected a string or a list of blocks; got {jsonl.quote(content)}"
        raise RequestError(f"{where}: {expected}", param=where)
    for place, block in enumerate(blocks):
        yield block.get("type"), block, f"{where}[{place}]"


def _field(block: Mapping[str, Any], name: str, where: str, kind: type = str) -> Any:
    value, place = block.get(name), f"{where}.{name}"
    if not isinstance(value, kind):
        expected = {str: "a string", dict: "an object"}[kind]
        raise RequestError(f"{place}: expected {expected}; got {jsonl.quote(value)}", param=place)
    try:
        jsonl.check_unicode(json.dumps(value, ensure_ascii=False), place)
    except errors.InputError as error:
        raise RequestError(str(error), param=place) from error
    return value


def _refuse(kind: Any, where: str) -> RequestError:
    return unsupported(f"{where}.type", f"{jsonl.quote(kind)} is not supported")


def _texts(content: Any, where: str) -> list[str]:
    texts = []
    for kind, block, place in _blocks(content, where):
        if kind != "text":
            raise _refuse(kind, place)
        texts.append(_field(block, "text", place))
    return list(filter(None, texts))


def _questions(content: Any, where: str) -> list[dict[str, Any]]:
    """Returns a message for each result in a user's message, and one for its texts."""
    messages, texts = [], []
    for kind, block, place in _blocks(content, where):
        if kind == "tool_result":
            id, result = _field(block, "tool_use_id", place), block.get("content") or ""
            text = "\n".join(_texts(result, f"{place}.content"))
            messages.append({"role": "tool", "tool_call_id": id, "content": text})
        elif kind == "text":
            texts.append(_field(block, "text", place))
        else:
            raise _refuse(kind, place)
    if texts or not messages:
        messages.append({"role": "user", "content": "\n\n".join(texts)})
    return messages


def _answer(content: Any, where: str) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for kind, block, place in _blocks(content, where):
        if kind == "text":
            texts.append(_field(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_field(block, "thinking", place))
        elif kind == "tool_use":
            arguments = json.dumps(_field(block, "input", place, dict), ensure_ascii=False)
            function = {"name": _field(block, "name", place), "arguments": arguments}
            id = _field(block, "id", place)
            calls.append({"id": id, "type": "function", "function": function})
        elif kind != "redacted_thinking":  # That of another server, which none else can read.
            raise _refuse(kind, place)
    message = {"role": "assistant", "content": "\n\n".join(texts) or None}
    message |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
    return message | ({"tool_calls": calls} if calls else {})


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type", "custom") not in ("custom", None):
        raise _refuse(tool["type"], f"tools[{place}]")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def renamed(error: RequestError) -> RequestError:
    """Returns the error of a chat with the names of the fields of /v1/messages."""
    message = error.message.replace(".function.parameters", ".input_schema")
    message = message.replace(".function.", ".")
    if error.code == "context_length_exceeded" and error.param != "max_tokens":
        message = f"prompt is too long: {message}"  # by which clients shorten the conversation
    for name, here in NAMES.items():
        if re.match(rf"{name}\b", error.param or ""):
            message = message.replace(name, here, 1)
    return error.renamed(message, error.param)


class MessageAnswer(responses.Answer):
    """Response of /v1/messages, built from the parts of its only output."""

    def __init__(self, id: str, request: CompletionRequest, model: ServedModel):
        super().__init__(f"msg_{id}", request, model)
        self._blocks: list[Json] = []
        self._kind: Kind | None = None  # Kind of the last block while it is open.

    def body(self, outputs: Sequence[Output], deltas: Sequence[OutputDelta]) -> Json:
        for _ in (*self._push(deltas[0]), *self._close()):
            pass
        blocks = [dict(block) for block in self._blocks]
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = _parsed(block["input"])
        ending = self._ending(outputs[0])
        return self._message() | ending | {"content": blocks, "usage": self._usage(outputs)}

    async def stream(self, group: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[Json]:
        begun = False
        async for deltas in responses.follow(group, outputs):
            if not begun:
                usage = self._usage(outputs) | {"output_tokens": 0}
                yield {"type": "message_start", "message": self._message() | {"usage": usage}}
            begun = True
            for event in self._push(deltas[0]):
                yield event
        for event in self._close():
            yield event
        ending = {"delta": self._ending(outputs[0]), "usage": self._usage(outputs)}
        yield {"type": "message_delta", **ending}
        yield {"type": "message_stop"}

    def _message(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.served_names[self.request.adapter],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage(self, outputs: Sequence[Output]) -> Json:
        counts = responses.usage(self.request, outputs)
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": counts["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
        }

    def _ending(self, output: Output) -> Json:
        if output.finish_reason not in _ENDS:
            message = "the output ended before it matched its grammar"
            raise RequestError(message, status=500, code="failed")
        stop = output.stop_reason if isinstance(output.stop_reason, str) else None
        if output.finish_reason == "stop" and stop is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stop}
        return {"stop_reason": _ENDS[output.finish_reason], "stop_sequence": None}

    def _push(self, delta: OutputDelta) -> Iterator[Json]:
        """Appends a part of the output; yields its events."""
        for part in self.parts_of(delta):
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._kind:
                yield from self._close()
                yield self._open(part)
            if part.kind != "call":
                yield self._append(part.text)

    def _open(self, part: OutputPart) -> Json:
        self._kind = part.kind
        if part.kind == "call":
            id = part.id or f"toolu_{uuid.uuid4().hex[:24]}"
            block = {"type": "tool_use", "id": id, "name": part.text, "input": ""}
        elif part.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self._blocks.append(block)
        shown = block | ({"input": {}} if part.kind == "call" else {})
        return self._event("content_block_start", content_block=shown)

    def _append(self, text: str) -> Json:
        name, kind = {
            "call": ("input", "input_json_delta"),
            "reasoning": ("thinking", "thinking_delta"),
            "content": ("text", "text_delta"),
        }[self._kind]
        self._blocks[-1][name] += text
        field = "partial_json" if self._kind == "call" else name
        return self._event("content_block_delta", delta={"type": kind, field: text})

    def _close(self) -> Iterator[Json]:
        if self._kind == "reasoning":
            # Clients send it back; nothing here depends on it.
            signature = self._blocks[-1]["signature"] = uuid.uuid4().hex
            delta = {"type": "signature_delta", "signature": signature}
            yield self._event("content_block_delta", delta=delta)
        if self._kind is not None:
            yield self._event("content_block_stop")
        self._kind = None

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _parsed(arguments: str) -> Any:
    """Returns the arguments of a call, which are none where it is cut off."""
    with contextlib.suppress(ValueError):
        return json.loads(arguments)
    return {}
