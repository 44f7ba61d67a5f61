"""HTTP layer below the endpoints: bodies, client disconnects, event streams, and errors."""

import asyncio
import contextlib
import functools
import json
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from dflash import errors
from dflash.serving.validation import RequestError
from dflash.text import jsonl

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
LARGE_BYTES = 2**15  # Size from which a body is large.
LARGE_BODIES = 16  # Large bodies of maximum size that the server holds at the same time.
_MESSAGES = "/v1/messages"
DONE = b"data: [DONE]\n\n"
_DISCONNECTED = 499  # nginx's status for a client that disconnected; no client receives it.


class ClientDisconnected(Exception):
    """The connection has ended: the client has closed it, or has stopped reading."""


def error_body(error: RequestError, scope: Scope) -> dict[str, Any]:
    """Returns the JSON of an error in the form of the API that the path of a request belongs to."""
    if scope["path"].startswith(_MESSAGES):
        return error.messages_body() | {"request_id": scope["request_id"]}
    return error.body()


def error_response(error: RequestError, scope: Scope) -> Response:
    """Returns the HTTP response of an error of a request with this scope."""
    return JSONResponse(error_body(error, scope), error.status, error.headers)


def endpoint(handler: Handler) -> Handler:
    """Wraps a handler so that its exceptions become responses; tracebacks go to stderr only."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return error_response(error, request.scope)
        except ClientDisconnected:
            return Response(status_code=_DISCONNECTED)
        except Exception:
            return error_response(_internal_error(), request.scope)

    return handle


def _internal_error() -> RequestError:
    """Prints the current exception's traceback, and returns the error for the client."""
    print(traceback.format_exc(), file=sys.stderr, end="", flush=True)
    return RequestError("internal error; see the server's log", status=500)


class BodyReader:
    """Reads the bodies of requests, within limits for each and for all of them together."""

    def __init__(self, *, max_bytes: int, timeout_s: float):
        """Creates a reader of bodies; large ones may take `LARGE_BODIES` times `max_bytes`."""
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._held = 0  # Size of all large bodies, in bytes.

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """Yields the body of a request, which counts as held until the context ends.

        Raises:
          RequestError: The body is too large, compressed, or arrives too slowly, or too many large
            ones are held.
          ClientDisconnected: The client disconnected.
        """
        coding = request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise RequestError(
                f"Content-Encoding: {coding}: not supported; send the body uncompressed",
                status=415,
            )
        body = bytearray()
        try:
            await self._receive_in_time(request, body)
            yield bytes(body)
        finally:
            self._held -= _counted(len(body))

    async def _receive_in_time(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._receive(request, body)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s"
            raise RequestError(message, status=408, code="timeout") from None

    async def _receive(self, request: Request, body: bytearray) -> None:
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._max_bytes:
            raise self._too_large()
        more = True
        while more:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            self._hold(body, message.get("body", b""))
            more = message.get("more_body", False)

    def _hold(self, body: bytearray, piece: bytes) -> None:
        size = len(body) + len(piece)
        if size > self._max_bytes:
            raise self._too_large()
        total = self._held - _counted(len(body)) + _counted(size)
        if total > LARGE_BODIES * self._max_bytes:
            raise RequestError(
                "too many large requests arrive at the same time; try again later",
                status=429,
                code="queue_full",
                retry_after_s=1,
            )
        self._held = total
        body += piece

    def _too_large(self) -> RequestError:
        message = f"body: larger than {self._max_bytes} bytes, the limit of serve.max_body_bytes"
        return RequestError(message, status=413, code="too_large")


def _counted(size: int) -> int:
    """Returns the size of a body if it is large, else 0."""
    return size if size > LARGE_BYTES else 0


def parse_json(body: bytes) -> Mapping[str, Any]:
    """Parses a body as a JSON object; raises RequestError if it is something else."""
    try:
        return jsonl.parse_json(jsonl.decode(body))
    except errors.InputError as error:
        raise RequestError(f"body: {error}") from error


async def until_disconnect(receive: Receive, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`, which is cancelled if the client disconnects.

    Args:
      receive: ASGI channel of a request whose body has been read.
    Raises:
      ClientDisconnected: The client disconnected.
    """
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        for future in (task, disconnect):
            future.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await future


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON object, followed by [DONE] where clients expect it.

    The headers are sent with the first event, so an error before it becomes a response with the
    error's status. A later error becomes an event. The stream ends if the client disconnects or
    stops reading; `Connection` bounds the time for that.
    """

    def __init__(
        self,
        events: AsyncIterator[Mapping[str, Any]],
        group: contextlib.AbstractContextManager,
    ):
        """Creates the response without sending anything.

        Args:
          events: JSON objects; the iterator is closed at the end.
          group: Context of the events, exited when the stream ends for any reason.
        """
        self._events, self._group = events, group
        self.background = None
        self.status_code = 200
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # Keep nginx from buffering events.
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._group, contextlib.suppress(ClientDisconnected):
            await until_disconnect(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async for event in self._events:
                if not begun:
                    begun = True
                    await send(self._head())
                await send(_body(_event(event)))
        except Exception as error:
            problem = error if isinstance(error, RequestError) else _internal_error()
            if not begun:
                await error_response(problem, scope)(scope, receive, send)
                return
            await send(_body(_event(error_body(problem, scope))))
        finally:
            await self._events.aclose()
        if not begun:
            await send(self._head())
        # Anthropic's streams end with an event of their own.
        done = b"" if scope["path"].startswith(_MESSAGES) else DONE
        await send(_body(done, more=False))

    def _head(self) -> Message:
        start = {"type": "http.response.start", "status": self.status_code}
        return start | {"headers": self.raw_headers}


def _event(value: Mapping[str, Any]) -> bytes:
    name = b"event: " + value["type"].encode() + b"\n" if "type" in value else b""
    return name + b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _body(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}
