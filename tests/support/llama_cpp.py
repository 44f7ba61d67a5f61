"""llama.cpp: its files in llama-cpp-python's source distribution, and its server in xllamacpp."""

import json
import pathlib
import subprocess
import sys
import tarfile

import pytest

CACHE = pathlib.Path.home() / ".cache" / "dflash" / "tests"
COMMAND = ("pip", "download", "--quiet", "--no-binary=:all:", "--no-deps", "llama-cpp-python")
# Prints the greedy token after each of several prompts, and the log-probabilities of all tokens.
# The server has none for a token that ends within a character.
SERVER = """
import json, sys, urllib.request, xllamacpp
file, body, prompts = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = file, 256, 1
params.n_gpu_layers, params.warmup, params.cpuparams.n_threads = 0, False, 1
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
for prompt in prompts:
    content = json.dumps(body | {"prompt": prompt}).encode()
    request = urllib.request.Request(f"{server.listening_address}/completion", content)
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    steps = answer.get("completion_probabilities") or [{"top_logprobs": []}]
    logprobs = [(token["id"], token["logprob"]) for token in steps[0]["top_logprobs"]]
    print(json.dumps([answer["tokens"], logprobs]))
"""


def next_tokens(file: pathlib.Path, prompts: list[list[int]], num_tokens: int):
    """Returns the greedy token after each prompt, and log-probabilities by token, if there are any.

    Args:
      file: A GGUF file.
      num_tokens: Size of its vocabulary.
    """
    body = {"n_predict": 1, "temperature": 0, "n_probs": num_tokens, "return_tokens": True}
    command = [sys.executable, "-c", SERVER, json.dumps([str(file), body, prompts])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    answers = map(json.loads, run.stdout.strip().splitlines()[-len(prompts) :])
    return [(tokens, dict(logprobs)) for tokens, logprobs in answers]


def files(folder: str, ending: str) -> dict[str, bytes]:
    """Returns the files of a folder of llama.cpp by name; pip downloads the archive once."""
    if not [*CACHE.glob("*.tar.gz")]:
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", *COMMAND, f"--dest={CACHE}"]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip(f"cannot be downloaded: {' '.join(COMMAND)}")
    (archive, *_) = CACHE.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        paths = {pathlib.PurePath(member.name): member for member in tar if member.isfile()}
        return {
            path.name: tar.extractfile(member).read()
            for path, member in paths.items()
            if path.match(f"vendor/llama.cpp/{folder}/*{ending}")
        }
