"""Measures the peak host memory of reading a checkpoint; a test runs this in a small size.

    python tests/support/checkpoint_memory.py make DIR KIND MEGABYTES
    python tests/support/checkpoint_memory.py load DIR '{"dtype": "bfloat16", "tensor": 8}'

Nearly all weights of the kind `experts`, a Qwen3 MoE, are experts, a tensor each. `mxfp4` is like
gpt-oss: the experts of a layer are two tensors, which take the megabytes in eight bits. `gguf`
writes a file DIR.gguf with matrices in 8 bits too, which `load` also takes.

`load` prints one JSON line: bytes of the weights as they stay resident, and the process's peak
memory beyond what it used right before reading, as the kernel counts both (mapped file pages
included). Linux only.
"""

import json
import os
import pathlib
import re
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from dflash.checkpoints import checkpoint
from dflash.config import schema
from dflash.config.schema import TargetConfig
from dflash.loading import models
from dflash.models.config import GptOssArchitecture, Qwen3MoeArchitecture
from dflash.models.dense import Qwen3
from dflash.models.gpt_oss import GptOss
from dflash.models.qwen3_moe import Qwen3Moe
from dflash.parallel import parameters, sharding

WIDTH, FACTOR, VOCAB = 1024, 3, 32768
EXPERTS, EXPERT_WIDTH = 32, 256


def architecture(num_layers: int, experts: bool) -> schema.TargetArchitecture:
    kind = Qwen3MoeArchitecture if experts else schema.TargetArchitecture
    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    own = dict(zip(names, (EXPERTS, 4, EXPERT_WIDTH), strict=True)) if experts else {}
    return kind(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=FACTOR * WIDTH,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=WIDTH // 8,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        **own,
    )


def make_sharding(tensor: int, expert: int = 1) -> sharding.Sharding:
    axes = {"data": 1, "fsdp": 1, "tensor": tensor, "expert": expert}
    return sharding.make_sharding(axes, schema.SHARDING_RULES)


def make(directory: pathlib.Path, kind: str, megabytes: int) -> None:
    """Writes random weights of about this size, in five shards, or as one file."""
    has_experts = kind == "experts"
    mlp = 3 * WIDTH * (EXPERTS * EXPERT_WIDTH if has_experts else FACTOR * WIDTH)
    layers = max(1, round((megabytes * 250_000 - VOCAB * WIDTH) / (4 * WIDTH * WIDTH + mlp)))
    arch = architecture(layers, has_experts)
    family = Qwen3Moe if has_experts else Qwen3
    module = family(arch, dtype=jnp.dtype("float32"), sharding=make_sharding(1))
    parameters.initialize(module, jax.random.key(0))
    size = megabytes * 1_100_000 // (1 if kind == "gguf" else 5)
    checkpoint.save(module, directory, family.config_to_hf(arch), max_shard_bytes=size)
    if kind == "gguf":
        sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
        from gguf import GGMLQuantizationType

        from support import gguf_files

        file = directory.with_suffix(".gguf")
        gguf_files.write(file, directory, kind=GGMLQuantizationType.Q8_0)


def make_packed(directory: pathlib.Path, megabytes: int) -> None:
    """Writes weights like gpt-oss's, as one file."""
    layers = max(1, round(megabytes * 1_000_000 / (3 * WIDTH * EXPERTS * EXPERT_WIDTH)))
    own = {"intermediate_size": EXPERT_WIDTH, "num_local_experts": EXPERTS, "vocab_size": 1024}
    own |= {"num_experts_per_tok": 4, "sliding_window": 64, "tie_word_embeddings": False}
    arch = GptOssArchitecture(**vars(architecture(layers, experts=False)) | own)
    module = GptOss(arch, dtype=jnp.dtype("float32"), sharding=make_sharding(1))
    tensors, rng = {}, np.random.default_rng(0)
    for path, param in parameters.named_parameters(module):
        source, shape = module.checkpoint_name(path), param.get_value().shape
        if isinstance(source, str):
            tensors[source] = np.ones(shape[::-1] if path.endswith(".kernel") else shape, "float32")
            continue
        blocks = shape[0], shape[2], shape[1] // 32
        tensors[f"{source.name}_blocks"] = rng.integers(0, 256, (*blocks, 16), dtype=np.uint8)
        tensors[f"{source.name}_scales"] = np.full(blocks, 120, np.uint8)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    (directory / "config.json").write_text(json.dumps(GptOss.config_to_hf(arch) | packed))


def load(
    reference: str, dtype: str = "float32", tensor: int = 1, expert: int = 1, quantization=None
) -> dict[str, float]:
    """Reads the weights; returns megabytes and seconds."""
    directory = checkpoint.resolve(reference)
    config = TargetConfig(checkpoint=str(directory), quantization=quantization)
    place = make_sharding(tensor, expert)
    module = models.build_target(config, models.find_target(config), dtype=dtype, sharding=place)
    jnp.zeros(8).block_until_ready()  # start the runtime
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    before = status_megabytes("VmRSS")
    started = time.monotonic()
    checkpoint.load(module, directory)
    seconds = time.monotonic() - started
    weights = sum(param.get_value().nbytes for _, param in parameters.named_parameters(module))
    peak = status_megabytes("VmHWM")
    return {
        "weights": weights / 1e6, "before": before, "peak": peak,
        "beyond_weights": peak - before - weights / 1e6, "seconds": seconds,
    }  # fmt: skip


def status_megabytes(field: str) -> float:
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE).group(1)) * 1024 / 1e6


def main() -> None:
    action, directory, *rest = sys.argv[1:]
    if action == "load":
        figures = load(directory, **json.loads(rest[0]))
        print(json.dumps({name: round(value, 1) for name, value in figures.items()}))
        return
    kind, megabytes = rest
    if kind == "mxfp4":
        make_packed(pathlib.Path(directory), int(megabytes))
    else:
        make(pathlib.Path(directory), kind, int(megabytes))


if __name__ == "__main__":
    main()
