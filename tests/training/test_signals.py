"""Signals that end a run: noticed once, acted on at once the second time."""

import os
import signal

import pytest

from dflash.training.trainer import StopSignal


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_noticed_and_the_handlers_come_back(number, status):
    before = {one: signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        stop.record(stop.all_reduce())
        assert (stop.received, stop.exit_status) == (None, 0)
        os.kill(os.getpid(), number)
        stop.record(stop.all_reduce())
        assert (stop.received, stop.exit_status) == (number, status)
        # The next one of its kind is not for this object any more.
        assert signal.getsignal(number) is before[number]
        other = ({*before} - {number}).pop()
        assert signal.getsignal(other) is not before[other]
    assert {one: signal.getsignal(one) for one in before} == before
