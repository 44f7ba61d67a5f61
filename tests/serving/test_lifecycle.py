"""Start, shutdown and overload of the server."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.parse

import pytest
from support import served
from support.served import ended, wait_until

TEXT = "/v1/completions"
SLOW = {"prompt": "abc", "max_tokens": 120, "temperature": 1.0, "seed": 1}


def small_server(directory):
    """A server with an API key, few slots and a short queue."""
    options = ("serve.queue=2", "decode.batch_size=1", "decode.sync_every=1")
    return served.serving(directory, *options, DFLASH_API_KEY="secret")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A server for this module."""
    with small_server(tmp_path_factory.mktemp("own")) as running:
        yield running


def key(server):
    """Returns the server and the Authorization header."""
    return server, {"Authorization": "Bearer secret"}


def test_the_api_key_is_required(own):
    server, header = key(own)
    assert server.get("/v1/models")[0] == 401
    assert server.send("GET", "/v1/models", Authorization="Bearer other")[0] == 401
    assert server.send("GET", "/v1/models", **header)[0] == 200
    assert {server.get(path)[0] for path in ("/", "/health", "/ping", "/version")} == {200}
    assert server.get("/metrics")[0] == 401


def running(server) -> float:
    _, text = server.send("GET", "/metrics", Authorization="Bearer secret")
    lines = text.decode().splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def opened(server, body) -> socket.socket:
    """Returns a connection that has sent a request and does not read."""
    place, content = urllib.parse.urlsplit(server.url), json.dumps(body).encode()
    connection = socket.create_connection((place.hostname, place.port), 60)
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer secret\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_slot(own, stream):
    connection = opened(own, {**SLOW, "n": 3, "stream": stream})
    wait_until(lambda: running(own) == 3, "requests under way")
    connection.close()
    wait_until(lambda: running(own) == 0, "end of what nobody waits for")


def test_a_full_queue_is_status_429(own):
    server, header = key(own)
    connection = opened(own, {**SLOW, "n": 3, "stream": True})
    wait_until(lambda: running(own) == 3, "requests under way")
    status, headers, answer = server.exchange("POST", TEXT, {"prompt": "a"}, **header)
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    assert int(headers["Retry-After"]) >= 1
    connection.close()
    wait_until(lambda: running(own) == 0, "end of what nobody waits for")
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}, **header)[0] == 200


def test_a_small_request_passes_a_large_one(tmp_path):
    with served.serving(tmp_path, "decode.batch_size=1") as server:
        large = server.post_later(TEXT, SLOW | {"n": 60})
        wait_until(lambda: running(server) == 60, "large request under way")
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert not large.done(), "58 of 60 outputs were behind the small request"
        status, answer = large.result(300)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 60 * 120)


def test_a_port_in_use(own):
    port = urllib.parse.urlsplit(own.url).port
    command = [sys.executable, "-m", "dflash.serve", str(own.config), f"--port={port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        f"error: --host=127.0.0.1 --port={port}: cannot listen there: Address already in use"
    )


def test_sigterm_lets_requests_finish(tmp_path):
    with small_server(tmp_path) as one:
        server, header = key(one)
        asked = server.post_later(TEXT, {**SLOW, "n": 3}, **header)
        wait_until(lambda: running(server) == 3, "requests under way")
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health")[0] == 503, "draining")
        refused = server.post(TEXT, {"prompt": "a"}, **header)
        status, answer = asked.result(300)
        assert server.process.wait(300) == 0, server.log.read_text()
    assert (status, answer["usage"]["completion_tokens"]) == (200, 360)
    assert refused[0] == 503


def test_profiles_start_and_stop_once(tmp_path):
    profiles = tmp_path / "profiles"
    with served.serving(tmp_path, f"--profile_dir={profiles}") as own:
        assert own.get("/stop_profile")[0] == 405
        steps = ("stop", 409), ("start", 200), ("start", 409), ("stop", 200), ("stop", 409)
        for step, status in steps:
            assert own.post(f"/{step}_profile", {})[0] == status
        assert own.post(TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
    assert list(profiles.rglob("*.xplane.pb"))


def test_restart_after_kill_and_exit_after_engine_failure(tmp_path):
    """A killed server frees its port; a server whose engine fails responds with status 500."""
    with served.serving(tmp_path) as first:
        port = urllib.parse.urlsplit(first.url).port
        connection = opened(first, {**SLOW, "stream": True})
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait(300)
        connection.close()
    crash = tmp_path / "crash.py"
    crash.write_text(CRASH)
    with served.serving(tmp_path, f"--port={port}", program=(str(crash),)) as second:
        assert second.url.endswith(str(port))
        others = [second.post_later(TEXT, SLOW) for _ in range(3)]
        wait_until(lambda: running(second) == 3, "requests under way")
        status, answer = second.post(TEXT, {"prompt": "crash!", "max_tokens": 8})
        assert (status, answer["error"]["code"]) == (500, "failed")
        answered = [other.result()[0] for other in others if not other.exception(300)]
        assert {*answered} <= {200, 500}
        assert second.process.wait(300) == 1
        assert "RuntimeError: the device is gone" in second.log.read_text()


# The server with a scheduler that chokes on a prompt.
CRASH = """
from dflash import serve
from dflash.inference.scheduler import Scheduler

submit = Scheduler.submit


def failing(self, request):
    if bytes(request.prompt) == b"crash!":
        raise RuntimeError("the device is gone")
    submit(self, request)


Scheduler.submit = failing
serve.main()
"""


def test_a_request_that_fails_ends_alone(tmp_path):
    """A token whose logits are not finite, and a grammar that raises, end their requests alone."""
    program = tmp_path / "damaged.py"
    program.write_text(DAMAGED)
    with served.serving(tmp_path, program=(str(program),)) as own:
        whole = own.post(TEXT, {**SLOW, "seed": 1})
        other = own.post_later(TEXT, {**SLOW, "seed": 1})
        status, answer = own.post(TEXT, {"prompt": "damaged: ~", "max_tokens": 8})
        assert (status, answer["error"]["code"]) == (500, "failed")
        assert answer["error"]["message"].startswith("the target's logits for token 1 of the")
        fields = {"guided_regex": "[a-z]{4}", "stop_token_ids": [10], "max_tokens": 8}
        status, answer = own.post(TEXT, {"prompt": "a", **fields})
        assert (status, answer["error"]["code"]) == (400, "failed")
        assert other.result(300)[1]["choices"] == whole[1]["choices"]
        assert own.get("/health")[0] == 200
        assert own.process.poll() is None
        log = own.log.read_text()
        assert log.count("request failed: prompt ") == 2
        assert "Traceback" not in log


# The server with a target whose embedding of "~" is damaged, and grammars that raise.
DAMAGED = """
import jax.numpy as jnp
from dflash import serve
from dflash.loading.job import Job
from dflash.text.grammar import Matcher

load_weights = Job.load_weights


def damaging(self):
    load_weights(self)
    embedding = self.target.embed_tokens.embedding
    embedding.set_value(embedding.get_value().at[ord("~")].set(jnp.inf))


def failing(self, tokens):
    raise RuntimeError("the lexer is gone")


Job.load_weights = damaging
Matcher.advance = failing
serve.main()
"""


def test_signals_during_the_start(tmp_path):
    config = tmp_path / "serve.yml"
    config.write_text(served.CONFIG)
    command = [sys.executable, "-m", "dflash.serve", str(config), "--port=0"]
    command += ["--compilation_cache=off"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    try:
        process.stderr.readline()  # it reads weights
        time.sleep(0.5)
        assert ended(process, signal.SIGTERM) == 0
        assert process.stdout.read() == "", "it left before it was ready"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_limits_and_priorities_of_clients(tmp_path):
    options = ("serve.client_requests=2", "serve.priorities=true", "decode.batch_size=1")
    with served.serving(tmp_path, *options, DFLASH_API_KEY="first, second") as server:
        first, second = ({"Authorization": f"Bearer {name}"} for name in ("first", "second"))
        body = {"prompt": "abc", "max_tokens": 4, "priority": -1}
        assert server.post(TEXT, body | {"n": 2}, **first)[0] == 200
        status, answer = server.post(TEXT, body | {"n": 3}, **first)
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        assert "serve.client_requests allows 2" in answer["error"]["message"]
        assert server.post(TEXT, body | {"n": 2}, **second)[0] == 200


def test_new_weights_while_requests_run(tmp_path):
    """They are those of the checkpoint, for running and for later requests, drafted or not."""
    import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
    from safetensors import numpy as safetensors

    name, source = "model.safetensors", pathlib.Path("dflash/assets/tiny_target")
    tensors = safetensors.load_file(source / name)
    zeros = {key: 0 * value if "layers.0" in key else value for key, value in tensors.items()}
    some = dict(list(tensors.items())[1:])
    contents = {"old": tensors, "new": zeros, "bad": some, "rotated": tensors}
    for directory, content in contents.items():
        (tmp_path / directory).mkdir()
        safetensors.save_file(content, tmp_path / directory / name)
    config = json.loads((source / "config.json").read_text())
    for directory, theta in {"new": config["rope_theta"], "rotated": 5e5}.items():
        described = json.dumps(config | {"rope_theta": theta, "eos_token_id": None})
        (tmp_path / directory / "config.json").write_text(described)
    options = ("serve.update_weights=true",)
    with served.serving(tmp_path, *options, config_text=served.REAL_CONFIG) as server:
        body = {"prompt": "Tom has 3 pens", "max_tokens": 20, "ignore_eos": True}

        def ask() -> str:
            return server.post(TEXT, body)[1]["choices"][0]["text"]

        before = ask()
        assert server.post("/update_weights", {"path": str(tmp_path / "new")})[0] == 200
        after = ask()
        assert after != before
        for path, reason in {"bad": "", "missing": "", "rotated": "rope_theta"}.items():
            status, answer = server.post("/update_weights", {"path": str(tmp_path / path)})
            assert (status, answer["error"]["param"]) == (400, "path")
            assert reason in answer["error"]["message"]
        assert ask() == after
        running = server.post_later(TEXT, body | {"max_tokens": 150})
        assert server.post("/update_weights", {"path": str(tmp_path / "old")})[0] == 200
        assert running.result(300)[0] == 200
        assert ask() == before
