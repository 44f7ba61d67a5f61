"""HTTP beneath the endpoints: bodies within limits, clients that go away, streams, errors."""

import asyncio
import contextlib
import functools
import hmac
import json
import re
import sys
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash import errors
from dflash.serving.refusal import Refusal
from dflash.text import jsonl

Result = TypeVar("Result")
Handler = Callable[[Request], Awaitable[Response]]
DONE = b"data: [DONE]\n\n"
_REQUEST_ID = "x-request-id"
_SOUND_ID = re.compile(r"[\x21-\x7e]{1,200}")
_GONE = 499  # nginx's status for a client that went away; nobody reads it
_JSON_TYPES = ("application/json", "")


class ClientGone(Exception):
    """The client has closed the connection, or does not read what it is sent."""


def refused(refusal: Refusal) -> Response:
    """The answer that a refusal is."""
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


def endpoint(handler: Handler) -> Handler:
    """Turns what goes wrong in a handler into an answer; nothing leaves as a traceback."""

    @functools.wraps(handler)
    async def handle(request: Request) -> Response:
        try:
            return await handler(request)
        except Refusal as refusal:
            return refused(refusal)
        except ClientGone:
            return Response(status_code=_GONE)
        except Exception:
            print(traceback.format_exc(), file=sys.stderr, end="", flush=True)
            return refused(Refusal("internal error; the server's log has more", status=500))

    return handle


async def read_json(request: Request, *, most_bytes: int, patience_s: float) -> Mapping[str, Any]:
    """The body of a request as a JSON object.

    Args:
      request: not read yet.
      most_bytes: size of the body.
      patience_s: time for it to come.
    Raises:
      Refusal: it is something else, too large, or takes too long.
      ClientGone: the client has left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in _JSON_TYPES:
        raise Refusal(f"Content-Type: {kind}: expected application/json", status=415)
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise Refusal(f"Content-Encoding: {coding}: expected none", status=415)
    try:
        async with asyncio.timeout(patience_s):
            body = await _read(request, most_bytes)
    except TimeoutError:
        message = f"the body did not come within {patience_s:g} s"
        raise Refusal(message, status=408, code="timeout") from None
    try:
        return jsonl.parse_json(jsonl.decode(body))
    except errors.InputError as error:
        raise Refusal(f"body: {error}") from error


async def _read(request: Request, most_bytes: int) -> bytes:
    too_large = Refusal(f"body: larger than {most_bytes} bytes", status=413, code="too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced[:20]) > most_bytes:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > most_bytes:
            raise too_large
        if not message.get("more_body", False):
            return bytes(body)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled where the client goes away.

    Args:
      receive: of a request whose body was read.
      work: what to do meanwhile.
    Raises:
      ClientGone: the client went away.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await one


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, each a JSON object, and [DONE] at the end.

    Headers go with the first event: what fails before it is an answer with a status of its own.
    What fails later is an event with an error. A client that goes away, or that leaves what it is
    sent unread for too long, ends the stream.
    """

    def __init__(
        self,
        events: AsyncIterator[Mapping[str, Any]],
        call: contextlib.AbstractContextManager,
        *,
        patience_s: float,
    ):
        """Sends nothing yet.

        Args:
          events: JSON objects; closed in the end.
          call: what they come from, left when the stream ends, however it does.
          patience_s: that an event may take to be sent.
        """
        self._events, self._call, self._patience_s = events, call, patience_s
        self.background = None
        self.status_code = 200
        self.raw_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx passes events on at once
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._call, contextlib.suppress(ClientGone):
            await unless_gone(receive, self._send(scope, receive, send))

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False
        try:
            async for event in self._events:
                if not begun:
                    begun = True
                    await self._put(send, self._head())
                await self._put(send, _body(_event(event)))
        except Refusal as refusal:
            if not begun:
                await refused(refusal)(scope, receive, send)
                return
            await self._put(send, _body(_event(refusal.body())))
        finally:
            await self._events.aclose()
        if not begun:
            await self._put(send, self._head())
        await self._put(send, _body(DONE, more=False))

    def _head(self) -> Message:
        start = {"type": "http.response.start", "status": self.status_code}
        return start | {"headers": self.raw_headers}

    async def _put(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await send(message)
        except (TimeoutError, OSError) as error:
            raise ClientGone from error


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def _body(content: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": content, "more_body": more}


class Guard:
    """Wraps an application: keys are checked, and answers carry the id of their request."""

    def __init__(self, app: ASGIApp, *, key: str | None, open_paths: frozenset[str]):
        """Wraps `app`.

        Args:
          app: the application.
          key: what clients have to show as a bearer token; None: nothing.
          open_paths: that need none.
        """
        self._app, self._open_paths = app, open_paths
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(_REQUEST_ID.encode(), b"").decode("latin-1")
        id = given if _SOUND_ID.fullmatch(given) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                named = (_REQUEST_ID.encode(), id.encode())
                message = {**message, "headers": [*message.get("headers", ()), named]}
            await send(message)

        scope = {**scope, "request_id": id}
        if self._admits(scope["path"], headers.get(b"authorization", b"")):
            await self._app(scope, receive, send_with_id)
        else:
            refusal = Refusal(
                "Authorization: expected 'Bearer KEY' with this server's key",
                status=401,
                code="invalid_api_key",
            )
            await refused(refusal)(scope, receive, send_with_id)

    def _admits(self, path: str, authorization: bytes) -> bool:
        if self._key is None or path in self._open_paths:
            return True
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
