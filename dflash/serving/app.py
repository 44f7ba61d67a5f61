"""HTTP endpoints: those of OpenAI, Anthropic, vLLM and SGLang, and the web page."""

import asyncio
import base64
import dataclasses
import functools
import hashlib
import pathlib
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash.serving import dialects, http, messages_api, responses, validation
from dflash.serving.bodies import UpdateWeightsBody
from dflash.serving.completion_request import CompletionRequest
from dflash.serving.guard import REQUEST_ID, Guard, ServedNames
from dflash.serving.http import EventStream, endpoint
from dflash.serving.messages_api import MessageAnswer
from dflash.serving.metrics import CONTENT_TYPE
from dflash.serving.responses import Answer
from dflash.serving.responses_api import ItemsAnswer, renamed
from dflash.serving.served_model import ServedModel
from dflash.serving.served_requests import RequestGroup
from dflash.serving.service import Service, ServiceState
from dflash.serving.structured_output import GrammarQueue
from dflash.serving.validation import RequestError
from dflash.version import __version__

Body = Mapping[str, Any]
Result = TypeVar("Result")
_LARGE_TOKENS = 2**12  # Output tokens from which a response is built on a thread.
_NUM_THREADS = 2  # Threads that parse small bodies, and again for large ones.
# Paths for probes and the web page, which need no API key.
_OPEN_PATHS = frozenset(("/", "/health", "/ping", "/version"))
_FILE = pathlib.Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def application(service: Service, *, names: ServedNames, keys: Sequence[str] = ()) -> ASGIApp:
    """Returns the ASGI application; clients must send one of the `keys`, if there are any."""
    endpoints = Endpoints(service)
    table = [
        ("/", "GET", endpoints.page),
        ("/health", "GET", endpoints.health),
        ("/ping", "GET POST", endpoints.health),
        ("/version", "GET", endpoints.version),
        ("/metrics", "GET", endpoints.metrics),
        ("/v1/models", "GET", endpoints.models),
        ("/v1/models/{name:path}", "GET", endpoints.one_model),
        ("/v1/completions", "POST", endpoints.completions),
        ("/v1/chat/completions", "POST", endpoints.chat_completions),
        ("/v1/responses", "POST", endpoints.responses),
        (messages_api.PATH, "POST", endpoints.messages),
        (f"{messages_api.PATH}/count_tokens", "POST", endpoints.count_tokens),
        ("/tokenize", "POST", endpoints.tokenize),
        ("/detokenize", "POST", endpoints.detokenize),
        ("/generate", "POST", endpoints.generate),
        ("/flush_cache", "POST", endpoints.flush_cache),
        ("/update_weights", "POST", endpoints.update_weights),
        ("/get_server_info", "GET", endpoints.server_info),
        ("/server_info", "GET", endpoints.server_info),
        ("/get_model_info", "GET", endpoints.model_info),
        ("/start_profile", "POST", functools.partial(endpoints.profile, True)),
        ("/stop_profile", "POST", functools.partial(endpoints.profile, False)),
    ]
    routes = [Route(path, endpoint(f), methods=methods.split()) for path, methods, f in table]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _not_found})
    origins = service.config.origins
    guarded = Guard(app, names=names, origins=origins, keys=keys, open_paths=_OPEN_PATHS)
    if not origins:
        return guarded
    return CORSMiddleware(
        guarded,
        allow_origins=[origin.rstrip("/").lower() for origin in origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID],
    )


async def _not_found(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path}: {error.detail}"
    problem = RequestError(message, status=error.status_code)
    response = http.error_response(problem, request.scope)
    response.headers.update(error.headers or {})
    return response


class Endpoints:
    """One method per endpoint, over one service."""

    def __init__(self, service: Service):
        self._service, self._grammars = service, GrammarQueue()
        limits = service.config
        self._bodies = http.BodyReader(max_bytes=limits.max_body_bytes, timeout_s=limits.read_s)
        # Large bodies take seconds to encode, which those of small ones should not wait for.
        self._small = ThreadPoolExecutor(_NUM_THREADS, "small-bodies")
        self._large = ThreadPoolExecutor(_NUM_THREADS, "large-bodies")

    async def _read(
        self, http_request: Request, read: Callable[[Body, ServedModel], Result]
    ) -> Result:
        """Returns `read` of the request's body and the model, computed on a thread.

        Raises:
          RequestError: The body is not a JSON object, or `read` rejects it.
          ClientDisconnected: The client disconnected.
        """
        async with self._bodies.read(http_request) as content:
            model = self._service.served()
            threads = self._large if len(content) > http.LARGE_BYTES else self._small
            running = asyncio.get_running_loop().run_in_executor(
                threads, lambda: read(http.parse_json(content), model)
            )
            return await http.until_disconnect(http_request.receive, running)

    async def _admit(self, http_request: Request, request: CompletionRequest) -> RequestGroup:
        """Admits a request, once its grammar is compiled.

        Raises:
          RequestError: The grammar is invalid, or the service does not admit the request.
          ClientDisconnected: The client disconnected.
        """
        address = http_request.client.host if http_request.client else ""
        client = http_request.scope["key_name"] or address
        if request.structure is not None:
            vocabulary = self._service.served().vocabulary
            compiling = self._grammars.compile(request.structure, vocabulary, client)
            grammar = await http.until_disconnect(http_request.receive, compiling)
            request = dataclasses.replace(request, grammar=grammar)
        return self._service.admit(request, client)

    async def _respond(self, http_request: Request, answer: Answer) -> Response:
        """Decodes a request and responds; a thread builds large responses."""
        group = await self._admit(http_request, answer.request)
        outputs = answer.outputs(group)
        if answer.request.options.stream:
            return EventStream(answer.stream(group, outputs), group)
        with group:
            waiting = responses.wait_for_all(group, outputs)
            deltas = await http.until_disconnect(http_request.receive, waiting)

        def response() -> Response:
            return JSONResponse(answer.body(outputs, deltas))

        if sum(len(output.ids) for output in outputs) < _LARGE_TOKENS:
            return response()
        return await asyncio.get_running_loop().run_in_executor(self._large, response)

    # --- outputs --------------------------------------------------------------------------------

    async def completions(self, http_request: Request) -> Response:
        """Serves OpenAI's /v1/completions."""
        request = await self._read(http_request, dialects.read_completion)
        answer = responses.Completion(_id(http_request), request, self._service.served())
        return await self._respond(http_request, answer)

    async def chat_completions(self, http_request: Request) -> Response:
        """Serves OpenAI's /v1/chat/completions."""
        request = await self._read(http_request, dialects.read_chat)
        answer = responses.Chat(_id(http_request), request, self._service.served())
        return await self._respond(http_request, answer)

    async def responses(self, http_request: Request) -> Response:
        """Serves OpenAI's /v1/responses, which keeps nothing between requests."""
        request, fields = await self._read(http_request, dialects.read_response)
        answer = ItemsAnswer(_id(http_request), request, self._service.served(), fields)
        try:
            return await self._respond(http_request, answer)
        except RequestError as error:
            raise renamed(error) from error

    async def messages(self, http_request: Request) -> Response:
        """Serves Anthropic's /v1/messages."""
        request = await self._read(http_request, dialects.read_messages)
        answer = MessageAnswer(_id(http_request), request, self._service.served())
        try:
            return await self._respond(http_request, answer)
        except RequestError as error:
            raise messages_api.renamed(error) from error

    async def generate(self, http_request: Request) -> Response:
        """Serves SGLang's /generate."""
        begin = time.perf_counter()
        request, several = await self._read(http_request, dialects.read_generate)
        answer = responses.Generated(
            _id(http_request),
            request,
            self._service.served(),
            several=several,
            started_at=begin,
        )
        return await self._respond(http_request, answer)

    # --- tokens ---------------------------------------------------------------------------------

    async def tokenize(self, http_request: Request) -> Response:
        """Returns the token ids of a prompt or a chat."""
        return JSONResponse(await self._read(http_request, dialects.tokenize))

    async def count_tokens(self, http_request: Request) -> Response:
        """Returns the number of tokens of Anthropic's messages."""
        return JSONResponse(await self._read(http_request, dialects.count_tokens))

    async def detokenize(self, http_request: Request) -> Response:
        """Returns the text of token ids."""
        return JSONResponse(await self._read(http_request, dialects.detokenize))

    # --- about the server -----------------------------------------------------------------------

    async def page(self, http_request: Request) -> Response:
        """Returns the page; its policy allows only the page's own script and style."""
        content, policy = _content()
        headers = {
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(content, media_type="text/html", headers=headers)

    async def health(self, http_request: Request) -> Response:
        """Returns the service's state; the status is 200 while requests are served, else 503."""
        state = self._service.state
        status = 200 if state is ServiceState.READY else 503
        return JSONResponse({"status": state.value}, status)

    async def version(self, http_request: Request) -> Response:
        """Returns the versions of dflash and Python."""
        return JSONResponse({"version": __version__, "python": platform.python_version()})

    async def metrics(self, http_request: Request) -> Response:
        """Returns the metrics in Prometheus' text format."""
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, http_request: Request) -> Response:
        """Returns the target, followed by its adapters."""
        return JSONResponse({"object": "list", "data": self._cards()})

    async def one_model(self, http_request: Request) -> Response:
        """Returns the target or the adapter that the path names."""
        cards, name = self._cards(), http_request.path_params["name"]
        for card in cards:
            if card["id"] == name:
                return JSONResponse(card)
        message = f"no such model; this server has {', '.join(repr(card['id']) for card in cards)}"
        raise RequestError(message, status=404, param="model", code="model_not_found")

    def _cards(self) -> list[dict[str, Any]]:
        model = self._service.served()
        target = {
            "id": model.name,
            "object": "model",
            "created": self._service.created,
            "owned_by": "dflash",
            "root": model.root,
            "parent": None,
            "max_model_len": model.max_length,
            "dflash": {
                "drafter": model.drafter,
                "compares": model.compares,
                "single_turn": model.single_turn,
            },
        }
        adapters = model.adapters.items()
        cards = ({"id": name, "root": root, "parent": model.name} for name, root in adapters)
        return [target, *(target | adapter for adapter in cards)]

    async def flush_cache(self, http_request: Request) -> Response:
        """Empties the prefix cache."""
        self._service.served()
        self._service.flush()
        return Response("Cache flushed.\n", media_type="text/plain")

    async def update_weights(self, http_request: Request) -> Response:
        """Replaces the target's weights by those of a checkpoint on the server's machine."""
        fields = await self._read(
            http_request, lambda body, model: validation.parse(UpdateWeightsBody, body)
        )
        updating = self._service.update_weights(fields.path)
        await http.until_disconnect(http_request.receive, updating)
        return JSONResponse({"success": True})

    async def server_info(self, http_request: Request) -> Response:
        """Returns the facts about the server that SGLang's clients read."""
        model, totals = self._service.served(), self._service.metrics.totals
        tau = totals.committed / totals.cycles if totals.cycles else None
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

    async def model_info(self, http_request: Request) -> Response:
        """Returns the facts about the model that SGLang's clients read."""
        model = self._service.served()
        return JSONResponse({"model_path": model.root, "is_generation": True})

    async def profile(self, running: bool, http_request: Request) -> Response:
        """Starts or stops a profiler trace."""
        self._service.served()
        self._service.profile(running)
        return Response(status_code=200)


def _id(http_request: Request) -> str:
    return http_request.scope["request_id"]


@functools.cache
def _content() -> tuple[bytes, str]:
    text = _FILE.read_text(encoding="utf-8")
    hashes = {"script": "'none'", "style": "'none'"}
    for kind, inner in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        hashes[kind] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return text.encode(), policy
