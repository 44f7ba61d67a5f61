"""The mistakes of a user: each ends in a clear line, with the right status, and writes nothing.

Status 2 is for what was given (usage, config, input, checkpoint), 1 for the run. A row is a command
line, what is in the way, and what the line says.
"""

import dataclasses
import errno
import importlib.util
import io
import json
import os
import pathlib
import shlex
import shutil
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from support.golden import GOLDEN

from dflash import __main__ as program
from dflash.config import loader
from dflash.drafters.dflash import DFlash
from dflash.runs import directory
from dflash.text import jsonl

TARGET, DRAFT = GOLDEN / "qwen3_b1" / "target", GOLDEN / "qwen3_b1" / "draft"
ASSETS = pathlib.Path(loader.__file__).parents[1] / "assets"
CONFIG = f"""
target: {{checkpoint: {TARGET}}}
drafter: {{name: dflash, checkpoint: {DRAFT}}}
decode: {{max_new_tokens: 4}}
prompts: {{file: p.jsonl}}
dtype: float32
"""
TRAINING = f"""
target: {{checkpoint: {TARGET}}}
drafter: {{name: dflash, checkpoint: {DRAFT}}}
data: {{files: [d.jsonl]}}
train: {{steps: 1}}
"""
PROMPT = '{"prompt_ids": [3, 4]}\n'
PROGRESS = ("loading weights", "data: downloading")  # what may stand before the line
PHI3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A command line and how it ends.

    Attributes:
      argv: what follows `dflash`, as it is typed.
      said: what the only line on stderr holds.
      status: exit status.
      before: makes the place as it has to be, in the working directory.
    """

    argv: str
    said: str
    status: int = 2
    before: Callable[[pytest.MonkeyPatch], object] = lambda patch: None


def put(name: str, content: str | bytes) -> Callable:
    """Writes a file."""

    def before(patch):
        path = pathlib.Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())

    return before


def copy(source: pathlib.Path, without: str = "", **changes) -> Callable:
    """Copies a checkpoint to `m`, with changes to its config.json, and without a file."""

    def before(patch):
        shutil.copytree(source, "m")
        path = pathlib.Path("m/config.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        if without:
            pathlib.Path("m", without).unlink()

    return before


def put_gguf(kind: int, size: int) -> Callable:
    """Writes a GGUF file with one tensor, half of whose bytes are there if it is 8 × F32."""
    tensor = struct.pack("<Q1sIQIQ", 1, b"a", 1, size, kind, 0)
    content = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor
    return put("m/x.gguf", content.ljust(80, b"\0"))


def both(*steps: Callable) -> Callable:
    return lambda patch: [step(patch) for step in steps]


def module_missing(name: str) -> Callable:
    return lambda patch: patch.setitem(sys.modules, name, None)


def cut(patch):
    """A checkpoint whose download stopped early."""
    copy(TARGET)(patch)
    with open("m/model.safetensors", "r+b") as file:
        file.truncate(5000)


def float8(patch):
    """A checkpoint with a tensor in eight bits."""
    copy(TARGET)(patch)
    path = pathlib.Path("m/model.safetensors")
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))


def training_directory(patch):
    copy(TARGET)(patch)
    os.mkdir("w")
    pathlib.Path("w/config.yml").write_text(TRAINING)
    os.mkdir("w/checkpoints")
    os.rename("m", "w/hf")


def another_run(patch):
    """A work directory whose results are of another config."""
    os.mkdir("w")
    changed = loader.load("c.yml", ["decode.seed=5"])
    pathlib.Path("w/config.yml").write_text(loader.to_yaml(changed))
    pathlib.Path("w/outputs.jsonl").write_text("{}\n")


def running(patch):
    """A work directory that another run holds."""
    patch.setattr(directory, "_PATIENCE_S", 0.0)
    held = directory.RunDirectory("w", loader.load("c.yml"), is_used=lambda path: False)
    patch.setattr(program, "_held", held, raising=False)  # as long as the test


def full_disk(patch):
    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", fsync)


def read_only(patch):
    os.mkdir("ro")
    found = os.access  # root, who runs many a container, may write anywhere
    patch.setattr(os, "access", lambda path, *more: path.name != "ro" and found(path, *more))


def no_network(patch):
    def urlopen(*_, **__):
        raise urllib.error.URLError("Name or service not known")

    patch.setattr(urllib.request, "urlopen", urlopen)
    patch.setenv("XDG_CACHE_HOME", str(pathlib.Path.cwd() / "cache"))


def offline_hub(patch):
    hub = pytest.importorskip("huggingface_hub", reason="pip install 'dflash-jax[hf]'")

    def download(*_, **__):
        raise hub.errors.LocalEntryNotFoundError("offline")

    patch.setattr(hub, "snapshot_download", download)


def stdin_of(text: str) -> Callable:
    return lambda patch: patch.setattr(sys, "stdin", io.StringIO(text))


M = "target.checkpoint=m drafter.name=none"
TEXT = "target.checkpoint=assets/tiny_target drafter.name=none prompts.file=q.jsonl"
MISTAKES = {
    # What is typed.
    "no config": Mistake("decode --dry_run", "usage: dflash decode CONFIG"),
    "flag": Mistake("decode c.yml --workdri=w", "unknown flag --workdri; did you mean '--workdir'"),
    "flag of another command": Mistake("train t.yml --nostream", "unknown flag --nostream"),
    "dashes on a key": Mistake("decode c.yml --decode.seed=3", "take no dashes: decode.seed=3"),
    "key as a flag": Mistake(
        "decode c.yml --max-new-tokens 8", "config keys take no dashes: decode.max_new_tokens=8"
    ),
    "flag without its value": Mistake("decode c.yml --workdir", "Missing value for flag --workdir"),
    "flag that is no number": Mistake("decode c.yml --process_id=a", "flag --process_id=a: "),
    "processes by halves": Mistake("decode c.yml --process_id=0", "--num_processes: required: "),
    "no workdir": Mistake("train t.yml", "--workdir: required, for checkpoints and weights"),
    "no layout": Mistake("convert a b", "--to is missing; usage: dflash convert SOURCE"),
    "too many arguments": Mistake("doctor c.yml", "expected no argument, not 1 argument"),
    # The config.
    "config": Mistake("decode gone.yml", "gone.yml: no such file"),
    "model for a config": Mistake(
        "train hf:Qwen/Qwen3-4B", "expected a config; give a model as CONFIG target.checkpoint="
    ),
    "model of the hub": Mistake(
        "decode Qwen/Qwen3-0.6B", "give a model as hf:Qwen/Qwen3-0.6B or CONFIG target.checkpoint="
    ),
    "shipped config": Mistake(
        "decode configs/tiny_dflsh.yml", "did you mean 'configs/tiny_dflash.yml'?"
    ),
    "directory for a config": Mistake(f"train {TARGET}", f"CONFIG target.checkpoint={TARGET}"),
    "run for a config": Mistake("decode w", "the run in it is w/config.yml", 2, another_run),
    "training config": Mistake("decode t.yml", "a config of dflash train, not of this command"),
    "decoding config": Mistake("train c.yml", "a config of dflash decode, not of this command"),
    "decoding config to measure": Mistake("benchmark c.yml", "config of dflash decode, not of"),
    "training config to sweep": Mistake("sweep t.yml", "config of dflash train, not of"),
    "benchmark config": Mistake(
        "decode configs/benchmark/tiny.yml", "a config of dflash benchmark, not of this command"
    ),
    "distillation": Mistake(
        "train configs/distill/dflash2.yml", "a config of dflash distill, not of this"
    ),
    "nothing to sweep": Mistake("sweep c.yml", "sweep: required: keys and their values"),
    "sweep": Mistake("decode configs/sweeps/block_size.yml", "sweep: only dflash sweep accepts "),
    "type": Mistake("decode c.yml decode.seed=many", "decode.seed: expected an integer in [-"),
    "misfit": Mistake("decode c.yml decode.page_size=12", "expected a power of two, got 12"),
    "batch": Mistake("decode c.yml mesh.data=2", "decode.batch_size: 1 does not divide over "),
    "devices": Mistake("decode c.yml mesh.tensor=64", "= 64 devices, but "),
    "YAML": Mistake("decode x.yml", "x.yml:1: not valid YAML: ", 2, put("x.yml", "a: [1")),
    "empty config": Mistake("decode x.yml", "target.checkpoint: required: ", 2, put("x.yml", "")),
    "UTF-16 config": Mistake(
        "decode x.yml", "x.yml: UTF-16, expected UTF-8", 2, put("x.yml", CONFIG.encode("utf-16"))
    ),
    "Latin-1 config": Mistake(
        "decode x.yml", "x.yml: not UTF-8: byte 0xe9 at offset 3", 2, put("x.yml", b"a: \xe9\n")
    ),
    "config of 2 MB": Mistake(
        "decode x.yml", "x.yml: larger than 1,048,576 bytes", 2, put("x.yml", "#" * 2**21)
    ),
    "base": Mistake(
        "decode x.yml", "base: no such file 'gone.yml'", 2, put("x.yml", "base: [gone.yml]")
    ),
    # Prompts and data.
    "prompts": Mistake(
        "decode c.yml prompts.file=q.jsonl",
        "prompts.file: q.jsonl: cannot be read: No such file or directory; did you mean 'p.jsonl'?",
    ),
    "directory of prompts": Mistake("decode c.yml prompts.file=.", ".: cannot be read: Is a direc"),
    "no prompts": Mistake("decode c.yml", "p.jsonl: no prompts found", 2, put("p.jsonl", "")),
    "empty stdin": Mistake(
        "decode c.yml prompts.file=null", "stdin: no prompts found", 2, stdin_of("")
    ),
    "JSON": Mistake("decode c.yml", "p.jsonl:2: not JSON", 2, put("p.jsonl", PROMPT + "{")),
    "one JSON list": Mistake(
        "decode c.yml", "p.jsonl:1: expected a JSON object", 2, put("p.jsonl", "[1]")
    ),
    "NaN in a line": Mistake(
        "decode c.yml", "p.jsonl:1: a: NaN is not a valid JSON", 2, put("p.jsonl", '{"a": NaN}')
    ),
    "key of a prompt": Mistake(
        "decode c.yml", "p.jsonl:1: expected exactly one of prompt", 2, put("p.jsonl", '{"a": 1}')
    ),
    "UTF-16 prompts": Mistake(
        "decode c.yml", "p.jsonl: UTF-16, expected UTF-8", 2,
        put("p.jsonl", PROMPT.encode("utf-16")),
    ),
    "UTF-16 prompts without a mark": Mistake(
        "decode c.yml", "p.jsonl: UTF-16 or binary, expected UTF-8", 2,
        put("p.jsonl", PROMPT.encode("utf-16-le")),
    ),
    "line of 50 MB": Mistake(
        "decode c.yml", "p.jsonl:1: longer than 16,777,216 bytes", 2,
        put("p.jsonl", '{"prompt": "' + "a" * 50_000_000 + '"}'),
    ),
    "token": Mistake(
        "decode c.yml", "24 (position 0) is out of the vocabulary (size 24)", 2,
        put("p.jsonl", '{"prompt_ids": [24]}'),
    ),
    "text without a tokenizer": Mistake(
        "decode c.yml", "tokenizer.model or tiktoken.model); give prompts as ", 2,
        put("p.jsonl", '{"prompt": "Hello"}'),
    ),
    "chat without a template": Mistake(
        f"decode c.yml {M} prompts.file=q.jsonl", "q.jsonl:1: m: no chat template", 2,
        both(
            put("q.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}'),
            copy(ASSETS / "tiny_target", without="chat_template.jinja"),
        ),
    ),
    "text as a chat without a template": Mistake(
        f"decode c.yml {M} prompts.file=q.jsonl prompts.chat=true", "m: no chat template", 2,
        both(
            put("q.jsonl", '{"prompt": "Hi"}'),
            copy(ASSETS / "tiny_target", without="chat_template.jinja"),
        ),
    ),
    "questions in chat without a template": Mistake(
        "distill configs/distill/dflash2.yml target.checkpoint=m answers.files=[q.jsonl] "
        "answers.chat=true --dry_run",
        "answers.chat: true, but m has no chat template; answers.chat=false decodes", 2,
        both(
            put("q.jsonl", '{"prompt": "Hi"}'),
            copy(ASSETS / "tiny_target", without="chat_template.jinja"),
        ),
    ),
    "template without a tokenizer": Mistake(
        f"decode c.yml {M} prompts.file=q.jsonl", "q.jsonl:1: m: no tokenizer", 2,
        both(
            put("q.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}'),
            copy(TARGET),
            put("m/chat_template.jinja", "{{ messages[0].content }}"),
        ),
    ),
    "conversation without a template": Mistake(
        "chat c.yml", "no tokenizer (tokenizer.json, tokenizer.model or tiktoken.model)"
    ),
    "template that fails": Mistake(
        f"decode c.yml {M} prompts.file=q.jsonl", "m/chat_template.jinja: chat template fails", 2,
        both(
            put("q.jsonl", '{"messages": [{"role": "user", "content": "Hi"}]}'),
            copy(ASSETS / "tiny_target"),
            put("m/chat_template.jinja", "{{ messages[9].x.y }}"),
        ),
    ),
    "prompt beyond the model": Mistake(
        f"decode c.yml {TEXT}", "but the target was made for 2048 positions", 2,
        put("q.jsonl", '{"prompt": "' + "one two " * 2000 + '"}'),
    ),
    "no room for a prompt": Mistake(
        "decode c.yml --workdir=w decode.max_length=5", "p.jsonl:1: 2 prompt"
    ),
    "stop token": Mistake(
        "decode c.yml --workdir=w decode.stop_ids=[24]", "decode.stop_ids: 24 is outside"
    ),
    "data set": Mistake("decode c.yml prompts.dataset=gsm", "'gsm'; did you mean 'gsm8k'?"),
    "no network for data": Mistake(
        "decode c.yml prompts.dataset=gsm8k", "(downloading failed: Name or service not known)", 2,
        no_network,
    ),
    "training data": Mistake(
        "train t.yml --workdir=w data.files=e.jsonl", "data.files: e.jsonl: cannot be read: No such"
    ),
    "trace": Mistake(
        "benchmark configs/benchmark/random_tiny.yml --trace=t.json",
        "trace: t.json: cannot be read: No such file",
    ),
    "task": Mistake("benchmark configs/benchmark/tiny.yml tasks=mth", "did you mean 'math'?"),
    # Checkpoints.
    "checkpoint": Mistake(
        "decode c.yml target.checkpoint=gone", "target.checkpoint: gone: no such directory; give"
    ),
    "name of the hub": Mistake(
        "decode c.yml target.checkpoint=Qwen/Qwen3-4B", "or hf:Qwen/Qwen3-4B to download it"
    ),
    "reference to the hub": Mistake("decode c.yml target.checkpoint=hf:x", "expected hf:org/name"),
    "file for a checkpoint": Mistake(
        f"decode c.yml target.checkpoint={TARGET}/model.safetensors", f"around it, {TARGET}"
    ),
    "training directory": Mistake(
        "decode c.yml target.checkpoint=w", "a training directory; its weights are in w/hf", 2,
        training_directory,
    ),
    "no weights": Mistake(
        f"decode c.yml {M}", "m: no weights in it; expected model.safetensors", 2,
        copy(TARGET, without="model.safetensors"),
    ),
    "GGUF": Mistake(
        f"decode c.yml {M}", "m: no config.json: holds GGUF weights of llama.cpp", 2,
        put("m/x.gguf", ""),
    ),
    "GGUF file": Mistake(
        "decode c.yml target.checkpoint=m/x.gguf",
        "m/x.gguf: truncated or corrupt: 8 bytes do not hold its header; copy", 2,
        put("m/x.gguf", "GGUF\3\0\0\0"),
    ),
    "GGUF of another format": Mistake(
        "decode c.yml target.checkpoint=m/x.gguf",
        "m/x.gguf: not a GGUF file: it begins with b'GGML', not b'GGUF'", 2,
        put("m/x.gguf", "GGML\3\0\0\0"),
    ),
    "GGUF with half a tensor": Mistake(
        "decode c.yml target.checkpoint=m/x.gguf",
        "m/x.gguf: truncated: 80 bytes, but tensor 'a' ends at 96; copy or download", 2,
        put_gguf(kind=0, size=8),
    ),
    "GGUF of an unknown type": Mistake(
        "decode c.yml target.checkpoint=m/x.gguf",
        "m/x.gguf: tensor 'a' has type 99, which is not supported, only F32, ", 2,
        put_gguf(kind=99, size=8),
    ),
    "GGUF of an absurd size": Mistake(
        "decode c.yml target.checkpoint=m/x.gguf",
        "m/x.gguf: truncated: 80 bytes, but tensor 'a' ends at 36,893,488,147,419,103,296;", 2,
        put_gguf(kind=0, size=2**63),
    ),
    "reference to a wheel": Mistake(
        "decode c.yml target.checkpoint=wheel:x", "wheel:x: expected wheel:PACKAGE[==VERSION]/PATH"
    ),
    "pickles": Mistake(
        f"decode c.yml {M}", "pickled PyTorch weights only, which are never loaded", 2,
        both(copy(TARGET, without="model.safetensors"), put("m/pytorch_model.bin", "")),
    ),
    "adapter": Mistake(
        f"decode c.yml {M}", "a LoRA adapter; give its base", 2, put("m/adapter_config.json", "{}")
    ),
    "no adapter": Mistake(
        "decode c.yml target.adapter=m", "target.adapter: m: no adapter_config.json; give", 2,
        put("m/x", ""),
    ),
    "kind of adapter": Mistake(
        "serve c.yml serve.adapters.a=m", "serve.adapters.a: m/adapter_config.json: use_dora: true",
        2, put("m/adapter_config.json", '{"use_dora": true}'),
    ),
    "name of an adapter": Mistake(
        "serve c.yml serve.adapters.x=m serve.model=x", "serve.adapters.x: is the name of the"
    ),
    "new weights under an adapter": Mistake(
        "serve c.yml target.adapter=m serve.update_weights=true",
        "serve.update_weights: not with target.adapter",
    ),
    "quantized": Mistake(
        f"decode c.yml {M}", "quantized weights (aqlm) are not supported, only fp8", 2,
        copy(TARGET, quantization_config={"quant_method": "aqlm", "bits": 4}),
    ),
    "quantized tensor": Mistake(f"decode c.yml {M}", "is I32, expected one of F32", 2, float8),
    "Phi 3": Mistake(
        f"decode c.yml {M}", "Phi3ForCausalLM is not supported, only Qwen3ForCausalLM (qwen3)", 2,
        copy(TARGET, **PHI3),
    ),
    "Gemma": Mistake(
        f"decode c.yml {M}", "Gemma2ForCausalLM is not supported, only ", 2,
        copy(TARGET, architectures=["Gemma2ForCausalLM"]),
    ),
    "no architecture": Mistake(
        f"decode c.yml {M}", "architectures: none (model_type 'mistral') is not supported", 2,
        copy(TARGET, architectures=[], model_type="mistral"),
    ),
    "rope": Mistake(
        f"decode c.yml {M}", "rope type 'longrope' is not supported, only one of 'default',", 2,
        copy(TARGET, rope_scaling={"rope_type": "longrope", "factor": 4.0}),
    ),
    "UTF-16 config.json": Mistake(
        f"decode c.yml {M}", "m/config.json: UTF-16, expected UTF-8", 2,
        both(copy(TARGET), put("m/config.json", "{}".encode("utf-16"))),
    ),
    "broken config.json": Mistake(
        f"decode c.yml {M}", "m/config.json: not valid JSON (line 1", 2,
        both(copy(TARGET), put("m/config.json", "{")),
    ),
    "half a download": Mistake(f"decode c.yml {M}", "m/model.safetensors: truncated", 2, cut),
    "target as drafter": Mistake(
        f"decode c.yml drafter.checkpoint={TARGET}", "is no 'dflash' drafter; use drafter.name="
    ),
    "drafter as target": Mistake(
        f"decode c.yml target.checkpoint={DRAFT}", "DFlashDraftModel is not supported, only Qwen3"
    ),
    "name of another family": Mistake(
        "decode c.yml target.name=llama3",
        f"target.name: 'llama3', but {TARGET} holds Qwen3ForCausalLM, which is 'qwen3'; leave",
    ),
    "drafts without probabilities": Mistake(
        "decode c.yml --workdir=w decode.verify=rejection",
        "decode.verify: rejection weighs drafts by their probabilities, and drafter.name=dflash has"
        " none; use decode.verify=coupled", 2,
        lambda patch: patch.setattr(DFlash, "has_probs", False),
    ),
    "drafter of another target": Mistake(
        "decode c.yml drafter.checkpoint=m", "trained for another target: hidden size 64", 2,
        copy(DRAFT, hidden_size=64),
    ),
    "drafter of another strategy": Mistake(
        "decode c.yml drafter.name=eagle3 drafter.checkpoint=assets/tiny_dflash",
        "is no 'eagle3' drafter; use drafter.name=dflash",
    ),
    "tokenizer": Mistake(
        "train t.yml --workdir=w tokenizer=assets/tiny", "tokenizer: assets/tiny: no such directory"
    ),
    "conversion of nothing": Mistake("convert gone out --to=hf", "gone: no such directory; give"),
    "destination": Mistake(f"convert {TARGET} . --to=hf", ".: already exists and is not an empty"),
    # What is not installed, or not to be reached.
    "no tokenizers": Mistake(
        f"decode c.yml {M}", "m/tokenizer.json: needs tokenizers; pip install 'dflash-jax[hf]'", 2,
        both(copy(TARGET), put("m/tokenizer.json", "{}"), module_missing("tokenizers")),
    ),
    "no hub": Mistake(
        "decode c.yml target.checkpoint=hf:a/b",
        "needs huggingface_hub; pip install 'dflash-jax[hf]'", 2, module_missing("huggingface_hub"),
    ),
    "no network for weights": Mistake(
        "decode c.yml target.checkpoint=hf:a/b", "not in the local cache and the hub cannot be", 2,
        offline_hub,
    ),
    "no TPU compiler": Mistake(
        "compile configs/random_tiny_dflash.yml tpu.topology=v5e:1x1",
        "pip install 'dflash-jax[tpu]'", 2,
        lambda patch: patch.setattr(importlib.util, "find_spec", lambda name: None),
    ),
    # The work directory.
    "file for a workdir": Mistake(
        "decode c.yml --workdir=p.jsonl", "p.jsonl: cannot be written: Not a directory", 1
    ),
    "workdir below a file": Mistake(
        "train t.yml --workdir=t.yml/w", "t.yml/w: cannot be written: Not a directory", 1
    ),
    "read-only directory": Mistake(
        "decode c.yml --workdir=ro/w", "ro/w: cannot be written: Permission denied", 1, read_only
    ),
    "profile below a file": Mistake(
        "decode c.yml --profile_dir=c.yml/x", "c.yml/x: cannot be written: Not a directory", 1
    ),
    "two runs in one directory": Mistake(
        "decode c.yml --workdir=w", "w: in use by another run: wait for it, or use another", 1,
        running,
    ),
    "results of another config": Mistake(
        "decode c.yml --workdir=w", "another config (decode.seed: 5 there, 0 here)", 1, another_run
    ),
    "directory of a training run": Mistake(
        "decode c.yml --workdir=w", "a config of dflash train, not of this command; another ",
        1, training_directory,
    ),
    "full disk": Mistake(
        "decode c.yml --workdir=.", "cannot be written: No space left on device", 1, full_disk
    ),
    "sweep without a place": Mistake(
        "sweep configs/sweeps/block_size.yml", "--workdir: required, for the points and their table"
    ),
}  # fmt: skip
FINE = {
    "config with a mark": put("c.yml", b"\xef\xbb\xbf" + CONFIG.encode()),
    "config with CRLF": put("c.yml", CONFIG.replace("\n", "\r\n")),
    "prompts with a mark": put("p.jsonl", b"\xef\xbb\xbf" + PROMPT.encode()),
    "prompts with CRLF": put("p.jsonl", PROMPT.replace("\n", "\r\n") * 2),
}


@pytest.fixture
def dflash(tmp_path, monkeypatch, capsys):
    """Runs a command line; returns its status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    contents = {"c.yml": CONFIG, "t.yml": TRAINING, "p.jsonl": PROMPT, "d.jsonl": PROMPT}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)

    def run(argv):
        try:
            status = program.main(shlex.split(argv))
        except SystemExit as caught:
            status = caught.code
        return status, *capsys.readouterr()

    return run


def contents(directory):
    """Everything in a directory; of locks and emptied caches nothing is kept."""
    return {
        str(path): path.read_bytes() if path.is_file() else None
        for path in sorted(directory.rglob("*"))
        if path.name != ".lock" and "cache" not in path.parts
    }


def test_there_are_many():
    assert len(MISTAKES) >= 60
    assert jsonl.MAX_LINE_BYTES < 50_000_000


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(dflash, tmp_path, monkeypatch, name):
    mistake = MISTAKES[name]
    mistake.before(monkeypatch)
    before = contents(tmp_path)
    status, out, err = dflash(mistake.argv)
    *progress, line = err.splitlines()
    assert mistake.said in line
    assert (status, out) == (mistake.status, "")
    assert all(one.startswith(PROGRESS) for one in progress)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", FINE)
def test_what_looks_like_a_mistake_and_is_none(dflash, monkeypatch, name):
    FINE[name](monkeypatch)
    status, out, err = dflash("decode c.yml --dry_run")
    assert (status, err) == (0, "")
    assert "target weights" in out
