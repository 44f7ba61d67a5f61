"""Tests of the queue in which the grammars of requests are compiled."""

import asyncio
import time

import pytest
from support import grammars

from dflash import errors
from dflash.serving import structured_output
from dflash.serving.structured_output import GrammarQueue, StructuredOutput
from dflash.serving.validation import RequestError
from dflash.text import grammar_compiler


def constraint(pattern: str) -> StructuredOutput:
    return StructuredOutput("regex", pattern, "guided_regex")


def test_a_grammar_that_nobody_waits_for_holds_up_no_other(monkeypatch, tmp_path):
    """Clients that leave take their grammars along, whether these are compiled or wait."""

    async def storm() -> None:
        queue = GrammarQueue()
        grammars.replace_check(monkeypatch, tmp_path, "hangs", "time.sleep(1e6)")
        sent = [
            asyncio.ensure_future(queue.compile(constraint(f"a{{{i}}}"), grammars.vocabulary))
            for i in range(1, 9)
        ]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in sent)
        for task in sent:
            task.cancel()
        await asyncio.wait(sent)
        monkeypatch.undo()
        free = queue.compile(constraint("a?"), grammars.vocabulary)
        grammar = await asyncio.wait_for(free, 300)
        assert grammar.source == "a?"

    # So that a check that hangs does not end by itself.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(grammar_compiler, "_CLOCK_SECONDS", 1e6)
        asyncio.run(storm())


def test_too_many_grammars_are_refused(monkeypatch, tmp_path):
    grammars.replace_check(monkeypatch, tmp_path, "hangs", "time.sleep(1e6)")

    async def fill() -> RequestError:
        queue = GrammarQueue()
        most = structured_output._WORKERS + structured_output._MAX_WAITING
        tasks = [
            asyncio.ensure_future(queue.compile(constraint("ab?"), grammars.vocabulary))
            for _ in range(most + 1)
        ]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        (refused,) = done
        return refused.exception()

    error = asyncio.run(fill())
    assert (error.status, error.code) == (429, "queue_full")
    assert error.headers == {"Retry-After": "1"}
    assert "guided_regex: 8 other grammars wait to be compiled" in error.message


def test_clients_take_turns(monkeypatch):
    """A client's only grammar is compiled after one of each of the others."""
    order = []

    def compile(self, vocabulary, is_abandoned):
        order.append(self.source)
        time.sleep(0.01)

    monkeypatch.setattr(StructuredOutput, "compile", compile)

    async def storm() -> None:
        queue = GrammarQueue()
        sent = [
            asyncio.ensure_future(queue.compile(constraint(source), grammars.vocabulary, source[0]))
            for source in [f"{client}{i}" for client in "abc" for i in range(10)] + ["d"]
        ]
        await asyncio.gather(*sent)

    asyncio.run(storm())
    assert len(order) == 31
    assert order.index("d") < 8


def test_an_interrupted_check_may_be_tried_again(monkeypatch, tmp_path):
    grammars.replace_check(monkeypatch, tmp_path, "killed", "os.kill(os.getpid(), 9)")
    with pytest.raises(RequestError) as caught:
        asyncio.run(GrammarQueue().compile(constraint("ba?"), grammars.vocabulary))
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "1"})
    monkeypatch.undo()
    asyncio.run(GrammarQueue().compile(constraint("ba?"), grammars.vocabulary))


def test_a_grammar_at_fault_is_the_clients_error():
    with pytest.raises(RequestError, match="guided_regex: regex: ") as caught:
        asyncio.run(GrammarQueue().compile(constraint("(a"), grammars.vocabulary))
    assert (caught.value.status, caught.value.param) == (400, "guided_regex")

    def none():
        raise errors.InputError("not supported by this server")

    with pytest.raises(RequestError, match="guided_regex: not supported by this server"):
        asyncio.run(GrammarQueue().compile(constraint("a"), none))
