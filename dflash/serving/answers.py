"""Follows the events of a call, and makes OpenAI's and SGLang's JSON of its outputs."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from dflash.inference.request import Tokens
from dflash.serving.ask import Ask, Model
from dflash.serving.output import Delta, Output, TokenText
from dflash.serving.served_requests import RequestGroup

Json = dict[str, Any]
# Of an output and what it has gained: a choice, or a chunk's.
Choice = Callable[[Output, Delta], Json]


def outputs_of(ask: Ask, call: RequestGroup, model: Model) -> list[Output]:
    """The outputs of a call, none of which has said anything."""
    return [Output(i, request, ask, model) for i, request in enumerate(call.requests)]


async def follow(call: RequestGroup, outputs: Sequence[Output]) -> AsyncIterator[dict[int, Delta]]:
    """Yields what outputs gain, by their index, each time all that has come.

    Raises:
      Refusal: see `RequestGroup.events`.
    """
    async for news in call.events():
        deltas: dict[int, Delta] = {}
        for place, event in news:
            output = outputs[place]
            if isinstance(event, Tokens):
                if output.ended:
                    continue
                delta = output.push(event)
                if output.ended:
                    call.cancel([place], "stop")
            else:
                delta = output.finish(event)
            deltas[place] = deltas.get(place, Delta()).then(delta)
        if deltas:
            yield deltas


async def all_of(call: RequestGroup, outputs: Sequence[Output]) -> list[Delta]:
    """Waits for all outputs; returns each as one delta.

    Raises:
      Refusal: see `RequestGroup.events`.
    """
    whole = [Delta() for _ in outputs]
    async for deltas in follow(call, outputs):
        for place, delta in deltas.items():
            whole[place] = whole[place].then(delta)
    return whole


# --- OpenAI's -----------------------------------------------------------------------------------


def usage(ask: Ask, outputs: Sequence[Output]) -> Json:
    """Token counts of an answer, so far."""
    output_tokens = sum(len(output.ids) for output in outputs)
    prompt_tokens = ask.prompt_tokens
    every = [output.statistics for output in outputs]
    accepted = sum(one.accepted for one in every)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in every)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, sum(one.drafted for one in every) - accepted),
        },
    }


def envelope(kind: str, id: str, model: Model) -> Json:
    """What all chunks of an answer begin with."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model.name}


def text_choice(ask: Ask, model: Model) -> Choice:
    """Choices of /v1/completions, whole or in chunks."""
    offsets: dict[int, int] = {}

    def choice(output: Output, delta: Delta) -> Json:
        text = delta.text
        if ask.show.echo and output.index not in offsets:
            prompt = model.tokenizer.decode(
                output.request.prompt, special_tokens=ask.show.special_tokens
            )
            text = prompt + text
            offsets[output.index] = len(prompt)
        logprobs = None
        if ask.show.logprobs is not None:
            begin = offsets.get(output.index, 0)
            logprobs = _completion_logprobs(delta.tokens, model, begin)
            offsets[output.index] = begin + sum(len(one.text) for one in delta.tokens)
        said = {"index": output.index, "text": text, "logprobs": logprobs}
        return said | _ending(output) | _drafts(ask, output, delta)

    return choice


def chat_choice(ask: Ask, model: Model) -> Choice:
    """Choices of /v1/chat/completions."""

    def choice(output: Output, delta: Delta) -> Json:
        message = {"role": "assistant", "content": delta.text}
        said = {"index": output.index, "message": message, "logprobs": None}
        if ask.show.logprobs is not None:
            said["logprobs"] = _chat_logprobs(delta.tokens, model)
        return said | _ending(output) | _drafts(ask, output, delta)

    return choice


def chat_chunk_choice(ask: Ask, model: Model) -> Choice:
    """Choices of the chunks of /v1/chat/completions."""

    def choice(output: Output, delta: Delta) -> Json:
        said = {"index": output.index, "delta": {"content": delta.text}, "logprobs": None}
        if ask.show.logprobs is not None and delta.tokens:
            said["logprobs"] = _chat_logprobs(delta.tokens, model)
        return said | _ending(output) | _drafts(ask, output, delta)

    return choice


async def chunks(
    ask: Ask, call: RequestGroup, model: Model, head: Json, choice: Choice, *, roles: bool
) -> AsyncIterator[Json]:
    """The chunks of a stream, in OpenAI's form.

    Args:
      ask: what was asked for.
      call: its requests.
      model: what answers.
      head: what every chunk begins with.
      choice: makes a choice.
      roles: whether each output begins with a chunk that names its role, as chats do.
    """
    outputs, begun = outputs_of(ask, call, model), set()

    def chunk(choices: list[Json]) -> Json:
        made = {**head, "choices": choices}
        if ask.show.running_usage:
            made["usage"] = usage(ask, outputs)
        elif ask.show.usage:
            made["usage"] = None
        return made

    async for deltas in follow(call, outputs):
        for place, delta in deltas.items():
            output = outputs[place]
            if roles and place not in begun:
                begun.add(place)
                role = {"role": "assistant", "content": ""}
                said = {"index": place, "delta": role, "logprobs": None, "finish_reason": None}
                yield chunk([said])
            yield chunk([choice(output, delta)])
    if ask.show.usage:
        yield {**head, "choices": [], "usage": usage(ask, outputs)}


def _ending(output: Output) -> Json:
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def _drafts(ask: Ask, output: Output, delta: Delta) -> Json:
    """What a choice says of its drafts, where that is asked for."""
    if not ask.show.drafts:
        return {}
    found = output.statistics
    return {
        "dflash": {
            "pieces": [list(piece) for piece in delta.pieces],
            "tokens": len(output.ids),
            "cycles": found.cycles,
            "accepted": found.accepted,
            "tau": found.tau,
        }
    }


def _completion_logprobs(tokens: Sequence[TokenText], model: Model, begin: int) -> Json:
    offsets = []
    for one in tokens:
        offsets.append(begin)
        begin += len(one.text)
    names = model.names.of
    return {
        "tokens": [names(one.id) for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [
            {
                names(token): logprob
                for token, logprob in reversed((*one.top, (one.id, one.logprob)))
            }
            for one in tokens
        ],
        "text_offset": offsets,
    }


def _chat_logprobs(tokens: Sequence[TokenText], model: Model) -> Json:
    def named(token: int, logprob: float) -> Json:
        encoded = list(model.names.bytes_of(token))
        return {"token": model.names.of(token), "logprob": logprob, "bytes": encoded}

    content = [
        named(one.id, one.logprob)
        | {"top_logprobs": [named(token, logprob) for token, logprob in one.top]}
        for one in tokens
    ]
    return {"content": content, "refusal": None}


# --- SGLang's -----------------------------------------------------------------------------------


def generated(
    ask: Ask, output: Output, model: Model, tokens: Sequence[TokenText], *, id: str, begun_at: float
) -> Json:
    """An object of /generate: the whole text so far, and what it was made of.

    Args:
      ask: what was asked for.
      output: so far.
      model: what answers.
      tokens: all of them, where log-probabilities are asked for.
      id: of the request.
      begun_at: its time, in seconds of time.perf_counter.
    """
    found, count = output.statistics, len(output.ids)
    meta: Json = {
        "id": id,
        "finish_reason": _sglang_ending(output),
        "prompt_tokens": len(output.request.prompt),
        "completion_tokens": count,
        "cached_tokens": found.cached_tokens,
        "e2e_latency": time.perf_counter() - begun_at,
    }
    if model.drafts:
        meta |= {
            "spec_verify_ct": found.cycles,
            # By its definition there, the first token counts, which no cycle has made.
            "spec_accept_length": count / found.cycles if found.cycles else float(count),
            "spec_accept_rate": found.accepted / found.drafted if found.drafted else 0.0,
            "spec_accept_token_num": found.accepted,
            "spec_draft_token_num": found.drafted,
        }
    if ask.show.logprobs is not None:
        names = model.names.of
        meta["output_token_logprobs"] = [[one.logprob, one.id, names(one.id)] for one in tokens]
        meta["output_top_logprobs"] = [
            [[logprob, token, names(token)] for token, logprob in one.top] for one in tokens
        ]
    return {"text": output.text, "output_ids": list(output.ids), "meta_info": meta}


async def generated_chunks(
    ask: Ask, call: RequestGroup, model: Model, *, id: str, begun_at: float
) -> AsyncIterator[Mapping[str, Any]]:
    """The chunks of a stream of /generate, each with all that was said so far."""
    outputs, tokens = outputs_of(ask, call, model), []
    async for deltas in follow(call, outputs):
        tokens += [one for delta in deltas.values() for one in delta.tokens]
        yield generated(ask, outputs[0], model, tokens, id=id, begun_at=begun_at)


def _sglang_ending(output: Output) -> Json | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(output.ids)}
        case reason:
            return {"type": reason, "matched": output.stop_reason}
