"""A server over two processes gives the same outputs as one process."""

import os
import re
import signal
import subprocess
import sys

from support import free_port, served
from support.served import decoded

# Two devices in all, one of each process.
FLAGS = re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ["XLA_FLAGS"])
TEXT = "/v1/completions"


def test_two_processes_serve_as_one(tmp_path):
    joined = (f"--coordinator_address=localhost:{free_port()}", "--num_processes=2")
    options = ("mesh.data=2", "decode.batch_size=4", *joined)
    config = tmp_path / "serve.yml"
    config.write_text(served.CONFIG)
    command = [sys.executable, "-m", "dflash.serve", str(config), *options, "--process_id=1"]
    environment = os.environ | {"XLA_FLAGS": FLAGS}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as second:
        try:
            with served.serving(tmp_path, *options, "--process_id=0", XLA_FLAGS=FLAGS) as first:
                for prompt, parameters in (
                    ("abcabcabc", {"temperature": 0.0}),
                    ("x" * 70, {"temperature": 0.8, "seed": 3}),  # two chunks of prefill
                ):
                    body = {"prompt": prompt, "max_tokens": 12, **parameters}
                    _, answer = first.post(TEXT, body)
                    expected = bytes(decoded(config, prompt, max_tokens=12, **parameters)).decode()
                    assert answer["choices"][0]["text"] == expected
                    stop = expected[5:8]
                    _, answer = first.post(TEXT, {**body, "stop": stop})  # is cancelled then
                    assert answer["choices"][0]["text"] == expected[: expected.index(stop)]
                # Each process makes the masks of a grammar for itself.
                form = {"guided_regex": "[ab]{3}-[0-9]{4}", "stop_token_ids": [3]}
                _, answer = first.post(TEXT, {"prompt": "abc", "max_tokens": 24, **form})
                assert re.fullmatch("[ab]{3}-[0-9]{4}", answer["choices"][0]["text"]), answer
                second.send_signal(signal.SIGTERM)  # it is the first one's to obey
                assert served.ended(first.process, signal.SIGTERM) == 0, first.log.read_text()
                assert second.wait(300) == 0, second.stderr.read()
        finally:
            second.kill()
