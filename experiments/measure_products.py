"""Times matrix products with few rows on a CPU, by XLA's compile options and layouts.

    python experiments/measure_products.py                      # needs no other package
    python experiments/measure_products.py --rows 1 16 --rounds=21
    taskset -c 0 python experiments/measure_products.py --model=smollm2 --processor --repeats=2

Chains of products have the widths of the embedded tiny target or of SmolLM2-135M, output head
included, and run in a loop on the device. Each round runs all cases in turn. PyTorch, if installed,
runs the same chain. With --processor, other load of the machine matters less.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash.kernels import library_cpu, matmul_cpu


class Model(NamedTuple):
    """Numbers of layers and tokens, and widths."""

    layers: int
    width: int
    mlp: int
    vocabulary: int
    keys: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the kernels of a layer by name."""
        width, keys, mlp = self.width, self.keys, self.mlp
        attention = {"q": (width, width), "k": (width, keys), "v": (width, keys)}
        return attention | {
            "o": (width, width),
            "gate": (width, mlp),
            "up": (width, mlp),
            "down": (mlp, width),
        }


MODELS = {"tiny": Model(8, 384, 1152, 4096, 128), "smollm2": Model(30, 576, 1536, 49152, 192)}
DOT = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
OPTIONS = {
    "default": {},
    "xnnpack": {"xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_GREEDY"},
    "ynnpack": {"xla_cpu_experimental_ynn_fusion_type": DOT},
    "onednn": {"xla_cpu_use_onednn": True, "xla_cpu_experimental_onednn_fusion_type": DOT},
}
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def main() -> None:
    """Prints medians in milliseconds, one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 33])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=10, help="chains within one call")
    parser.add_argument("--model", choices=MODELS, default="tiny")
    parser.add_argument("--processor", action="store_true", help="count processor time")
    options = parser.parse_args()
    clock = time.process_time if options.processor else time.perf_counter
    for rows in options.rows:
        runs = cases(rows, MODELS[options.model], options.repeats)
        seconds = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(options.rounds):
            for name, run in runs.items():
                start = clock()
                run()
                seconds[name].append((clock() - start) / options.repeats)
        medians = (f"{name} {1e3 * statistics.median(x):.2f}" for name, x in seconds.items())
        print(f"{rows:4} rows, ms: {', '.join(medians)}", flush=True)


def cases(rows: int, model: Model, repeats: int) -> dict[str, Callable[[], object]]:
    """Returns the timed functions by name; each runs `repeats` chains and waits for them."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return 0.05 * random.standard_normal(shape, np.float32)

    x, head = draw(rows, model.width), draw(model.vocabulary, model.width)
    layers = [
        {name: draw(*shape) for name, shape in model.shapes.items()} for _ in range(model.layers)
    ]
    joined = [
        {name: np.concatenate([one[part] for part in parts], 1) for name, parts in JOINED.items()}
        | {name: one[name] for name in ("o", "down")}
        for one in layers
    ]
    transposed = [{name: np.ascontiguousarray(w.T) for name, w in one.items()} for one in layers]
    plain = jax.jit(functools.partial(repeated, repeats=repeats))
    compiled = {name: plain.lower(x, layers, head).compile(some) for name, some in OPTIONS.items()}
    programs = {name: (program, layers) for name, program in compiled.items()}
    programs["joined"] = (plain.lower(x, joined, head).compile(), joined)
    if library_cpu.is_available():
        kernel = jax.jit(functools.partial(repeated, repeats=repeats, times=matmul_cpu.matmul))
        programs["kernel"] = (kernel.lower(x, layers, head).compile(), layers)
        programs["kernel, joined"] = (kernel.lower(x, joined, head).compile(), joined)
        panels = jax.tree.map(lambda w: np.asarray(matmul_cpu.to_panels(w)), joined)
        programs["kernel, panels"] = (kernel.lower(x, panels, head).compile(), panels)
    turned = jax.jit(functools.partial(repeated, repeats=repeats, transposed=True))
    programs["transposed"] = (turned.lower(x, transposed, head).compile(), transposed)

    def on_device(program, weights):
        args = jax.device_put((x, weights, head))
        return lambda: jax.block_until_ready(program(*args))

    runs = {name: on_device(*case) for name, case in programs.items()}
    return runs | in_torch(x, layers, head, repeats)


def by_xla(x, weights, transposed: bool = False):
    """Returns x @ weights, or x @ weights.T if `transposed`."""
    return x @ (weights.T if transposed else weights)


def repeated(x, layers, head, *, repeats: int, transposed: bool = False, times=by_xla):
    """Runs `repeats` chains, one after the other, with products by `times`."""

    def body(_, x):
        x = chain(x, layers, functools.partial(times, transposed=transposed))
        return x + 1e-3 * jnp.max(times(x, head, transposed=True), axis=-1, keepdims=True)

    return jax.lax.fori_loop(0, repeats, body, x)


def chain(x, layers, times):
    """Maps [rows, width] to [rows, width] by the products of the layers, and little else."""
    for one in layers:
        if "qkv" in one:
            q, k, v = split_heads(times(x, one["qkv"]), x.shape[1])
        else:
            q, k, v = (times(x, one[name]) for name in "qkv")
        x = x + times(q + k[:, :1] + v[:, :1], one["o"])
        if "gate_up" in one:
            gate, up = jnp.split(times(x, one["gate_up"]), 2, axis=1)
        else:
            gate, up = times(x, one["gate"]), times(x, one["up"])
        x = x + times(jax.nn.silu(gate) * up, one["down"])
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x


def split_heads(joined, width: int):
    """Splits the outputs of joined projections into queries, keys and values."""
    return jnp.split(joined, [width, width + (joined.shape[1] - width) // 2], axis=1)


def in_torch(x, layers, head, repeats: int) -> dict[str, Callable[[], object]]:
    """Returns the plain chain in PyTorch by name; an empty dict if PyTorch is not installed."""
    try:
        import torch
    except ImportError:
        return {}
    start, last = torch.from_numpy(x), torch.from_numpy(head)
    weights = [{name: torch.from_numpy(w) for name, w in one.items()} for one in layers]

    @torch.no_grad()
    def run():
        x = start
        for _ in range(repeats):
            for one in weights:
                q, k, v = (x @ one[name] for name in "qkv")
                x = x + (q + k[:, :1] + v[:, :1]) @ one["o"]
                gated = torch.nn.functional.silu(x @ one["gate"]) * (x @ one["up"])
                x = x + gated @ one["down"]
                x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
            x = x + 1e-3 * (x @ last.T).amax(-1, keepdim=True)
        return x

    return {"torch": run}


if __name__ == "__main__":
    main()
