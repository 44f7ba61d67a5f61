"""Tests of the signatures of messages, over a real coordination service."""

import concurrent.futures

import pytest
from jax._src.lib import _jax
from support import free_port

from dflash import errors
from dflash.parallel import agreement, messages
from dflash.parallel.jax_internals import Coordination


@pytest.fixture
def clients():
    """Two processes' clients of one service."""
    port = free_port()
    service = _jax.get_distributed_runtime_service(f"127.0.0.1:{port}", 2)
    clients = [_jax.get_distributed_runtime_client(f"127.0.0.1:{port}", i) for i in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(lambda client: client.connect(), clients))
        yield clients
        list(pool.map(lambda client: client.shutdown(), clients))
    service.shutdown()


def gather(clients, name: str, values) -> list:
    with concurrent.futures.ThreadPoolExecutor() as pool:
        members = [Coordination(client, i, 2) for i, client in enumerate(clients)]
        return list(pool.map(agreement._gather, [name] * 2, values, members))


@pytest.mark.parametrize("secret", ["", "s3cret"])
def test_processes_with_one_secret_exchange_values(clients, secret, monkeypatch):
    monkeypatch.setenv(agreement.SECRET, secret)
    values = [{"a": 1}, {"a": 2}]
    assert gather(clients, "x", values) == [values, values]
    assert gather(clients, "x", values[::-1]) == [values[::-1]] * 2


def test_a_message_of_somebody_else_is_refused(clients, monkeypatch):
    """Somebody without the secret joins as process 1, with values of his own or of another key."""
    mine, other = clients
    own = Coordination(mine, 0, 2)
    monkeypatch.setenv(agreement.SECRET, "another")
    forged = agreement._signed("dflash/value/start/1/1", messages.encode("forged"))
    monkeypatch.setenv(agreement.SECRET, "s3cret")
    replayed = agreement._signed("dflash/value/other/1/1", messages.encode("replayed"))
    for number, value in enumerate([messages.encode("plain"), b"", forged, replayed], start=1):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(agreement._gather, "start", "value", own)
            other.key_value_set_bytes(f"dflash/value/start/{number}/1", value)
            other.wait_at_barrier(f"dflash/wait/start/{number}", 60_000)
            with pytest.raises(errors.UserError) as caught:
                answer.result()
        assert str(caught.value) == (
            "process 1: its message 'start' is not signed with this run's secret; set the same "
            "DFLASH_RUN_SECRET for all processes"
        )


def test_a_failure_of_somebody_else_is_not_shown(monkeypatch):
    monkeypatch.setenv(agreement.SECRET, "s3cret")
    text = '{"process": 1, "status": 0, "lines": ["forged"]}'
    unreadable = agreement.Failure(0, 1, ("the reported failure is not readable",))
    assert agreement._parse_failure(text) == unreadable
    signed = agreement._signed(agreement._FAILURE, text.encode()).decode()
    assert agreement._parse_failure(signed) == agreement.Failure(1, 0, ("forged",))
