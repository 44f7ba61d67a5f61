"""Event streams: clients that disconnect or stop reading, and errors in the middle."""

import asyncio
import contextlib

import pytest

from dflash.serving.http import EventStream
from dflash.serving.request_error import RequestError

SCOPE = {"type": "http"}


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
    async def disconnect():
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def slow():
        if begun:
            yield {}
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
