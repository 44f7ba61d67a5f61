"""The endpoints: OpenAI's, vLLM's and SGLang's, and the page."""

import asyncio
import dataclasses
import functools
import platform
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash import errors
from dflash.serving import answers, http, openai_requests, page, sglang_requests
from dflash.serving import ask as asks
from dflash.serving.ask import Ask, Model
from dflash.serving.fields import Fields, as_ids
from dflash.serving.http import EventStream, Guard, endpoint
from dflash.serving.metrics import CONTENT_TYPE
from dflash.serving.refusal import Refusal
from dflash.serving.service import Service, State
from dflash.version import __version__

_SMALL_BYTES = 2**15  # of a body; its text is tokens within a few milliseconds
# What probes, scrapers and the page's reader need no key for.
_OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version", "/metrics"))


def application(service: Service, *, key: str | None = None) -> ASGIApp:
    """The whole server as an ASGI application.

    Args:
      service: answers.
      key: what clients have to show; None: nothing.
    """
    endpoints = Endpoints(service)
    found = [
        ("/", "GET", endpoints.page),
        ("/health", "GET", endpoints.health),
        ("/ping", "GET POST", endpoints.health),
        ("/version", "GET", endpoints.version),
        ("/metrics", "GET", endpoints.metrics),
        ("/v1/models", "GET", endpoints.models),
        ("/v1/models/{name:path}", "GET", endpoints.one_model),
        ("/v1/completions", "POST", endpoints.completions),
        ("/v1/chat/completions", "POST", endpoints.chat_completions),
        ("/tokenize", "POST", endpoints.tokenize),
        ("/detokenize", "POST", endpoints.detokenize),
        ("/generate", "POST", endpoints.generate),
        ("/flush_cache", "POST", endpoints.flush_cache),
        ("/get_server_info", "GET", endpoints.server_info),
        ("/server_info", "GET", endpoints.server_info),
        ("/get_model_info", "GET", endpoints.model_info),
        ("/start_profile", "POST", functools.partial(endpoints.profile, True)),
        ("/stop_profile", "POST", functools.partial(endpoints.profile, False)),
    ]
    routes = [Route(path, _whole(f), methods=methods.split()) for path, methods, f in found]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    return Guard(app, key=key, open_paths=_OPEN_PATHS)


def _whole(handler: Callable[[Request], Awaitable[Response]]) -> Callable:
    async def handle(request: Request) -> Response:
        return await handler(request)

    return endpoint(handle)


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    answer = http.refused(Refusal(message, status=error.status_code))
    answer.headers.update(error.headers or {})
    return answer


class Endpoints:
    """A method for each endpoint, over one service."""

    def __init__(self, service: Service):
        """Answers with what `service` does."""
        self._service = service

    async def _body(self, request: Request) -> Mapping[str, Any]:
        config = self._service.config
        most, patience = config.max_body_bytes, config.read_s
        return await http.read_json(request, most_bytes=most, patience_s=patience)

    # --- outputs --------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        """/v1/completions."""
        body, model = await self._body(request), self._service.served()
        ask = await _read(request, openai_requests.read_completion, body, model)
        head = answers.envelope("text_completion", f"cmpl-{_id(request)}", model)
        choice = answers.text_choice(ask, model)
        return await self._openai(request, ask, model, (head, choice), (head, choice))

    async def chat_completions(self, request: Request) -> Response:
        """/v1/chat/completions."""
        body, model = await self._body(request), self._service.served()
        ask = await _read(request, openai_requests.read_chat, body, model)
        id = f"chatcmpl-{_id(request)}"
        whole = answers.envelope("chat.completion", id, model), answers.chat_choice(ask, model)
        head = answers.envelope("chat.completion.chunk", id, model)
        parts = head, answers.chat_chunk_choice(ask, model)
        return await self._openai(request, ask, model, whole, parts, roles=True)

    async def _openai(
        self, request: Request, ask: Ask, model: Model, whole, parts, *, roles: bool = False
    ) -> Response:
        """An answer in OpenAI's form, whole or as a stream; both are a head and its choices."""
        call = self._service.admit(await _with_grammar(ask, model))
        if ask.show.stream:
            head, choice = parts
            events = answers.chunks(ask, call, model, head, choice, roles=roles)
            return EventStream(events, call, patience_s=self._service.config.send_s)
        head, choice = whole
        outputs = answers.outputs_of(ask, call, model)
        with call:
            said = await http.unless_gone(request.receive, answers.all_of(call, outputs))
        choices = [choice(output, delta) for output, delta in zip(outputs, said, strict=True)]
        return JSONResponse({**head, "choices": choices, "usage": answers.usage(ask, outputs)})

    async def generate(self, request: Request) -> Response:
        """SGLang's /generate."""
        begun_at = time.perf_counter()
        body, model = await self._body(request), self._service.served()
        ask, several = await _read(request, sglang_requests.read_generate, body, model)
        call, id = self._service.admit(await _with_grammar(ask, model)), _id(request)
        if ask.show.stream:
            events = answers.generated_chunks(ask, call, model, id=id, begun_at=begun_at)
            return EventStream(events, call, patience_s=self._service.config.send_s)
        outputs = answers.outputs_of(ask, call, model)
        with call:
            said = await http.unless_gone(request.receive, answers.all_of(call, outputs))
        found = [
            answers.generated(ask, output, model, delta.tokens, id=id, begun_at=begun_at)
            for output, delta in zip(outputs, said, strict=True)
        ]
        return JSONResponse(found if several else found[0])

    # --- tokens ---------------------------------------------------------------------------------

    async def tokenize(self, request: Request) -> Response:
        """A prompt's, or a chat's, token ids."""
        body, model = await self._body(request), self._service.served()
        ids, names = await _read(request, openai_requests.read_tokenize, body, model)
        answer = {"count": len(ids), "max_model_len": model.max_length, "tokens": list(ids)}
        answer["token_strs"] = [model.names.of(one) for one in ids] if names else None
        return JSONResponse(answer)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body, model = await self._body(request), self._service.served()
        fields = Fields(body)
        asks.check_model(fields, model)
        ids = as_ids(fields.take("tokens"), "tokens", model.vocab_size)
        fields.finish()
        return JSONResponse({"prompt": model.tokenizer.decode(ids, special_tokens=True)})

    # --- about the server -----------------------------------------------------------------------

    async def page(self, request: Request) -> Response:
        """The page for people."""
        return page.response()

    async def health(self, request: Request) -> Response:
        """200 while requests are served; else 503, with the reason."""
        state = self._service.state
        status = 200 if state is State.READY else 503
        return JSONResponse({"status": state.value}, status)

    async def version(self, request: Request) -> Response:
        """What runs."""
        return JSONResponse({"version": __version__, "python": platform.python_version()})

    async def metrics(self, request: Request) -> Response:
        """Prometheus's text format."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        """The model that is served, in a list."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """The model that is served, by its name."""
        card, name = self._card(), request.path_params["name"]
        if name != card["id"]:
            raise Refusal("no such model", status=404, param="model", code="model_not_found")
        return JSONResponse(card)

    def _card(self) -> dict[str, Any]:
        model = self._service.served()
        return {
            "id": model.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "dflash",
            "root": model.root,
            "parent": None,
            "max_model_len": model.max_length,
            "dflash": {"drafter": model.drafter, "compares": model.compares},
        }

    async def flush_cache(self, request: Request) -> Response:
        """Empties the prefix cache."""
        self._service.served()
        self._service.flush()
        return Response("Cache flushed.\n", media_type="text/plain")

    async def server_info(self, request: Request) -> Response:
        """SGLang's facts about a server, as far as its clients read them."""
        model, totals = self._service.served(), self._service.metrics.totals
        tau = 1 + totals.accepted / totals.cycles if totals.cycles else None
        return JSONResponse(
            {
                "version": __version__,
                "model_path": model.root,
                "served_model_name": model.name,
                "speculative_algorithm": model.drafter.upper(),
                "max_total_num_tokens": model.max_length,
                "internal_states": [{"avg_spec_accept_length": tau}],
            }
        )

    async def model_info(self, request: Request) -> Response:
        """SGLang's facts about the model."""
        model = self._service.served()
        return JSONResponse({"model_path": model.root, "is_generation": True})

    async def profile(self, running: bool, request: Request) -> Response:
        """Begins or ends a profiler trace."""
        self._service.served()
        self._service.profile(running)
        return Response(status_code=200)


async def _read(request: Request, read: Callable[..., Any], *given: Any) -> Any:
    """What `read` makes of a body; of a large one in a thread, so that nobody else waits."""
    size = request.headers.get("content-length", "")
    if size.isdecimal() and int(size) <= _SMALL_BYTES:
        return read(*given)
    return await asyncio.to_thread(read, *given)


async def _with_grammar(ask: Ask, model: Model) -> Ask:
    """What is asked for with its grammar compiled, in a thread: that may take seconds."""
    if ask.structure is None:
        return ask
    try:
        vocabulary = await asyncio.to_thread(model.vocabulary)
    except errors.InputError as error:
        raise Refusal(f"{ask.structure.param}: {error}", param=ask.structure.param) from error
    grammar = await asyncio.to_thread(ask.structure.compiled, vocabulary)
    return dataclasses.replace(ask, grammar=grammar)


def _id(request: Request) -> str:
    return request.scope["request_id"]
