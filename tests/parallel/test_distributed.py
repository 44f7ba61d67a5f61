import re
import socket
import subprocess
import sys
import time

import pytest
from support import failure, free_port

from dflash import errors
from dflash.parallel import distributed


@pytest.fixture
def joined(monkeypatch):
    """Records the calls to jax instead of making them."""
    calls = []
    monkeypatch.setattr(
        distributed.jax.distributed, "initialize", lambda *args, **_: calls.append(args)
    )
    return calls


def test_nothing_given_does_nothing(joined):
    distributed.initialize(None, None, None)
    assert joined == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("10.0.0.1:8476", 2, 0), ("10.0.0.1:8476", 2, 0)),
        (("[::1]:8476", 1, 0), ("[::1]:8476", 1, 0)),
        (("auto", None, None), (None, None, None)),
        (("auto", 4, 3), (None, 4, 3)),
    ],
)
def test_joins_as_asked(joined, given, expected):
    distributed.initialize(*given)
    assert joined == [expected]


FLAGS = "--coordinator_address, --num_processes, --process_id"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("host:1", None, None), f"--num_processes, --process_id: required: {FLAGS} go "
         "together (or --coordinator_address=auto alone)"),
        ((None, 2, 0), f"--coordinator_address: required: {FLAGS} go together "
         "(or --coordinator_address=auto alone)"),
        (("host", 2, 0), "--coordinator_address: expected host:port or auto, got 'host'"),
        (("host:x", 2, 0), "--coordinator_address: expected host:port or auto, got 'host:x'"),
        (("host:70000", 2, 0), "--coordinator_address: expected host:port or auto, "
         "got 'host:70000'"),
        (("host:1", 0, 0), "--num_processes: expected 1 or more, got 0"),
        (("host:1", 2, 2), "--process_id: expected 0 to 1 with --num_processes=2, got 2"),
        (("host:1", 2, -1), "--process_id: expected 0 to 1 with --num_processes=2, got -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_one_line(joined, given, message):
    assert failure(distributed.initialize, *given, kind=errors.ConfigError) == message
    assert joined == []


def test_a_failure_to_join_names_the_address(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("DEADLINE_EXCEEDED:\n  barrier timed out")

    monkeypatch.setattr(distributed.jax.distributed, "initialize", refuse)
    assert failure(distributed.initialize, "host:1", 2, 0, kind=errors.UserError) == (
        "--coordinator_address=host:1: cannot join: DEADLINE_EXCEEDED: barrier timed out"
    )


def test_processes_that_do_not_come_are_one_line():
    code = "from dflash.parallel import distributed as d; d._JOIN_TIMEOUT_S = 2; "
    code += f"d.initialize('localhost:{free_port()}', 2, 1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert re.fullmatch(
        r"error: --coordinator_address=localhost:\d+: not all processes have joined within 2 s: "
        r"start all of them, and check that every host can reach this address\n",
        done.stderr,
    )


def test_process_0_listens_only_where_asked():
    """127.0.0.2 is another address of this machine, as that of a second network would be."""
    port = free_port()
    code = "from dflash.parallel import distributed as d; "
    code += f"d.initialize('127.0.0.1:{port}', 2, 0)"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        while True:
            assert process.poll() is None
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 60)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("address", "process", "expected"),
    [
        ("127.0.0.1:1", 0, "127.0.0.1:1"),
        ("localhost:1", 0, "localhost:1"),
        ("127.0.0.1:1", 1, None),
        (None, None, None),
        ("192.0.2.1:1", 0, None),  # reserved for documentation, so of no machine
        ("a.name.that.does.not.exist.invalid:1", 0, None),
    ],
)
def test_the_address_to_listen_at(address, process, expected, capfd, monkeypatch):
    assert distributed._bind_address(address, process) == expected
    warned = "listens on all interfaces" in capfd.readouterr().err
    assert warned == (process == 0 and expected is None)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "10.0.0.1:1")
    assert distributed._bind_address(address, process) is None
