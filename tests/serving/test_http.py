"""Streams beneath the endpoints: clients that leave or do not read, and failures on the way."""

import asyncio
import contextlib

import pytest

from dflash.serving.http import EventStream
from dflash.serving.request_error import RequestError

SCOPE = {"type": "http"}


class Call:
    """Notes whether it was left."""

    left = False

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        self.left = True


async def never(*unused):
    await asyncio.Event().wait()


def stream(events, *, receive=never, send=None, timeout_s=60.0):
    """What was sent, and the call, after a stream has ended."""
    sent, call = [], Call()

    async def keep(message):
        sent.append(message)

    answer = EventStream(events, call, timeout_s=timeout_s)
    asyncio.run(asyncio.wait_for(answer(SCOPE, receive, send or keep), 20))
    return sent, call


async def numbers(count, *, then=None):
    for number in range(count):
        yield {"number": number}
    if then is not None:
        raise then


def bodies(sent):
    return b"".join(message.get("body", b"") for message in sent)


def test_events_and_an_end():
    sent, call = stream(numbers(2))
    assert sent[0]["status"] == 200
    assert bodies(sent) == b'data: {"number":0}\n\ndata: {"number":1}\n\ndata: [DONE]\n\n'
    assert call.left


def test_what_fails_before_the_first_event_is_a_status():
    sent, call = stream(numbers(0, then=RequestError("gone", status=500)))
    assert [message["status"] for message in sent if "status" in message] == [500]
    assert b'"gone"' in bodies(sent)
    assert call.left


def test_what_fails_later_is_an_event():
    sent, call = stream(numbers(1, then=RequestError("gone", status=500)))
    assert sent[0]["status"] == 200
    assert b'data: {"error":{"message":"gone"' in bodies(sent)
    assert bodies(sent).endswith(b"data: [DONE]\n\n")
    assert call.left


def test_a_client_that_does_not_read_is_dropped():
    closed = []

    async def endless():
        try:
            while True:
                yield {}
        finally:
            closed.append(True)

    _, call = stream(endless(), send=never, timeout_s=0.05)
    assert call.left
    assert closed


@pytest.mark.parametrize("begun", [False, True])
def test_a_client_that_leaves_ends_the_stream(begun):
    async def leaves():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def slow():
        if begun:
            yield {}
        await never()
        yield {}

    _, call = stream(slow(), receive=leaves)
    assert call.left


def test_a_stream_that_is_never_begun_leaves_its_call():
    async def gone():
        return {"type": "http.disconnect"}

    call = Call()

    async def cancelled():
        task = asyncio.ensure_future(EventStream(numbers(1), call, timeout_s=1)(SCOPE, gone, never))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert call.left
