"""JSON responses in the formats of OpenAI and SGLang, whole and as streams."""

import collections
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.inference.request import RequestOutput, Tokens
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.output import Output, OutputDelta, TokenText
from dflash.serving.request_error import RequestError, unavailable
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.text.chat_formats.reader import OutputPart

Json = dict[str, Any]
# Returns the "choice" object of a response or of a chunk, for an output and its newest part.
Choice = Callable[[Output, OutputDelta], Json]


def outputs_of(request: CompletionRequest, group: RequestGroup, model: ServedModel) -> list[Output]:
    """Returns an empty output for each request of the group."""
    tokenizer = model.tokenizer
    return [Output(i, one, request, tokenizer) for i, one in enumerate(group.requests)]


async def follow(
    group: RequestGroup, outputs: Sequence[Output]
) -> AsyncIterator[dict[int, OutputDelta]]:
    """Yields the new parts of the outputs, keyed by output index, whenever some arrive.

    Raises:
      RequestError: The engine or one of the requests has failed, or they took too long.
    """
    async for events in group.events():
        deltas: dict[int, OutputDelta] = {}
        for place, event, now in events:
            output = outputs[place]
            if isinstance(event, Tokens):
                if output.ended:
                    continue
                before = len(output.ids)
                delta = output.push(event)
                group.count(place, event.first(len(output.ids) - before), now)
                if output.ended:
                    group.cancel([place], "stop")
            else:
                group.finish(place, event, now)
                if event.error is not None:
                    raise _failure(event)
                delta = output.finish(event)
            deltas[place] = deltas.get(place, OutputDelta()).then(delta)
        if deltas:
            yield deltas


def _failure(done: RequestOutput) -> RequestError:
    message = str(done.error).removeprefix(f"prompt {done.id}: ")
    if isinstance(done.error, errors.UnavailableError):
        return unavailable(message)
    status = 400 if isinstance(done.error, errors.InputError) else 500
    return RequestError(message, status=status, code="failed")


async def wait_for_all(group: RequestGroup, outputs: Sequence[Output]) -> list[OutputDelta]:
    """Waits until all outputs have ended, and returns one delta per output.

    Raises:
      RequestError: The engine has failed, or the requests took too long.
    """
    whole = [OutputDelta() for _ in outputs]
    async for deltas in follow(group, outputs):
        for place, delta in deltas.items():
            whole[place] = whole[place].then(delta)
    return whole


# --- OpenAI -------------------------------------------------------------------------------------


def usage(request: CompletionRequest, outputs: Sequence[Output]) -> Json:
    """Returns the token counts of a response so far."""
    output_tokens = sum(len(output.ids) for output in outputs)
    prompt_tokens = request.prompt_tokens
    # The outputs of a prompt share it; the first one shows how much was cached before.
    cached = sum(output.statistics.cached_tokens for output in outputs[:: request.choices])
    statistics = [output.statistics for output in outputs]
    accepted = sum(one.accepted for one in statistics)
    rejected = max(0, sum(one.drafted for one in statistics) - accepted)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def metrics(request: CompletionRequest, outputs: Sequence[Output], model: ServedModel) -> Json:
    """Returns the field that reports accepted drafts in vLLM's form, if a request asks for it."""
    if not request.options.metrics:
        return {}
    histogram = outputs[0].statistics.accepted_drafts
    steps, accepted = histogram.total(), outputs[0].statistics.accepted
    drafted = outputs[0].statistics.drafted
    counts = {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [histogram[count] for count in range(model.drafts + 1)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": model.drafts,
    }
    return {"metrics": {"speculative_decoding": counts}}


def envelope(kind: str, id: str, request: CompletionRequest, model: ServedModel) -> Json:
    """Returns the fields that a response, or each chunk of a stream, begins with."""
    name = model.served_names[request.adapter]
    return {"id": id, "object": kind, "created": int(time.time()), "model": name}


def text_choice(request: CompletionRequest, model: ServedModel) -> Choice:
    """Returns a function that builds the choices of /v1/completions, whole or in chunks."""
    offsets: dict[int, int] = {}
    options = request.options

    def choice(output: Output, delta: OutputDelta) -> Json:
        text = delta.text
        if options.echo and output.index not in offsets:
            prompt = model.tokenizer.decode(
                output.request.prompt, special_tokens=options.special_tokens
            )
            text = prompt + text
            offsets[output.index] = len(prompt)
        logprobs = None
        if options.logprobs is not None:
            begin = offsets.get(output.index, 0)
            logprobs = _completion_logprobs(delta.tokens, model, begin)
            offsets[output.index] = begin + sum(len(token.text) for token in delta.tokens)
        fields = {"index": output.index, "text": text, "logprobs": logprobs}
        return fields | _ending(output, delta) | _drafts(request, output, delta)

    return choice


def chat_choice(request: CompletionRequest, model: ServedModel) -> Choice:
    """Returns a function that builds the choices of /v1/chat/completions."""

    def choice(output: Output, delta: OutputDelta) -> Json:
        message = {"role": "assistant", **_message(request, delta)}
        fields = {"index": output.index, "message": message, "logprobs": None}
        if request.options.logprobs is not None:
            fields["logprobs"] = _chat_logprobs(delta.tokens, model)
        return fields | _ending(output, delta) | _drafts(request, output, delta)

    return choice


def chat_chunk_choice(request: CompletionRequest, model: ServedModel) -> Choice:
    """Returns a function that builds the choices of the chunks of /v1/chat/completions."""

    calls: collections.Counter[int] = collections.Counter()  # Calls so far, by output.

    def choice(output: Output, delta: OutputDelta) -> Json:
        if request.chat_format is None:
            message = {"content": delta.text}
        else:
            message = {}
            for part in delta.parts:
                calls[output.index] += part.kind == "call"
                message |= _message_delta(request, part, calls[output.index] - 1)
        fields = {"index": output.index, "delta": message, "logprobs": None}
        if request.options.logprobs is not None and delta.tokens:
            fields["logprobs"] = _chat_logprobs(delta.tokens, model)
        return fields | _ending(output, delta) | _drafts(request, output, delta)

    return choice


def _message(request: CompletionRequest, delta: OutputDelta) -> Json:
    if request.chat_format is None:
        return {"content": delta.text}
    texts, calls = {"content": "", "reasoning": ""}, []
    for part in delta.parts:
        if part.kind == "call":
            calls.append(call_of(part) | {"function": {"name": part.text, "arguments": ""}})
        elif part.kind == "arguments":
            calls[-1]["function"]["arguments"] += part.text
        else:
            texts[part.kind] += part.text
    message = {"content": texts["content"] or (None if calls else "")}
    if texts["reasoning"] and request.options.reasoning:
        message["reasoning_content"] = texts["reasoning"]
    return message | ({"tool_calls": calls} if calls else {})


def _message_delta(request: CompletionRequest, part: OutputPart, index: int) -> Json:
    """Returns the delta of a message for a part of an answer, in call `index` if it is in one."""
    match part.kind:
        case "content":
            return {"content": part.text}
        case "reasoning":
            return {"reasoning_content": part.text} if request.options.reasoning else {}
        case "call":
            function = {"name": part.text, "arguments": ""}
            return {"tool_calls": [{"index": index, **call_of(part), "function": function}]}
        case "arguments":
            function = {"arguments": part.text}
            return {"tool_calls": [{"index": index, "function": function}]}


def call_of(part: OutputPart) -> Json:
    """Returns the id and the type of a tool call."""
    return {"id": part.id or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}


async def chunks(
    request: CompletionRequest,
    group: RequestGroup,
    model: ServedModel,
    head: Json,
    choice: Choice,
    *,
    roles: bool,
) -> AsyncIterator[Json]:
    """Yields the chunks of a stream in OpenAI's format.

    Args:
      request: Request of the client.
      group: Requests of the engine.
      model: Model that is served.
      head: Fields that every chunk begins with.
      choice: Function that builds the choices.
      roles: Begin each output with a chunk that names its role, as in chats.
    """
    outputs, begun = outputs_of(request, group, model), set()

    def chunk(choices: list[Json]) -> Json:
        fields = {**head, "choices": choices}
        if request.options.running_usage:
            fields["usage"] = usage(request, outputs)
        elif request.options.usage:
            fields["usage"] = None
        return fields

    async for deltas in follow(group, outputs):
        for place, delta in deltas.items():
            if roles and place not in begun:
                begun.add(place)
                role = {"role": "assistant", "content": ""}
                first = {"index": place, "delta": role, "logprobs": None, "finish_reason": None}
                yield chunk([first])
            for part in delta.split():
                output = outputs[place]
                if request.chat_format is None or not part.is_empty or output.ended:
                    yield chunk([choice(output, part)])
    if request.options.usage or request.options.metrics:
        last = {**head, "choices": [], "usage": usage(request, outputs)}
        yield last | metrics(request, outputs, model)


def _ending(output: Output, delta: OutputDelta) -> Json:
    if not delta.is_last:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _drafts(request: CompletionRequest, output: Output, delta: OutputDelta) -> Json:
    if not request.options.drafts:
        return {}
    statistics = output.statistics
    return {
        "dflash": {
            "pieces": [list(piece) for piece in delta.pieces],
            "tokens": len(output.ids),
            "cycles": statistics.cycles,
            "accepted": statistics.accepted,
            "tau": statistics.tau,
            "decode_ms": statistics.decode_ms,
        }
    }


def _completion_logprobs(tokens: Sequence[TokenText], model: ServedModel, begin: int) -> Json:
    offsets = []
    for token in tokens:
        offsets.append(begin)
        begin += len(token.text)
    name = model.names.of
    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            {name(id): logprob for id, logprob in reversed((*token.top, (token.id, token.logprob)))}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def _chat_logprobs(tokens: Sequence[TokenText], model: ServedModel) -> Json:
    def named(id: int, logprob: float) -> Json:
        encoded = list(model.names.bytes_of(id))
        return {"token": model.names.of(id), "logprob": logprob, "bytes": encoded}

    content = [
        named(token.id, token.logprob)
        | {"top_logprobs": [named(id, logprob) for id, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


# --- SGLang -------------------------------------------------------------------------------------


def generated(
    request: CompletionRequest,
    output: Output,
    model: ServedModel,
    tokens: Sequence[TokenText],
    *,
    id: str,
    started_at: float,
) -> Json:
    """Returns the response of /generate for an output: its text so far and its statistics.

    Args:
      request: Request of the client.
      output: Output so far.
      model: Model that is served.
      tokens: All tokens so far; used if log-probabilities are requested.
      id: Id of the HTTP request.
      started_at: Arrival of the HTTP request, in seconds of time.perf_counter.
    """
    statistics, count = output.statistics, len(output.ids)
    cycles, drafted = statistics.cycles, statistics.drafted
    meta: Json = {
        "id": id,
        "finish_reason": _sglang_ending(output),
        "prompt_tokens": len(output.request.prompt),
        "completion_tokens": count,
        "cached_tokens": statistics.cached_tokens,
        "e2e_latency": time.perf_counter() - started_at,
    }
    if model.drafts:
        meta |= {
            "spec_verify_ct": cycles,
            # SGLang counts the first token too, which comes from the prefill.
            "spec_accept_length": count / cycles if cycles else float(count),
            "spec_accept_rate": statistics.accepted / drafted if drafted else 0.0,
            "spec_accept_token_num": statistics.accepted,
            "spec_draft_token_num": drafted,
        }
    if request.options.logprobs is not None:
        name = model.names.of
        meta["output_token_logprobs"] = [[one.logprob, one.id, name(one.id)] for one in tokens]
        meta["output_top_logprobs"] = [
            [[logprob, token, name(token)] for token, logprob in one.top] for one in tokens
        ]
    return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}


async def generated_chunks(
    request: CompletionRequest,
    group: RequestGroup,
    model: ServedModel,
    *,
    id: str,
    started_at: float,
) -> AsyncIterator[Mapping[str, Any]]:
    """Yields the chunks of a stream of /generate, each with the whole text so far."""
    outputs, tokens = outputs_of(request, group, model), []
    async for deltas in follow(group, outputs):
        tokens += [token for delta in deltas.values() for token in delta.tokens]
        yield generated(request, outputs[0], model, tokens, id=id, started_at=started_at)


def _sglang_ending(output: Output) -> Json | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(output.ids)}
        case reason:
            return {"type": reason, "matched": output.stop_reason}
