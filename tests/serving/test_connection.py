"""Limits of connections, over sockets and a small application."""

import asyncio
import contextlib
import socket
import threading

import pytest
from support.served import wait_until

from dflash.config.serve_schema import ServeConfig
from dflash.serving import connection
from dflash.serving.server import listen

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
LARGE = 2**26  # More than the operating system buffers.
QUICK = ServeConfig(read_s=0.3, send_s=0.3)


class App:
    """Application that reads bodies, and records what it was asked and when clients left."""

    def __init__(self, answer: bytes = b"ok", reads: bool = True):
        self.answer, self.reads = answer, reads
        self.paths, self.bodies, self.left = [], [], 0

    async def __call__(self, scope, receive, send):
        self.paths.append(scope["path"])
        body, more = b"", self.reads
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.left += 1
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        length = str(len(self.answer)).encode()
        start = {"type": "http.response.start", "status": 200}
        await send(start | {"headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": self.answer})


@contextlib.contextmanager
def serving(app, limits=QUICK):
    """Yields a function that opens a connection to a server over `app`, and the server."""
    listener = listen("127.0.0.1", 0)
    place = listener.getsockname()
    server = connection.Server(app, limits, 1.0)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    opened = contextlib.ExitStack()
    try:
        wait_until(lambda: server.started, "server", 60)
        yield lambda: opened.enter_context(socket.create_connection(place, 60)), server
    finally:
        opened.close()
        server.should_exit = True
        thread.join()


def received(client: socket.socket) -> bytes:
    """Returns all that arrives until the server closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(2**16):
            content += piece
    return content


def answered(client: socket.socket, request: bytes = GET) -> bool:
    """Sends a request and returns whether the server answers it."""
    client.sendall(request)
    content = b""
    while not content.endswith(b"\r\n\r\nok"):
        piece = client.recv(2**16)
        if not piece:
            return False
        content += piece
    return content.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("first", "begin"),
    [
        (b"", b""),
        (b"", b"G"),
        (b"", GET[:-2]),
        (GET, b"GET / HT"),
        (POST + b"Content-Length: 9\r\n\r\n", b"{}"),
    ],
    ids=["silent", "one-byte", "no-end", "second-request", "unread-body"],
)
def test_a_head_that_does_not_arrive_ends_the_connection(first, begin):
    with serving(App(reads=False)) as (open_one, _):
        client = open_one()
        with contextlib.suppress(ConnectionError):  # It may end before, on a busy machine.
            if not first or answered(client, first):
                client.sendall(begin)
        assert received(client) == b""


def test_a_trickle_does_not_extend_the_time():
    with serving(App(reads=False)) as (open_one, _):
        client = open_one()
        client.settimeout(0.02)
        with contextlib.suppress(ConnectionError):
            while True:
                client.sendall(b"G")
                with contextlib.suppress(TimeoutError):
                    assert client.recv(1) == b""
                    break


@pytest.mark.parametrize(
    "begin",
    [b"GET /", GET[:-2] + b"X-A: ", POST + b"Transfer-Encoding: chunked\r\n\r\n1;"],
    ids=["url", "header", "chunk"],
)
def test_a_head_without_end_is_rejected(begin):
    with serving(App(), ServeConfig()) as (open_one, _):
        client = open_one()
        with contextlib.suppress(ConnectionError):
            client.sendall(begin + b"a" * 2**18)
        assert received(client)[:12] in (b"HTTP/1.1 400", b"")
        assert answered(open_one())


def test_silent_connections_make_room_for_others():
    limits = ServeConfig(connections=8)
    with serving(App(), limits) as (open_one, server):
        uploading = open_one()
        uploading.sendall(POST + b"Content-Length: 9\r\n\r\n{")
        kept = open_one()
        for _ in range(30):
            open_one()
            assert answered(kept), "it was not silent for longest"
        assert answered(open_one())
        wait_until(lambda: len(server.server_state.connections) <= 8, "closed connections", 60)
        assert received(uploading) == b""


@pytest.mark.parametrize("upgrade", [b"websocket", b"h2c", b"x"])
def test_the_body_of_an_upgrade_request_is_a_body(upgrade):
    app, second = App(), b"GET /smuggled HTTP/1.1\r\nHost: a\r\n\r\n"
    with serving(app, ServeConfig()) as (open_one, _):
        client = open_one()
        length = str(len(second)).encode()
        head = POST + b"Connection: Upgrade\r\nUpgrade: " + upgrade
        head += b"\r\nContent-Length: " + length + b"\r\n\r\n"
        assert answered(client, head + second)
        assert answered(client)
    assert app.paths == ["/", "/"]
    assert app.bodies == [second, b""]


def test_an_unread_answer_ends_the_connection():
    with serving(App(answer=b"a" * LARGE)) as (open_one, server):
        client = open_one()
        client.sendall(GET)
        wait_until(lambda: not server.server_state.connections, "end of the connection", 60)
        assert len(received(client)) < LARGE


def test_a_slow_but_steady_reader_gets_everything():
    with serving(App(answer=b"a" * LARGE), ServeConfig()) as (open_one, _):
        client = open_one()
        client.sendall(GET)
        count = 0
        while count < LARGE:
            count += len(client.recv(2**16))


def test_malformed_framing_after_an_answer_is_quiet(capfd):
    with serving(App(reads=False), ServeConfig()) as (open_one, server):
        client = open_one()
        assert answered(client, POST + b"Transfer-Encoding: chunked\r\n\r\n")
        client.sendall(b"zz\r\n")
        assert received(client) == b""
        wait_until(lambda: not server.server_state.connections, "end of the connection", 60)
    assert capfd.readouterr().err == ""
