"""Times matrix products with few rows on a CPU, by XLA's compile options and layouts.

    python tools/measure_products.py                      # needs no other package
    python tools/measure_products.py --rows 1 16 --rounds=21

Chains of products have the widths of the embedded tiny target, output head included, and run in a
loop on the device. Each round runs all cases in turn. PyTorch, if installed, runs the same chain.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, WIDTH, MLP, VOCABULARY, KEYS = 8, 384, 1152, 4096, 128
REPEATS = 10  # chains within one call
DOT = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
OPTIONS = {
    "default": {},
    "xnnpack": {"xla_cpu_experimental_xnn_graph_fusion_mode": "XNN_GRAPH_FUSION_MODE_GREEDY"},
    "ynnpack": {"xla_cpu_experimental_ynn_fusion_type": DOT},
    "onednn": {"xla_cpu_use_onednn": True, "xla_cpu_experimental_onednn_fusion_type": DOT},
}
SHAPES = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, KEYS),
    "v": (WIDTH, KEYS),
    "o": (WIDTH, WIDTH),
    "gate": (WIDTH, MLP),
    "up": (WIDTH, MLP),
    "down": (MLP, WIDTH),
}
JOINED = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up")}


def main() -> None:
    """Prints medians in milliseconds, one line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 8, 16, 33])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for rows in options.rows:
        runs = cases(rows)
        seconds = {name: [] for name in runs}
        for run in runs.values():
            run()
        for _ in range(options.rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append((time.perf_counter() - start) / REPEATS)
        medians = (f"{name} {1e3 * statistics.median(x):.2f}" for name, x in seconds.items())
        print(f"{rows:4} rows, ms: {', '.join(medians)}", flush=True)


def cases(rows: int) -> dict[str, Callable[[], object]]:
    """Returns the timed functions by name; each runs `REPEATS` chains and waits for them."""
    random = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return 0.05 * random.standard_normal(shape, np.float32)

    x, head = draw(rows, WIDTH), draw(VOCABULARY, WIDTH)
    layers = [{name: draw(*shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
    joined = [
        {name: np.concatenate([one[part] for part in parts], 1) for name, parts in JOINED.items()}
        | {name: one[name] for name in ("o", "down")}
        for one in layers
    ]
    transposed = [{name: np.ascontiguousarray(w.T) for name, w in one.items()} for one in layers]
    plain = jax.jit(repeated)
    compiled = {name: plain.lower(x, layers, head).compile(some) for name, some in OPTIONS.items()}
    programs = {name: (program, layers) for name, program in compiled.items()}
    programs["joined"] = (plain.lower(x, joined, head).compile(), joined)
    turned = jax.jit(lambda x, layers, head: repeated(x, layers, head, transposed=True))
    programs["transposed"] = (turned.lower(x, transposed, head).compile(), transposed)

    def on_device(program, weights):
        args = jax.device_put((x, weights, head))
        return lambda: jax.block_until_ready(program(*args))

    runs = {name: on_device(*case) for name, case in programs.items()}
    return runs | in_torch(x, layers, head)


def repeated(x, layers, head, *, transposed: bool = False):
    """Runs `REPEATS` chains, one after the other."""

    def body(_, x):
        x = chain(x, layers, transposed)
        return x + 1e-3 * jnp.max(x @ head.T, axis=-1, keepdims=True)

    return jax.lax.fori_loop(0, REPEATS, body, x)


def chain(x, layers, transposed: bool):
    """Maps [rows, WIDTH] to [rows, WIDTH] by the products of the layers, and little else."""

    def times(x, weight):
        return x @ weight.T if transposed else x @ weight

    for one in layers:
        if "qkv" in one:
            q, k, v = jnp.split(times(x, one["qkv"]), [WIDTH, WIDTH + KEYS], axis=1)
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


def in_torch(x, layers, head) -> dict[str, Callable[[], object]]:
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
        for _ in range(REPEATS):
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
