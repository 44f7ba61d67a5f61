"""Harms a server in four ways, and counts what it answers.

    python tools/harm_server.py
    python tools/harm_server.py --chats=300 --headers=100 --kills=20 --schemas=500

Chats with malformed tools and requests with hostile Host or Origin headers must get a 4xx, without
CORS headers. A server that is killed at any time, or asked to stop, must start again on the same
port. After each of these, an honest request must get the answer that it got at first, and no
server's log may hold a traceback. Random answers at temperature 1 under the grammars of random
tools must parse into calls that satisfy their schemas. Prints counts, and exits with 1 after a
problem.
"""

import argparse
import collections
import contextlib
import http.client
import json
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))

from support import random_calls, served, spoiled

from dflash.text.chat_formats.table import FORMATS

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HONEST = {"prompt": "abcabcabc", "max_tokens": 24, "temperature": 0.8, "seed": 5}
LONG = {"prompt": "abcabc", "max_tokens": 100, "n": 4, "stream": True}
OPTIONS = ("serve.tool_format=hermes", "serve.read_s=5")
START_S = 8.0  # Time of a start within which servers are killed.


def honest_answer(url: str) -> str | None:
    """Returns the text of the honest request; None if it fails."""
    status, content = send(url, "POST", TEXT, HONEST)
    return json.loads(content)["choices"][0]["text"] if status == 200 else None


def send(url: str, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    """Returns the status and the body of an answer."""
    place = urllib.parse.urlsplit(url)
    with contextlib.closing(http.client.HTTPConnection(place.netloc, timeout=120)) as link:
        link.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read()


# --- malformed tools ------------------------------------------------------------------------------


def harm_with_chats(url: str, count: int, chance: random.Random) -> Iterator[str]:
    """Sends chats with malformed tools until `count` were rejected; yields problems."""
    statuses: collections.Counter[int] = collections.Counter()
    fixed = {"max_tokens": 4, "stop_token_ids": [0]}
    fixed |= dict.fromkeys(("reasoning_effort", "max_thinking_tokens"))
    status, content = send(url, "POST", CHAT, spoiled.CHAT | fixed)
    if status != 200:
        yield f"{status} for a valid chat: {content[:300]!r}"
    while sum(number for status, number in statuses.items() if 400 <= status < 500) < count:
        body = spoiled.chat(chance) | fixed
        status, content = send(url, "POST", CHAT, body)
        statuses[status] += 1
        if status == 200:  # What was spoiled does not matter to the server.
            continue
        message = json.loads(content)["error"]["message"]
        if not 400 <= status < 500 or "\n" in message:
            yield f"{status} for {json.dumps(body)}: {message}"
    print(f"chats with malformed tools: {dict(sorted(statuses.items()))}", flush=True)


# --- hostile headers ------------------------------------------------------------------------------


def hostile_headers(port: int, count: int, chance: random.Random) -> Iterator[bytes]:
    """Yields header lines that no client of the server sends."""
    names = ("evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "0x7f.1", "2130706433")
    names += ("127.1", "[::1]evil", "localhost,evil.example", "evil@localhost", "LOCALHOST.", "[")
    names += ("", "a" * 5000, "localhost evil", "\xe9vil", "localhost%00.evil", "0.0.0.0", "*")
    schemes = ("http://", "https://", "file://", "chrome-extension://", "", "//", "javascript:")
    for number in range(count):
        name = chance.choice(names)
        place = name + chance.choice(("", f":{port}", ":80", ":99999", f":{port}@evil"))
        if number % 2:
            line = f"Host: {place}"
        else:
            if chance.random() < 0.2:
                place = chance.choice(("null", f"localhost:{port + 1}", f"127.0.0.1:{port}.evil"))
            line = f"Host: localhost:{port}\r\nOrigin: {chance.choice(schemes)}{place}"
        yield line.encode("latin-1")


def harm_with_headers(url: str, count: int, chance: random.Random) -> Iterator[str]:
    """Sends requests with hostile headers; yields problems."""
    port = urllib.parse.urlsplit(url).port
    content = json.dumps(HONEST).encode()
    statuses: collections.Counter[str] = collections.Counter()
    for lines in hostile_headers(port, count, chance):
        method = chance.choice((b"POST", b"OPTIONS"))
        head = b"%s /v1/completions HTTP/1.1\r\n%s\r\nConnection: close\r\n" % (method, lines)
        head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        with socket.create_connection(("127.0.0.1", port), timeout=60) as link:
            link.sendall(head + content)
            answer = b"".join(iter(lambda link=link: link.recv(65536), b""))
        status = answer[9:12].decode()
        statuses[status] += 1
        if not status.startswith("4") or b"access-control-allow" in answer.lower():
            yield f"{lines!r}: {answer[:300]!r}"
    print(f"hostile headers: {dict(sorted(statuses.items()))}", flush=True)


# --- kills ----------------------------------------------------------------------------------------


def start(command: Sequence[str], log: pathlib.Path) -> subprocess.Popen:
    """Starts a server."""
    with log.open("a") as stderr:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)


def disturb(url: str) -> None:
    """Asks for a long stream, whose server may be killed meanwhile."""
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
        send(url, "POST", TEXT, LONG)


def harm_with_kills(server: served.Server, count: int, chance: random.Random) -> Iterator[str]:
    """Kills or stops servers on one port, in a start or while they decode; yields problems."""
    wanted, log = honest_answer(server.url), server.log
    served.ended(server.process, signal.SIGTERM)
    port = urllib.parse.urlsplit(server.url).port
    command = [sys.executable, "-m", "dflash.serve", str(server.config), f"--port={port}"]
    command += ["serve.drain_s=1", *OPTIONS]
    ends: collections.Counter[str] = collections.Counter()
    for number in range(count):
        how = signal.SIGTERM if number % 2 else signal.SIGKILL
        process = start(command, log)
        if number % 4 > 1:
            time.sleep(chance.uniform(0, START_S))
            where = "in a start"
        else:
            where = "while it decodes"
            url = process.stdout.readline().strip()
            if not url or honest_answer(url) != wanted:
                yield f"cycle {number}: a server did not recover"
            clients = [threading.Thread(target=disturb, args=(url,)) for _ in range(6)]
            for client in clients:
                client.start()
            time.sleep(chance.uniform(0, 1))
        status = served.ended(process, how)
        ends[f"{how.name} {where}: status {status}"] += 1
        process.stdout.close()
    process = start(command, log)
    if honest_answer(process.stdout.readline().strip()) != wanted:
        yield "the last server did not recover"
    served.ended(process, signal.SIGTERM)
    for end, number in sorted(ends.items()):
        print(f"kills: {end}: {number}", flush=True)


# --- random calls ---------------------------------------------------------------------------------


def check_schemas(count: int) -> Iterator[str]:
    """Checks the calls of random answers with `count` random sets of tools; yields problems."""
    names, calls = list(FORMATS), 0
    for number in range(count):
        name, seed = names[number % len(names)], 10_000 + number // len(names)
        try:
            calls += random_calls.check(name, seed, special=bool(number // len(names) % 2))
        except Exception as error:
            yield f"{name}, seed {seed}: {error!r:.500}"
    print(f"random tools: {count}, calls that satisfy their schemas: {calls}", flush=True)


def harm(given: argparse.Namespace, directory: pathlib.Path) -> Iterator[str]:
    """Yields the problems of all four ways."""
    chance = random.Random(given.seed)
    yield from check_schemas(given.schemas)
    with served.serving(directory, *OPTIONS) as server:
        wanted = honest_answer(server.url)
        for name, harmed in (
            ("chats", harm_with_chats(server.url, given.chats, chance)),
            ("headers", harm_with_headers(server.url, given.headers, chance)),
        ):
            yield from harmed
            if server.process.poll() is not None or honest_answer(server.url) != wanted:
                yield f"after {name}: the server has ended, or answers an honest request otherwise"
        if given.kills:
            yield from harm_with_kills(server, given.kills, chance)
        text = server.log.read_text()
        if "Traceback" in text:
            yield text[text.index("Traceback") :][:3000]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=300, help="malformed chats to be rejected")
    parser.add_argument("--headers", type=int, default=100, help="requests with hostile headers")
    parser.add_argument("--kills", type=int, default=20, help="servers that are killed or stopped")
    parser.add_argument("--schemas", type=int, default=500, help="sets of random tools")
    parser.add_argument("--seed", type=int, default=0)
    with tempfile.TemporaryDirectory() as directory:
        problems = list(harm(parser.parse_args(), pathlib.Path(directory)))
    print("\n".join(problems[:20]) or "no problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
