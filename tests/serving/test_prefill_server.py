"""Tests of a server that prefills and one that decodes, as processes of their own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
from support import served
from support.served import ended, wait_until

from dflash.config import serve_schema

TEXT = "/v1/completions"
DECODE = ("serve.role=decode", "serve.prefill_s=2", "decode.num_pages=10")
BODY = {"prompt": "abcabcabcab", "max_tokens": 40, "seed": 3}


class PrefillProcess:
    """A server that prefills, at a port that it keeps when it starts again."""

    def __init__(self, directory, **environment):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.config, self.log = directory / "prefill.yml", directory / "prefill.txt"
        self.config.write_text(served.CONFIG)
        self._environment = os.environ | environment

    def start(self, *overrides: str) -> None:
        options = "serve.role=prefill", f"--port={self.port}", *overrides
        command = [sys.executable, "-m", "dflash.serve", str(self.config), *options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=self._environment
            )

    def wait(self) -> None:
        assert self.process.stdout.readline().strip() == self.address, self.log.read_text()


@contextlib.contextmanager
def prefilling(directory, *overrides, **environment):
    process = PrefillProcess(directory, **environment)
    process.start(*overrides)
    try:
        process.wait()
        yield process
    finally:
        process.process.kill()
        process.process.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A server that decodes with few pages, and the process that prefills for it."""
    directory = tmp_path_factory.mktemp("roles")
    secret = {"DFLASH_RUN_SECRET": "of this run"}
    with prefilling(directory, **secret) as process:
        address = f"serve.prefill={process.address}"
        with served.serving(directory, *DECODE, address, **secret) as server:
            yield server, process


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_are_those_of_one_server(pair, temperature):
    server, _ = pair
    prompts = [[65 + (i * j) % 25 for j in range(3 + 17 * i)] for i in range(6)]
    answers = {}

    def ask(i: int) -> None:
        answers[i] = server.post(TEXT, BODY | {"prompt": prompts[i], "temperature": temperature})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for i, prompt in enumerate(prompts):
        status, answer = answers[i]
        assert status == 200, answer
        wanted = served.decoded(
            server.config, prompt, temperature=temperature, seed=3, max_tokens=40
        )
        text = "".join(chr(token) for token in wanted)
        assert answer["choices"][0]["text"] == text


def test_grammars_and_metrics(pair):
    server, _ = pair
    body = BODY | {"guided_regex": "[ab]{12}", "stop_token_ids": [0], "include_metrics": True}
    status, answer = server.post(TEXT, body)
    assert status == 200, answer
    assert set(answer["choices"][0]["text"].rstrip("\0")) == set("ab")
    assert answer["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


def test_a_server_that_prefills_may_come_back(pair):
    """It is killed and started again: one line each, requests fail meanwhile, and then do not."""
    server, process = pair
    wanted = server.post(TEXT, BODY | {"temperature": 0.0})
    process.process.send_signal(signal.SIGKILL)
    process.process.wait()
    assert served_lines(server, "the other process has closed the connection; connecting again")
    status, headers, answer = server.exchange("POST", TEXT, BODY)
    assert (status, headers["Retry-After"]) == (503, "5")
    assert answer["error"]["code"] == "unavailable"
    assert "cannot be reached; try again later" in answer["error"]["message"]
    process.start()
    process.wait()
    wait_until(lambda: server.post(TEXT, BODY)[0] == 200, "answer", 60)
    assert server.post(TEXT, BODY | {"temperature": 0.0})[1]["choices"] == wanted[1]["choices"]
    log = server.log.read_text()
    assert log.count("connecting again") == log.count("connected again") == 1
    assert "Traceback" not in log


def served_lines(server, text: str) -> bool:
    wait_until(lambda: text in server.log.read_text(), text, 30)
    return True


def test_signals_end_both(pair):
    """Ends the module's processes, so this test comes last."""
    server, process = pair
    assert ended(server.process, signal.SIGTERM) == 0
    assert ended(process.process, signal.SIGINT) == 130
    assert "Traceback" not in process.log.read_text() + server.log.read_text()


def test_who_does_not_fit_is_told_in_one_line(tmp_path):
    with prefilling(tmp_path, DFLASH_RUN_SECRET="a") as process:
        for options, secret, line in [
            ((), "b", "a frame is not signed with this process's secret"),
            (("decode.page_size=32",), "a", "decode.page_size: 16 there, 32 here"),
            (("drafter.name=none",), "a", "drafter.name: 'ngram' there, 'none' here"),
        ]:
            options += (f"serve.prefill={process.address}", "--port=0")
            done = subprocess.run(
                [sys.executable, "-m", "dflash.serve", process.config, *DECODE, *options],
                env=os.environ | {"DFLASH_RUN_SECRET": secret},
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
            assert done.returncode == 2
            last = done.stderr.splitlines()[-1]
            assert last.startswith(f"error: serve.prefill: prefill server {process.address}: ")
            assert line in last
            assert "Traceback" not in done.stderr
        with socket.create_connection(("127.0.0.1", process.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_until(lambda: "is not a server of dflash" in process.log.read_text(), "line")
        assert process.process.poll() is None
        assert "Traceback" not in process.log.read_text()


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        ("[::1]:1", ("::1", 1)),
        ("host", None),
        (":1", None),
        ("host:0", None),
        ("host:x", None),
        ("host:65536", None),
    ],
)
def test_addresses(address, parts):
    assert serve_schema.host_and_port(address) == parts
