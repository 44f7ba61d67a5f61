"""JSON responses in the formats of OpenAI and SGLang, whole and as streams."""

import collections
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from dflash import errors
from dflash.inference.request import RequestOutput, Tokens
from dflash.serving.completion_request import CompletionRequest, ResponseOptions
from dflash.serving.output import Output, OutputDelta, TokenText
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.serving.validation import RequestError
from dflash.text.chat_formats.reader import OutputPart

Json = dict[str, Any]


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
    status = 400 if isinstance(done.error, errors.InputError) else 500
    return RequestError(message, status=status, code="failed")


async def wait_for_all(group: RequestGroup, outputs: Sequence[Output]) -> list[OutputDelta]:
    """Waits until all outputs have ended, and returns one delta per output.

    Raises:
      RequestError: The engine has failed, or the requests took too long.
    """
    sums = [OutputDelta() for _ in outputs]
    async for deltas in follow(group, outputs):
        for place, delta in deltas.items():
            sums[place] = sums[place].then(delta)
    return sums


class Answer:
    """JSON of one HTTP response: whole, or as the events of a stream."""

    def __init__(self, id: str, request: CompletionRequest, model: ServedModel):
        self.request, self._id, self._model = request, id, model

    def outputs(self, group: RequestGroup) -> list[Output]:
        """Returns an empty output for each request of the group."""
        requests, tokenizer = enumerate(group.requests), self._model.tokenizer
        return [Output(index, request, self.request, tokenizer) for index, request in requests]

    def parts_of(self, delta: OutputDelta) -> tuple[OutputPart, ...]:
        """Returns the parts of a piece of an output, of which a plain text is one."""
        if self.request.chat_format is None and delta.text:
            return (OutputPart("content", delta.text),)
        return delta.parts

    def body(self, outputs: Sequence[Output], deltas: Sequence[OutputDelta]) -> Any:
        """Returns the response for outputs that have ended, each with all of its parts."""
        raise NotImplementedError

    def stream(self, group: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[Json]:
        """Yields the events of a stream, which pushes what arrives to the outputs."""
        raise NotImplementedError


# --- OpenAI -------------------------------------------------------------------------------------


def usage(request: CompletionRequest, outputs: Sequence[Output]) -> Json:
    """Returns the token counts of a response so far."""
    output_tokens = sum(len(output.ids) for output in outputs)
    prompt_tokens = request.prompt_tokens
    # The outputs of a prompt share it; the first one shows how much was cached before.
    cached = sum(output.statistics.cached_tokens for output in outputs[:: request.choices])
    statistics = [output.statistics for output in outputs]
    accepted = sum(counts.accepted for counts in statistics)
    rejected = max(0, sum(counts.drafted for counts in statistics) - accepted)
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


class Completion(Answer):
    """Response of /v1/completions."""

    prefix, kinds = "cmpl-", ("text_completion", "text_completion")

    def __init__(self, id: str, request: CompletionRequest, model: ServedModel):
        super().__init__(f"{self.prefix}{id}", request, model)
        self._created = int(time.time())
        self._offsets: dict[int, int] = {}  # Characters of each output so far.
        self._sent: collections.Counter[int] = collections.Counter()  # Ids sent of each output.

    def body(self, outputs: Sequence[Output], deltas: Sequence[OutputDelta]) -> Json:
        choices = [self._choice(*pair) for pair in zip(outputs, deltas, strict=True)]
        answer = self._head(self.kinds[0])
        answer |= {"choices": choices, "usage": usage(self.request, outputs)}
        answer |= self._of_prompt(outputs)
        return answer | self._metrics(outputs)

    async def stream(self, group: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[Json]:
        options, head, once = self.request.options, self._head(self.kinds[1]), self._of_prompt(())
        async for deltas in follow(group, outputs):
            for place, delta in deltas.items():
                for choice in self._chunk_choices(outputs[place], delta):
                    chunk, once = {**head, **once, "choices": [choice]}, {}
                    if options.running_usage:
                        chunk["usage"] = usage(self.request, outputs)
                    elif options.usage:
                        chunk["usage"] = None
                    yield chunk
        if options.usage or options.metrics:
            last = {**head, "choices": [], "usage": usage(self.request, outputs)}
            yield last | self._metrics(outputs)

    def _head(self, kind: str) -> Json:
        name = self._model.served_names[self.request.adapter]
        return {"id": self._id, "object": kind, "created": self._created, "model": name}

    def _metrics(self, outputs: Sequence[Output]) -> Json:
        """Returns the field that reports accepted drafts in vLLM's form, if it is requested."""
        if not self.request.options.metrics:
            return {}
        statistics, most = outputs[0].statistics, self._model.drafts
        steps, accepted = statistics.accepted_drafts.total(), statistics.accepted
        drafted = statistics.drafted
        counts = {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": [
                statistics.accepted_drafts[count] for count in range(most + 1)
            ],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": most,
        }
        return {"metrics": {"speculative_decoding": counts}}

    def _of_prompt(self, outputs: Sequence[Output]) -> Json:
        """Returns what an answer reports of its only prompt; empty where choices do."""
        del outputs
        return {}

    def _chunk_choices(self, output: Output, delta: OutputDelta) -> Iterator[Json]:
        yield self._choice(output, delta)

    def _choice(self, output: Output, delta: OutputDelta) -> Json:
        options, text, echoed = self.request.options, delta.text, ()
        if options.echo and output.index not in self._offsets:
            prompt = self._model.tokenizer.decode(
                output.request.prompt, special_tokens=options.special_tokens
            )
            text, echoed = prompt + text, _echoed(output, self._model, options.logprobs)
            self._offsets[output.index] = len(prompt)
        logprobs = None
        if options.logprobs is not None:
            begin = self._offsets.get(output.index, 0)
            logprobs = _completion_logprobs(echoed, delta.tokens, self._model, begin)
            self._offsets[output.index] = begin + sum(len(token.text) for token in delta.tokens)
        fields = {"text": text, "logprobs": logprobs}
        if options.prompt_logprobs is not None:
            fields["prompt_logprobs"] = _prompt_logprobs(output, self._model, options)
        return self._ended(fields, output, delta)

    def _ended(self, fields: Json, output: Output, delta: OutputDelta) -> Json:
        """Returns a choice with its index, the reason of its end, and drafts if requested."""
        choice = {"index": output.index, **fields, "finish_reason": None, "stop_reason": None}
        if delta.is_last:
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if self.request.options.token_ids:
            choice |= self._token_ids(output)
        return choice | (_drafts(output, delta) if self.request.options.drafts else {})

    def _token_ids(self, output: Output) -> Json:
        """Returns the ids of an output since the last call, and at first those of its prompt."""
        is_first = output.index not in self._sent
        ids = {"token_ids": output.ids[self._sent[output.index] :]}
        self._sent[output.index] = len(output.ids)
        return ids | ({"prompt_token_ids": list(output.request.prompt)} if is_first else {})


class Chat(Completion):
    """Response of /v1/chat/completions."""

    prefix, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def __init__(self, id: str, request: CompletionRequest, model: ServedModel):
        super().__init__(id, request, model)
        self._begun: set[int] = set()  # Outputs whose role was sent.
        self._calls: collections.Counter[int] = collections.Counter()  # Calls so far, by output.

    def _of_prompt(self, outputs: Sequence[Output]) -> Json:
        options, fields = self.request.options, {}
        if options.token_ids:
            fields["prompt_token_ids"] = list(self.request.prompts[0])
        if options.prompt_logprobs is not None:
            fields["prompt_logprobs"] = _prompt_logprobs(outputs[0], self._model, options)
        return fields

    def _token_ids(self, output: Output) -> Json:
        return {"token_ids": super()._token_ids(output)["token_ids"]}

    def _choice(self, output: Output, delta: OutputDelta) -> Json:
        message = {"role": "assistant", **_message(self.request, delta)}
        return self._ended({"message": message, **self._logprobs(delta)}, output, delta)

    def _chunk_choices(self, output: Output, delta: OutputDelta) -> Iterator[Json]:
        if output.index not in self._begun:
            self._begun.add(output.index)
            role = {"role": "assistant", "content": ""}
            yield {"index": output.index, "delta": role, "logprobs": None, "finish_reason": None}
        for part in delta.split():
            if self.request.chat_format is None or not part.is_empty or output.ended:
                fields = {"delta": self._message_delta(output.index, part), "logprobs": None}
                if part.tokens:
                    fields |= self._logprobs(part)
                yield self._ended(fields, output, part)

    def _logprobs(self, delta: OutputDelta) -> Json:
        if self.request.options.logprobs is None:
            return {"logprobs": None}
        return {"logprobs": _chat_logprobs(delta.tokens, self._model)}

    def _message_delta(self, index: int, delta: OutputDelta) -> Json:
        if self.request.chat_format is None:
            return {"content": delta.text}
        message: Json = {}
        for part in delta.parts:
            self._calls[index] += part.kind == "call"
            message |= _message_delta(self.request, part, self._calls[index] - 1)
        return message


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


def _drafts(output: Output, delta: OutputDelta) -> Json:
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


def _completion_logprobs(
    echoed: Sequence[TokenText], tokens: Sequence[TokenText], model: ServedModel, begin: int
) -> Json:
    """Returns OpenAI's log-probabilities of a completion.

    Args:
      echoed: Tokens of the prompt, if the text begins with it; the first one has no probability.
      begin: Place in the text at which the others begin.
    """
    offsets = [
        place
        for start, run in ((0, echoed), (begin, tokens))
        for place in [*itertools.accumulate((len(token.text) for token in run), initial=start)][:-1]
    ]
    name, tokens = model.names.of, (*echoed, *tokens)
    tops = [(*token.top, (token.id, token.logprob)) for token in tokens]
    return {
        "tokens": [name(token.id) for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [
            None if logprob is None else {name(id): value for id, value in reversed(top)}
            for top, logprob in zip(tops, (token.logprob for token in tokens), strict=True)
        ],
        "text_offset": offsets,
    }


def _echoed(output: Output, model: ServedModel, num_top: int | None) -> tuple[TokenText, ...]:
    """Returns the tokens of a prompt with their log-probabilities, if these are known."""
    if num_top is None:
        return ()
    first, name = output.request.prompt[0], model.names.of
    others = (
        TokenText(
            token.id,
            name(token.id),
            token.logprob,
            tuple(zip(token.top_ids, token.top_logprobs, strict=True))[:num_top],
        )
        for token in output.prompt_tokens
    )
    return TokenText(first, name(first), None, ()), *others


def _prompt_logprobs(output: Output, model: ServedModel, options: ResponseOptions) -> list[Any]:
    """Returns vLLM's log-probabilities of a prompt: by token, and null for the first one."""

    def named(id: int, logprob: float, rank: int) -> Json:
        return {"logprob": logprob, "rank": rank, "decoded_token": model.names.of(id)}

    positions: list[Any] = [None]
    for token in output.prompt_tokens:
        top = zip(token.top_ids, token.top_logprobs, strict=True)
        likeliest = list(top)[: options.prompt_logprobs]
        entries = {id: named(id, value, rank) for rank, (id, value) in enumerate(likeliest, 1)}
        positions.append(entries | {token.id: named(token.id, token.logprob, token.rank)})
    return positions


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


class Generated(Answer):
    """Response of SGLang's /generate; the events of a stream have the whole text so far."""

    def __init__(
        self,
        id: str,
        request: CompletionRequest,
        model: ServedModel,
        *,
        several: bool,
        started_at: float,
    ):
        """Begins a response.

        Args:
          several: Whether the response is a list.
          started_at: Arrival of the HTTP request, in seconds of time.perf_counter.
        """
        super().__init__(id, request, model)
        self._several, self._started_at = several, started_at

    def body(self, outputs: Sequence[Output], deltas: Sequence[OutputDelta]) -> Any:
        pairs = zip(outputs, deltas, strict=True)
        objects = [self._object(output, delta.tokens) for output, delta in pairs]
        return objects if self._several else objects[0]

    async def stream(self, group: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[Json]:
        tokens: list[TokenText] = []
        async for deltas in follow(group, outputs):
            tokens += [token for delta in deltas.values() for token in delta.tokens]
            yield self._object(outputs[0], tokens)

    def _object(self, output: Output, tokens: Sequence[TokenText]) -> Json:
        statistics, count = output.statistics, len(output.ids)
        cycles, drafted = statistics.cycles, statistics.drafted
        meta: Json = {
            "id": self._id,
            "finish_reason": _sglang_ending(output),
            "prompt_tokens": len(output.request.prompt),
            "completion_tokens": count,
            "cached_tokens": statistics.cached_tokens,
            "e2e_latency": time.perf_counter() - self._started_at,
        }
        if self._model.drafts:
            meta |= {
                "spec_verify_ct": cycles,
                # SGLang counts the first token too, which comes from the prefill.
                "spec_accept_length": count / cycles if cycles else float(count),
                "spec_accept_rate": statistics.accepted / drafted if drafted else 0.0,
                "spec_accept_token_num": statistics.accepted,
                "spec_draft_token_num": drafted,
            }
        if self.request.options.logprobs is not None:
            name = self._model.names.of
            meta["output_token_logprobs"] = [
                [token.logprob, token.id, name(token.id)] for token in tokens
            ]
            meta["output_top_logprobs"] = [
                [[logprob, id, name(id)] for id, logprob in token.top] for token in tokens
            ]
        return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}


def _sglang_ending(output: Output) -> Json | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(output.ids)}
        case reason:
            return {"type": reason, "matched": output.stop_reason}
