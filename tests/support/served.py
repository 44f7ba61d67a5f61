"""A server over a tiny target, in a process of its own, and what decoding says instead."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Tokens are ASCII characters, so every text is as long as its tokens are many.
CONFIG = """
target: {name: qwen3, checkpoint: random, architecture: {
  vocab_size: 128, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1,
  num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, max_position_embeddings: 512}}
drafter: {name: ngram, block_size: 4}
decode: {max_new_tokens: 24, batch_size: 4, sync_every: 4, page_size: 16, max_length: 128,
  prefill_chunk: 16, partial_dispatches: false}
serve: {model: tiny, queue: 64, max_body_bytes: 100000, read_s: 2, drain_s: 20}
dtype: float32
"""
# A trained target with its own chat template, and a drafter that needs no training.
REAL_CONFIG = """
target: {checkpoint: assets/tiny_target}
drafter: {name: ngram, block_size: 4}
decode: {max_new_tokens: 60, batch_size: 2, max_length: 256, partial_dispatches: false}
serve: {model: tiny, grammars: false}
dtype: float32
"""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
      url: without a slash at its end.
      process: runs it.
      config: its file.
      log: what it writes to stderr.
    """

    url: str
    process: subprocess.Popen
    config: pathlib.Path
    log: pathlib.Path

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body of a GET; the body is JSON where it says so."""
        return self.send("GET", path)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and body of a POST; `body`: an object, or bytes as they are."""
        return self.send("POST", path, body, **headers)

    def post_later(self, path: str, body: Any, **headers: str) -> concurrent.futures.Future:
        """Starts a POST on a thread of its own; the result is its status and body."""
        pool = concurrent.futures.ThreadPoolExecutor(1)
        answer = pool.submit(self.post, path, body, **headers)
        pool.shutdown(wait=False)
        return answer

    def send(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        status, _, content = self.exchange(method, path, body, **headers)
        return status, content

    def exchange(
        self, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and body of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(self.url + path, data, given, method=method)
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                return answer.status, answer.headers, _content(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, _content(error)

    def text(self, body: Mapping[str, Any]) -> str:
        """The first completion of a body."""
        status, content = self.post("/v1/completions", body)
        assert status == 200, content
        return content["choices"][0]["text"]

    def streamed(self, body: Mapping[str, Any]) -> str:
        """The completion of a body, from its stream."""
        events = self.events("/v1/completions", body)
        return "".join(event["choices"][0]["text"] for event in events)

    def plain(self, prompt: str | Sequence[int], **parameters: Any) -> str:
        """The completion of a prompt without drafting, which serve.compare allows."""
        return self.text({"prompt": prompt, "drafting": False, **parameters})

    def events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        """The events of a stream, which has to end with [DONE]."""
        status, content = self.post(path, {**body, "stream": True})
        assert status == 200, content
        events = content.decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def _content(answer) -> Any:
    content = answer.read()
    return json.loads(content) if "json" in answer.headers.get("Content-Type", "") else content


@contextlib.contextmanager
def serving(
    directory: pathlib.Path,
    *overrides: str,
    program: Sequence[str] = ("-m", "dflash.serve"),
    config_text: str = CONFIG,
    **environment: str,
) -> Iterator[Server]:
    """A server that is ready, until the context ends."""
    config, log = directory / "serve.yml", directory / "log.txt"
    config.write_text(config_text)
    command = [sys.executable, *program, str(config), "--port=0", *overrides]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | environment
        )
    try:
        url = process.stdout.readline().strip()
        assert url, log.read_text()
        yield Server(url, process, config, log)
    finally:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen, number: signal.Signals, patience_s: float = 300) -> int:
    """The exit status after a signal."""
    process.send_signal(number)
    return process.wait(patience_s)


def wait_until(holds, what: str, patience_s: float = 300.0) -> None:
    """Returns once `holds()` is true."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() - begin < patience_s, f"no {what} within {patience_s} s"
        time.sleep(0.02)


@functools.cache
def plain_decoding(config: pathlib.Path):
    """Decodes without a drafter: what every answer has to equal."""
    import dflash

    return dflash.LLM(config_for_decoding(config), "drafter.name=none")


def config_for_decoding(config: pathlib.Path) -> pathlib.Path:
    """The server's config without what decoding does not know."""
    lines = [line for line in config.read_text().splitlines() if not line.startswith("serve:")]
    found = config.with_name("decode.yml")
    found.write_text("\n".join(lines))
    return found


def decoded(config: pathlib.Path, prompt: str | Sequence[int], **sampling) -> tuple[int, ...]:
    """The output ids of a prompt by `dflash.LLM`, alone, without drafting."""
    import dflash

    llm = plain_decoding(config)
    return llm.generate([prompt], dflash.Sampling(**sampling))[0].token_ids
