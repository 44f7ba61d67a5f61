"""Names, origins, content types and keys that requests are checked for."""

import asyncio
import types

import pytest

from dflash.config.serve_schema import ServeConfig
from dflash.serving.app import application
from dflash.serving.guard import Guard, served_names

COMMANDS = "/flush_cache", "/start_profile", "/stop_profile", "/v1/completions", "/detokenize"


async def _passed(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def exchange(app, method="POST", path="/v1/completions", **headers):
    """Returns the status and the headers of an application's response to a request."""
    named = {"host": "localhost:8000"} | {k.replace("_", "-"): v for k, v in headers.items()}
    encoded = [(name.encode(), value.encode()) for name, value in named.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": encoded}
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], {k.decode(): v.decode() for k, v in sent[0]["headers"]}


def status(app, **request) -> int:
    return exchange(app, **request)[0]


@pytest.mark.parametrize(
    ("address", "listed", "host", "included"),
    [
        ("127.0.0.1", (), "127.0.0.1:8000", True),
        ("127.0.0.1", (), "LOCALHOST:8000", True),
        ("::1", (), "[::1]:8000", True),
        ("127.0.0.1", (), "evil.example:8000", False),
        ("127.0.0.1", (), "evil.example@localhost", False),
        ("127.0.0.1", (), "localhost:8000:1", False),
        ("127.0.0.1", (), "10.0.0.5:8000", False),
        ("127.0.0.1", (), "", False),
        ("10.0.0.5", (), "10.0.0.5:8000", True),
        ("0.0.0.0", (), "10.0.0.6:8000", True),
        ("::", (), "[fd00::1]:8000", True),
        ("0.0.0.0", (), "evil.example", False),
        ("0.0.0.0", ("chat.example.com",), "chat.example.com", True),
        ("0.0.0.0", ("",), "", False),
        ("127.0.0.1", ("*",), "anything.example", True),
    ],
)
def test_names_of_a_server(address, listed, host, included):
    assert served_names(address, listed).include(host) is included


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_other_origins_are_rejected(method):
    names = served_names("127.0.0.1", ("chat.example.com",))
    app = Guard(_passed, names=names, origins=("https://app.example.com",))
    for origin in "http://evil.example", "null", "http://localhost:3000", "http://localhost":
        assert status(app, method=method, origin=origin) == 403, origin
    for origin in "http://localhost:8000", "https://app.example.com":
        assert status(app, method=method, origin=origin) == 200, origin
    # A proxy that terminates TLS passes the page's own name on.
    own = {"host": "chat.example.com", "origin": "https://chat.example.com"}
    assert status(app, method=method, **own) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 200),  # Neither a type nor a body: flush_cache of SGLang's clients.
        ({"content_length": "0"}, 200),
        ({"content_type": "application/json; charset=utf-8", "content_length": "2"}, 200),
        ({"content_length": "2"}, 415),
        ({"transfer_encoding": "chunked"}, 415),
        ({"content_type": "text/plain", "content_length": "2"}, 415),
        ({"content_type": "application/x-www-form-urlencoded", "content_length": "2"}, 415),
    ],
)
def test_bodies_are_json(headers, expected):
    app = Guard(_passed, names=served_names("127.0.0.1", ()))
    assert status(app, **headers) == expected


@pytest.mark.parametrize(
    ("keys", "authorization", "expected"),
    [
        ((), "", ""),
        ((), "Bearer a", ""),
        (("a",), "Bearer a", ""),
        (("a",), "Bearer b", None),
        (("a", "b"), "bearer b", "key 1"),
        (("a", "b"), "Bearer a", "key 0"),
        (("a", "b"), "Basic a", None),
        (("a", "b"), "", None),
    ],
)
def test_clients_with_several_keys_have_names(keys, authorization, expected):
    names = []

    async def app(scope, receive, send):
        names.append(scope["key_name"])
        await _passed(scope, receive, send)

    guarded = Guard(app, names=served_names("127.0.0.1", ()), keys=keys)
    code = status(guarded, authorization=authorization)
    assert (code, names) == ((401, []) if expected is None else (200, [expected]))
    if authorization.startswith("Bearer"):  # Anthropic's clients send the key alone.
        names.clear()
        code = status(guarded, **{"x-api-key": authorization.removeprefix("Bearer ")})
        assert (code, names) == ((401, []) if expected is None else (200, [expected]))


def test_only_listed_origins_get_cors_headers():
    page = "https://app.example.com"
    ask = {"method": "OPTIONS", "origin": page, "access_control_request_method": "POST"}
    ask |= {"access_control_request_headers": "content-type, x-stainless-os"}
    names = served_names("127.0.0.1", ())
    closed = application(types.SimpleNamespace(config=ServeConfig()), names=names)
    assert status(closed, **ask) == 403
    listed = types.SimpleNamespace(config=ServeConfig(origins=(page,)))
    app = application(listed, names=names, keys=("secret", "other"))
    code, headers = exchange(app, **ask)
    assert (code, headers["access-control-allow-origin"]) == (200, page)
    assert "x-stainless-os" in headers["access-control-allow-headers"]
    code, headers = exchange(app, origin=page)
    assert (code, headers["access-control-allow-origin"]) == (401, page)
    other = exchange(app, **ask | {"origin": "http://evil.example"})
    assert other[0] == 400
    assert "access-control-allow-origin" not in other[1]


def test_a_web_page_cannot_use_a_local_server(server):
    own = server.url.removeprefix("http://")
    for path in COMMANDS:
        assert server.get(path)[0] == 405
        body = b'{"prompt": "a"}'
        for foreign in (
            {"Host": "evil.example"},
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Content-Type": "text/plain"},
            {"Content-Type": ""},
        ):
            assert server.post(path, body, **foreign)[0] in (403, 415), (path, foreign)
    assert server.post("/start_profile", {})[0] == 404, "profiling is off"
    answer = server.post("/v1/completions", {"prompt": "a"}, Origin=f"http://{own}")
    assert answer[0] == 200
