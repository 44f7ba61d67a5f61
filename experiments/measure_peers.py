"""Decodes the same prompts with this decoder, llama.cpp and transformers, in turns.

    pip install xllamacpp transformers torch
    dflash convert TARGET /tmp/target --to=hf --dtype=float32
    dflash convert TARGET /tmp/target.gguf --dtype=float32
    dflash convert DRAFTER /tmp/drafter.gguf --dtype=float32 --tokenizer=TARGET
    python experiments/measure_peers.py --config=CONFIG --drafter=DRAFTER --target=/tmp/target \
        --target_gguf=/tmp/target.gguf --drafter_gguf=/tmp/drafter.gguf --block_size=8 \
        --data=gsm8k --raw_dir=RAW --prompts=10 --tokens=64 --threads=2 --out=peers.json

`--reference=model.py` adds the public PyTorch decoder: that file of the package `dflash` on PyPI,
whose import name is also ours (`pip download --no-deps dflash`, then unzip).

Each peer is a process of its own, and they answer one prompt after another in turns, so that all
see the same load of the machine. Greedy, float32 weights and caches. The cost of a token is that of
the whole answer less that of an answer of one token, in seconds and in processor-seconds.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

Answer = dict[str, Any]  # Keys: ids, and lengths (accepted tokens of each cycle) or cycles.
Decode = Callable[[list[int], int], Answer]

_ACCEPTED = re.compile(r"accepted +(\d+)/ *\d+ draft tokens")
_NGRAMS = 10  # Drafted tokens of transformers' prompt lookup.
_OURS = "dflash, drafted"
_DEBUG = 9  # Verbosity at which llama.cpp logs each cycle.


def main() -> None:
    """Measures all peers, prints a table and writes the answers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("config", "target", "target_gguf", "raw_dir", "out", "worker"):
        parser.add_argument(f"--{name}")
    for name in ("drafter", "drafter_gguf", "reference"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--spec", default="DRAFT_DFLASH", help="type of drafter in llama.cpp")
    parser.add_argument("--data", nargs="+", default=["gsm8k"])
    for name, default in (("block_size", 8), ("prompts", 10), ("tokens", 64), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", help="peers to run; all by default")
    parser.add_argument("--log_cycles", action="store_true", help="slows llama.cpp down")
    options = parser.parse_args()
    if options.worker:
        _work(options)
        return
    names = [name for name in options.only or _PEERS if name in _available(options)]
    peers = {name: _Peer(name, sys.argv[1:]) for name in names}
    prompts = list(_prompts(options))
    rows = []
    for number, prompt in enumerate(prompts):
        turn = names[number % len(names) :] + names[: number % len(names)]
        row = {name: peers[name].measure(prompt["ids"], options.tokens) for name in turn}
        rows.append({"data": prompt["data"], "load": os.getloadavg()[0], "answers": row})
        print(f"{number + 1} of {len(prompts)}, load {os.getloadavg()[0]:.1f}", file=sys.stderr)
        pathlib.Path(options.out).write_text(json.dumps({"options": vars(options), "rows": rows}))
    print(_table(rows, names))
    for name in names:
        logged = options.log_cycles or not name.startswith("llama.cpp")
        if name.endswith(", drafted") and name != _OURS and _OURS in names and logged:
            print(_compare_cycles(rows, name))


# --- peers ----------------------------------------------------------------------------------------


def _llm(options: argparse.Namespace, *overrides: str) -> Decode:
    """Returns this decoder."""
    import dflash

    llm = dflash.LLM(
        options.config,
        "dtype=float32",
        "decode.batch_size=1",
        *overrides,
        target=options.target,
    )

    def decode(ids: list[int], count: int) -> Answer:
        (done,) = llm.generate([ids], dflash.Sampling(max_tokens=count))
        return {"ids": list(done.token_ids), "lengths": list(done.acceptance_lengths)}

    return decode


def _drafted_here(options: argparse.Namespace) -> Decode:
    from dflash.loading import models

    name = models.find_strategy(options.drafter)
    return _llm(
        options,
        f"drafter.name={name}",
        f"drafter.checkpoint={options.drafter}",
        f"drafter.block_size={options.block_size}",
    )


def _llama_cpp(options: argparse.Namespace, spec: str | None) -> Decode:
    """Returns llama.cpp's server, with float32 caches and without a second pool of threads."""
    import urllib.request

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.target_gguf
    params.n_ctx, params.n_parallel, params.n_gpu_layers = 4096, 1, 0
    params.warmup = False
    params.verbosity = _DEBUG if options.log_cycles else 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft = params.speculative.draft
    for threads in (
        *(params.cpuparams, params.cpuparams_batch),
        *(draft.cpuparams, draft.cpuparams_batch),
    ):
        threads.n_threads, threads.poll = options.threads, 0
    for caches in (params, draft):
        caches.cache_type_k = caches.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if spec is not None:
        kind = getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_{spec}")
        params.speculative.types = [kind]
    if spec == options.spec:
        draft.mparams.path = options.drafter_gguf
        draft.n_max, draft.p_min = options.block_size - 1, 0.0
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115, it is open as long as the process.
    os.dup2(log.fileno(), sys.stderr.fileno())
    server = xllamacpp.Server(params)

    def decode(ids: list[int], count: int) -> Answer:
        body = {
            "prompt": ids,
            "n_predict": count,
            "temperature": 0,
            "return_tokens": True,
            "cache_prompt": False,
        }
        begin = os.fstat(log.fileno()).st_size
        address, content = server.listening_address + "/completion", json.dumps(body).encode()
        request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
        accepted = answer["timings"].get("draft_n_accepted", 0)
        # The server writes with the same offset, so that a seek would make it overwrite the log.
        logged = os.pread(log.fileno(), os.fstat(log.fileno()).st_size - begin, begin).decode()
        lengths = [int(number) + 1 for number in _ACCEPTED.findall(logged)]
        return {"ids": answer["tokens"], "accepted": accepted, "lengths": lengths}

    decode.server = server  # Keep it alive.
    return decode


def _transformers(options: argparse.Namespace, **generation: Any) -> Decode:
    import torch
    import transformers

    torch.set_num_threads(options.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.target, dtype="float32")
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))

    def decode(ids: list[int], count: int) -> Answer:
        calls.clear()
        given = torch.tensor([ids])
        with torch.inference_mode():
            output = model.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=count,
                do_sample=False,
                **generation,
            )
        return {"ids": output[0, len(ids) :].tolist(), "cycles": len(calls) - 1}

    return decode


def _reference(options: argparse.Namespace) -> Decode:
    """Returns the public PyTorch decoder, without its clock, which needs CUDA."""
    import importlib.util

    import torch
    import transformers

    torch.set_num_threads(options.threads)
    spec = importlib.util.spec_from_file_location("reference", options.reference)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module._cuda_time = time.perf_counter
    target = transformers.AutoModelForCausalLM.from_pretrained(options.target, dtype="float32")
    drafter = _reference_drafter(module, pathlib.Path(options.drafter))
    ends = target.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def decode(ids: list[int], count: int) -> Answer:
        given = torch.tensor([ids])
        done = module.dflash_generate(
            *(drafter, target, given, count, ends),
            block_size=options.block_size,
            return_stats=True,
        )
        return {"ids": done.output_ids[0, len(ids) :].tolist(), "lengths": done.acceptance_lengths}

    return decode


def _reference_drafter(module: Any, directory: pathlib.Path) -> Any:
    """Returns a drafter in the public PyTorch code, which does not read draft vocabularies.

    Tokens outside a draft vocabulary get logits of -inf, so that they are never candidates.
    """
    import safetensors.torch
    import torch

    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    is_cut = "t2d" in tensors
    drafter = getattr(module, name).from_pretrained(
        directory, dtype="float32", ignore_mismatched_sizes=is_cut
    )
    if is_cut:
        tokens = tensors["t2d"].nonzero()[:, 0]
        head = tensors["lm_head.weight"].float()
        codes = drafter.candidate_selector.successor_codebook.weight.data
        codes[tokens] = tensors["candidate_selector.successor_codebook"].float()
        compute_logits = drafter.compute_logits

        def own_head(hidden: torch.Tensor) -> torch.Tensor:
            logits = hidden.new_full((*hidden.shape[:-1], len(codes)), -torch.inf)
            logits[..., tokens] = hidden @ head.T
            return logits

        drafter.compute_logits = lambda hidden, _: compute_logits(hidden, own_head)
    return drafter.eval()


_PEERS: dict[str, Callable[[argparse.Namespace], Decode]] = {
    "dflash": lambda options: _llm(options, "drafter.name=none"),
    "dflash, ngram": lambda options: _llm(options, "drafter.name=ngram"),
    "dflash, drafted": _drafted_here,
    "PyTorch, drafted": _reference,
    "llama.cpp": lambda options: _llama_cpp(options, None),
    "llama.cpp, ngram": lambda options: _llama_cpp(options, "NGRAM_SIMPLE"),
    "llama.cpp, drafted": lambda options: _llama_cpp(options, options.spec),
    "transformers": _transformers,
    "transformers, lookup": lambda options: _transformers(
        options, prompt_lookup_num_tokens=_NGRAMS
    ),
}


def _available(options: argparse.Namespace) -> set[str]:
    """Returns the peers whose files are given."""
    lacking = {
        "llama.cpp": not options.target_gguf,
        "dflash, drafted": not options.drafter,
        "PyTorch, drafted": not (options.drafter and options.reference),
        "llama.cpp, drafted": not options.drafter_gguf,
    }
    return {name for name in _PEERS if not lacking.get(name, False)}


# --- processes ------------------------------------------------------------------------------------


class _Peer:
    """Process of one peer, which answers requests in lines of JSON."""

    def __init__(self, name: str, argv: list[str]):
        command = [sys.executable, __file__, *argv, f"--worker={name}"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.measure([1, 2, 3], 8)  # Compile and load.

    def measure(self, ids: list[int], count: int) -> Answer:
        """Returns the answer, and the cost of its tokens but the first one."""
        self._ask(ids, 1)  # A program for a new length of prompt may be compiled.
        first, answer = self._ask(ids, 1), self._ask(ids, count)
        later = max(1, len(answer["ids"]) - 1)
        costs = {name: (answer[name] - first[name]) / later for name in ("wall", "processor")}
        return answer | {f"{name}_per_token": cost for name, cost in costs.items()}

    def _ask(self, ids: list[int], count: int) -> Answer:
        self._process.stdin.write(json.dumps({"ids": ids, "count": count}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def _work(options: argparse.Namespace) -> None:
    """Answers requests until the input ends."""
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[: options.threads])
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Libraries print to it.
    decode = _PEERS[options.worker](options)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter(), _processor_seconds()
        answer = decode(request["ids"], request["count"])
        answer["wall"] = time.perf_counter() - start[0]
        answer["processor"] = _processor_seconds() - start[1]
        answers.write(json.dumps(answer) + "\n")
    os._exit(0)  # llama.cpp's server may not end by itself.


def _processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _prompts(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the token ids of the first prompts of each data set."""
    from dflash.config.train_schema import DataConfig
    from dflash.data import datasets
    from dflash.text.tokenizer_loading import load_tokenizer

    tokenizer = load_tokenizer(pathlib.Path(options.target))
    config = DataConfig(raw_dir=options.raw_dir)
    samples = {
        name: datasets.find(name, config).sample("test", options.prompts) for name in options.data
    }
    for examples in zip(*samples.values(), strict=False):
        for name, example in zip(samples, examples, strict=True):
            yield {"data": name, "ids": tokenizer.encode_chat([dict(m) for m in example.opening])}


# --- results --------------------------------------------------------------------------------------


class Result(NamedTuple):
    """Summary of a peer: shares, mean acceptance length, and medians of costs."""

    identical: int
    tau: float | None
    per_second: float
    per_processor_second: float
    against_first: float


def _tau(answers: list[Answer]) -> float | None:
    """Returns the mean number of tokens of a cycle."""
    tokens = sum(len(answer["ids"]) - 1 for answer in answers)
    cycles = 0
    for answer in answers:
        later = len(answer["ids"]) - 1
        if "accepted" in answer:  # Of llama.cpp, whose lengths are in its log only.
            cycles += later - answer["accepted"]
        else:
            cycles += answer.get("cycles") or len(answer["lengths"])
    return tokens / cycles if cycles else None


def summarize(rows: list[dict[str, Any]], names: list[str]) -> dict[str, Result]:
    """Returns the results by peer; the first one is what others are compared with."""
    results = {}
    for name in names:
        answers = [row["answers"][name] for row in rows]
        firsts = [row["answers"][names[0]] for row in rows]
        pairs = list(zip(answers, firsts, strict=True))
        results[name] = Result(
            sum(answer["ids"] == first["ids"] for answer, first in pairs),
            _tau(answers),
            1 / statistics.median(answer["wall_per_token"] for answer in answers),
            1 / statistics.median(answer["processor_per_token"] for answer in answers),
            statistics.median(
                first["processor_per_token"] / answer["processor_per_token"]
                for answer, first in pairs
            ),
        )
    return results


def _table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| | identical | τ | tokens/s | tokens per processor-second | ratio to the first |",
        "|---|---|---|---|---|---|",
    ]
    for name, result in summarize(rows, names).items():
        tau = "" if result.tau is None else f"{result.tau:.3f}"
        lines.append(
            f"| {name} | {result.identical} of {len(rows)} | {tau} | {result.per_second:.1f} | "
            f"{result.per_processor_second:.1f} | {result.against_first:.2f} |"
        )
    loads = [row["load"] for row in rows]
    return "\n".join([*lines, "", f"Load: {min(loads):.1f} to {max(loads):.1f}."])


def _compare_cycles(rows: list[dict[str, Any]], peer: str) -> str:
    """Compares the acceptance lengths of all cycles but the last of each answer.

    In the last cycles llama.cpp drafts no further than the limit of tokens; it reports the lengths
    of cycles only with `--log_cycles`.
    """
    equal = total = 0
    for row in rows:
        ours, theirs = (row["answers"][name]["lengths"] for name in (_OURS, peer))
        total += len(ours[:-1])
        equal += sum(a == b for a, b in zip(ours[:-1], theirs, strict=False))
    return f"{peer}: acceptance lengths are equal in {equal} of {total} cycles."


if __name__ == "__main__":
    main()
