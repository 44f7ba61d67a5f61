"""ASGI middleware that decides which HTTP requests reach the endpoints."""

import dataclasses
import hmac
import ipaddress
import re
import socket
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash.serving.http import error_response
from dflash.serving.validation import RequestError

REQUEST_ID = "x-request-id"
_VALID_ID = re.compile(r"[\x21-\x7e]{1,200}")
_HOST = re.compile(r"(\[[^\[\]@/?#\s]+\]|[^\[\]:@/?#\s]+)(:[0-9]*)?")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANY = "*"


@dataclasses.dataclass(frozen=True)
class ServedNames:
    """Names that a request's Host header may have.

    A web page whose own name resolves to the server's address (DNS rebinding) has the server's
    origin in a browser, but sends its own name as Host.

    Attributes:
      names: Names and addresses, in lower case.
      addresses: Whether any IP address is accepted, since the server listens on all interfaces.
    """

    names: frozenset[str]
    addresses: bool = False

    def include(self, host: str) -> bool:
        """Returns whether the value of a Host header, with or without a port, is accepted."""
        match = _HOST.fullmatch(host)
        name = match[1].strip("[]").rstrip(".").lower() if match else ""
        if _ANY in self.names or name in self.names:
            return True
        return self.addresses and _is_address(name)


def served_names(address: str, names: Sequence[str]) -> ServedNames:
    """Returns the names of a server, further ones included; "*" accepts every name."""
    all_names = {*_LOOPBACK, address, *filter(None, names)}
    if not ipaddress.ip_address(address).is_loopback:
        all_names.add(socket.gethostname())
    addresses = ipaddress.ip_address(address).is_unspecified
    return ServedNames(
        frozenset(name.strip("[]").rstrip(".").lower() for name in all_names), addresses
    )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Guard:
    """Checks names, origins, content types and API keys, and adds the request id to responses."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: ServedNames,
        origins: Sequence[str] = (),
        keys: Sequence[str] = (),
        open_paths: frozenset[str] = frozenset(),
    ):
        """Wraps `app`.

        Args:
          origins: Origins whose web pages may send requests, besides the server's own; "*" accepts
            all.
          keys: API keys, one of which clients must send as a bearer token; without any, all clients
            are accepted.
        """
        self._app, self._names, self._open_paths = app, names, open_paths
        self._origins = frozenset(origin.rstrip("/").lower() for origin in origins)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get(REQUEST_ID, "")
        id = client_id if _VALID_ID.fullmatch(client_id) else uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (REQUEST_ID.encode(), id.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        # Anthropic's clients send their key in a header of its own.
        bearer = f"Bearer {headers.get('x-api-key', '')}"
        key = self._key_of(headers.get("authorization") or bearer)
        error = self._error(scope, headers, has_key=key is not None)
        scope = {**scope, "request_id": id}
        app = self._app if error is None else error_response(error, scope)
        # One key is no name, since all clients have it.
        name = f"key {key}" if key is not None and len(self._keys) > 1 else ""
        await app({**scope, "key_name": name}, receive, send_with_id)

    def _error(self, scope: Scope, headers: Headers, *, has_key: bool) -> RequestError | None:
        """Returns the reason for which a request is rejected; None if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._names.include(host):
            message = f"Host: {host!r} is no name of this server; see serve.hosts"
            return RequestError(message, status=403, code="unknown_host")
        if origin is not None and not self._admits_origin(origin.lower(), host.lower()):
            message = f"Origin: pages of {origin!r} may not use this server; see serve.origins"
            return RequestError(message, status=403, code="unknown_origin")
        if self._keys and not has_key and scope["path"] not in self._open_paths:
            message = "Authorization: expected 'Bearer KEY' with this server's API key"
            return RequestError(message, status=401, code="invalid_api_key")
        kind = _content_type(headers)
        if scope["method"] not in ("GET", "HEAD") and kind not in (None, "application/json"):
            message = f"Content-Type: {kind or 'none'}: expected application/json"
            return RequestError(message, status=415)
        return None

    def _admits_origin(self, origin: str, host: str) -> bool:
        if _ANY in self._origins or origin in self._origins:
            return True
        return origin in (f"http://{host}", f"https://{host}")

    def _key_of(self, authorization: str) -> int | None:
        """Returns the place of a request's key among those of the server; None if it is not one."""
        scheme, _, key = authorization.partition(" ")
        sent = key.strip().encode("latin-1")
        # Compare all keys, so that the time does not tell which one is similar.
        places = [
            i for i, server_key in enumerate(self._keys) if hmac.compare_digest(sent, server_key)
        ]
        return places[0] if places and scheme.lower() == "bearer" else None


def _content_type(headers: Headers) -> str | None:
    """Returns the media type of a request's body; None if it has neither type nor body.

    Browsers send other types than JSON, and bodies without a type, across origins unasked.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    return kind if kind or has_body else None
