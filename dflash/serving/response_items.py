"""Answers of OpenAI's /v1/responses: items of a conversation, and the events that stream them."""

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from dflash.serving import responses
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.output import Output, OutputDelta
from dflash.serving.response_bodies import ResponsesBody
from dflash.serving.responses import Json
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.text.chat_formats.reader import Kind, OutputPart

# Status of a response and its items by the finish reason of its output.
_STATUSES = {"length": "incomplete", "error": "failed"}
_TEXTS = {"content": "output_text", "reasoning": "reasoning_text"}


class ResponseBuilder:
    """Builds a response from the parts of an output, with the events of a stream."""

    def __init__(
        self, id: str, fields: ResponsesBody, request: CompletionRequest, model: ServedModel
    ):
        """Starts a response without items.

        Args:
          id: Id of the HTTP request.
          fields: Validated body.
          request: Request of the client.
          model: Model that is served.
        """
        self._request, self._model = request, model
        self._items: list[Json] = []
        self._kind: Kind | None = None  # Kind of the last item while it is open.
        self._number = 0  # Number of events.
        self._head = _head(f"resp_{id}", fields, request, model)

    def begin(self) -> Iterator[Json]:
        """Yields the events before the output."""
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def push(self, delta: OutputDelta) -> Iterator[Json]:
        """Appends a part of the output; yields its events."""
        parts = delta.parts
        if self._request.chat_format is None and delta.text:
            parts = (OutputPart("content", delta.text),)
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if part.kind == "call" or kind != self._kind:
                yield from self._close("completed")
                yield from self._open(part)
            if part.kind != "call":
                yield from self._append(part.text)

    def end(self, output: Output) -> Iterator[Json]:
        """Ends the response; yields the last events."""
        status = _STATUSES.get(output.finish_reason, "completed")
        yield from self._close("incomplete" if status == "incomplete" else "completed")
        yield self._event(f"response.{status}", response=self.response(output))

    def response(self, output: Output) -> Json:
        """Returns the whole response."""
        status = _STATUSES.get(output.finish_reason, "completed")
        counts = responses.usage(self._request, [output])
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
        return response

    def _response(self, status: str) -> Json:
        return {**self._head, "status": status, "output": list(self._items)}

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

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


async def events(
    builder: ResponseBuilder, request: CompletionRequest, group: RequestGroup, model: ServedModel
) -> AsyncIterator[Mapping[str, Any]]:
    """Yields the events of a streamed response."""
    outputs = responses.outputs_of(request, group, model)
    for event in builder.begin():
        yield event
    async for deltas in responses.follow(group, outputs):
        for event in builder.push(deltas[0]):
            yield event
    for event in builder.end(outputs[0]):
        yield event


def whole(builder: ResponseBuilder, output: Output, delta: OutputDelta) -> Json:
    """Returns a response that is not streamed."""
    for _ in (*builder.push(delta), *builder.end(output)):
        pass
    return builder.response(output)


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
