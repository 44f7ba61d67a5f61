"""Event streams: clients that disconnect or stop reading, and errors in the middle."""

import asyncio
import contextlib

import pytest
from starlette.requests import Request

from dflash.serving.http import LARGE_BODIES, BodyReader, EventStream
from dflash.serving.validation import RequestError

SCOPE = {"type": "http", "path": "/"}


class Context:
    """Context that records whether it was exited."""

    exited = False

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.exited = True


async def never(*unused):
    await asyncio.Event().wait()


def stream(events, *, receive=never, send=None):
    """Returns the sent messages and the context after a stream has ended."""
    sent, context = [], Context()

    async def keep(message):
        sent.append(message)

    answer = EventStream(events, context)
    asyncio.run(asyncio.wait_for(answer(SCOPE, receive, send or keep), 20))
    return sent, context


async def numbers(count, *, then=None):
    for number in range(count):
        yield {"number": number}
    if then is not None:
        raise then


def bodies(sent):
    return b"".join(message.get("body", b"") for message in sent)


def test_events_are_followed_by_done():
    sent, context = stream(numbers(2))
    assert sent[0]["status"] == 200
    assert bodies(sent) == b'data: {"number":0}\n\ndata: {"number":1}\n\ndata: [DONE]\n\n'
    assert context.exited


def test_an_error_before_the_first_event_sets_the_status():
    sent, context = stream(numbers(0, then=RequestError("gone", status=500)))
    assert [message["status"] for message in sent if "status" in message] == [500]
    assert b'"gone"' in bodies(sent)
    assert context.exited


def test_a_later_error_is_an_event():
    sent, context = stream(numbers(1, then=RequestError("gone", status=500)))
    assert sent[0]["status"] == 200
    assert b'data: {"error":{"message":"gone"' in bodies(sent)
    assert bodies(sent).endswith(b"data: [DONE]\n\n")
    assert context.exited


@pytest.mark.parametrize("begun", [False, True])
def test_a_disconnect_ends_the_stream(begun):
    waits = asyncio.Event()

    async def disconnect():
        await waits.wait()
        return {"type": "http.disconnect"}

    async def slow():
        if begun:
            yield {}
        waits.set()
        await never()
        yield {}

    _, context = stream(slow(), receive=disconnect)
    assert context.exited


def test_a_cancelled_stream_exits_its_context():
    async def gone():
        return {"type": "http.disconnect"}

    context = Context()

    async def cancelled():
        task = asyncio.ensure_future(EventStream(numbers(1), context)(SCOPE, gone, never))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert context.exited


@pytest.mark.parametrize("begun", [False, True])
def test_an_unexpected_error_is_logged_and_reported(begun, capsys):
    sent, context = stream(numbers(int(begun), then=TypeError("cannot be copied")))
    assert sent[0]["status"] == (200 if begun else 500)
    assert b"internal error; see the server's log" in bodies(sent)
    assert b"cannot be copied" not in bodies(sent)
    assert "TypeError: cannot be copied" in capsys.readouterr().err
    assert context.exited


def reading(reader, pieces, *, hold=None):
    """Reads a body of these pieces; waits for `hold` before the last one."""
    waiting = list(pieces)

    async def receive():
        if hold is not None and len(waiting) == 1:
            await hold.wait()
        piece = waiting.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    async def read():
        async with reader.read(Request(SCOPE | {"headers": []}, receive)) as body:
            return len(body)

    return read()


def test_large_bodies_together_are_bounded():
    """Small ones pass; large ones are rejected until others have been handled."""
    size = 2**16
    reader = BodyReader(max_bytes=size, timeout_s=60)

    async def scenario():
        hold = asyncio.Event()
        large = [
            asyncio.ensure_future(reading(reader, [b"a" * (size - 1), b"b"], hold=hold))
            for _ in range(LARGE_BODIES)
        ]
        await asyncio.sleep(0)
        while reader._held < LARGE_BODIES * (size - 1):
            await asyncio.sleep(0)
        assert await reading(reader, [b"a" * 2**15]) == 2**15
        with pytest.raises(RequestError, match="too many large requests") as caught:
            await reading(reader, [b"a" * 2**15, b"a" * 2**10])
        assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
        hold.set()
        assert await asyncio.gather(*large) == [size] * LARGE_BODIES
        assert await reading(reader, [b"a" * size]) == size
        with pytest.raises(RequestError, match="larger than"):
            await reading(reader, [b"a" * size, b"a"])
        assert reader._held == 0

    asyncio.run(scenario())
