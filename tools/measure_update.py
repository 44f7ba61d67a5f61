"""Measures replacing a target's weights in place, beside copying arrays of the same sizes.

    python tools/measure_update.py                           # the embedded tiny target's size
    python tools/measure_update.py --layers=30 --width=576 --mlp=1536 --vocabulary=49152 # SmolLM2's

Prints, for trees under the names of each framework: milliseconds of an update and of a plain copy
of the weights by one thread, by the clock and of processor time (medians over rounds in turn),
their ratios, and the process's peak memory during the updates beyond what weights and tree take, as
the kernel counts it. Linux only.
"""

import argparse
import json
import os
import pathlib
import re
import time
from collections.abc import Callable

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from dflash.checkpoints.foreign_trees import HfNames
from dflash.checkpoints.namings.maxtext import MaxTextNames
from dflash.checkpoints.namings.origin import Naming
from dflash.checkpoints.namings.tunix import TunixNames
from dflash.config import schema
from dflash.inference import weight_update
from dflash.loading import models
from dflash.models.decoder import Decoder
from dflash.models.dense import Qwen3
from dflash.parallel import parameters, sharding

NAMINGS: dict[str, Callable[[Decoder], Naming]] = {
    "hf": HfNames,
    "tunix": lambda target: TunixNames(target, {}, None),
    "maxtext": lambda target: MaxTextNames(target, {}, stacked=True),
}


def main() -> None:
    """Prints one JSON line for each naming."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--mlp", type=int, default=1152)
    parser.add_argument("--kv_heads", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--names", nargs="+", choices=list(NAMINGS), default=list(NAMINGS))
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    target = make_target(args.layers, args.width, args.mlp, args.kv_heads, args.vocabulary)
    plain = type(target)(target.arch, dtype=target.dtype, sharding=target.sharding)
    for name in args.names:
        tree = make_tree(plain, NAMINGS[name](plain))
        print(json.dumps({"names": name, **measure(target, tree, args.rounds)}), flush=True)


def make_target(layers: int, width: int, mlp: int, kv_heads: int, vocabulary: int) -> Decoder:
    """Returns a Qwen3 of this size with random weights in float32, arranged for decoding."""
    arch = schema.TargetArchitecture(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    axes = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
    placed = sharding.make_sharding(axes, schema.SHARDING_RULES)
    target = Qwen3(arch, dtype=jnp.float32, sharding=placed)
    parameters.initialize(target, jax.random.key(0))
    models.arrange(target, placed)
    return target


def measure(target: Decoder, tree: dict[str, jax.Array], rounds: int) -> dict[str, float]:
    """Returns megabytes of the weights and of the peak beyond them, milliseconds, and the ratio."""
    sources = [np.asarray(array) for array in tree.values()]
    copies = [np.empty_like(array) for array in sources]
    variables = [leaf for _, leaf in parameters.named_parameters(target)]

    def copy() -> None:
        for to, array in zip(copies, sources, strict=True):
            np.copyto(to, array)

    def update() -> None:
        weight_update.update(target, tree)
        jax.block_until_ready([leaf.get_raw_value() for leaf in variables])

    copy()
    update()  # Compiles.
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Resets VmHWM.
    before = status_megabytes("VmRSS")
    update()
    peak = status_megabytes("VmHWM")
    times = np.array([[timed(function) for function in (copy, update)] for _ in range(rounds)])
    clock, processor = (1e3 * np.median(times, axis=0)).T.round(2).tolist()
    ratios = np.median(times[:, 1] / times[:, 0], axis=0).round(2).tolist()
    return {
        "weights_mb": round(sum(array.nbytes for array in sources) / 1e6, 1),
        "copy_ms": clock[0],
        "update_ms": clock[1],
        "ratio": ratios[0],
        "copy_processor_ms": processor[0],
        "update_processor_ms": processor[1],
        "processor_ratio": ratios[1],
        "peak_beyond_mb": round(peak - before, 1),
    }


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """Returns seconds by the clock, and of processor time, that a function takes."""
    clock, processor = time.perf_counter(), time.process_time()
    function()
    return time.perf_counter() - clock, time.process_time() - processor


def make_tree(target: Decoder, naming: Naming) -> dict[str, jax.Array]:
    """Returns random arrays under the names, and in the shapes, of a naming."""
    tree, key = {}, jax.random.key(1)
    for path, leaf in parameters.named_parameters(target):
        origin = naming.origin(path, leaf.get_value().shape)
        for name, shape in zip(origin.names, origin.shapes, strict=True):
            if name not in tree:
                tree[name] = jax.random.normal(jax.random.fold_in(key, len(tree)), shape)
    return tree


def status_megabytes(field: str) -> float:
    """Returns a field of the process's status in megabytes."""
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE).group(1)) * 1024 / 1e6


if __name__ == "__main__":
    main()
