"""LoRA adapters with random weights, in PEFT's layout, and targets that have them."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from safetensors import numpy as safetensors

from dflash.checkpoints import lora
from dflash.loading import adapters
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from support.models import move

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: pathlib.Path,
    target: Decoder,
    *,
    modules: Sequence[str] = ALL,
    rank: int = 4,
    seed: int = 0,
    size: float = 0.2,
    tensors: Mapping[str, np.ndarray] | None = None,
    **config,
) -> pathlib.Path:
    """Writes an adapter of a target; returns its directory.

    Args:
      modules: names of the maps that it updates, in every layer.
      size: standard deviation of its weights.
      tensors: instead of those of `modules`.
      config: other fields of adapter_config.json.
    """
    rng = np.random.default_rng(seed)
    made = {}
    for path, leaf in parameters.named_parameters(target):
        name = path.removesuffix(".kernel")
        is_chosen = path.endswith(".kernel") and name.rpartition(".")[2] in modules
        if tensors is None and is_chosen:
            (rows, columns), start = leaf.get_value().shape, f"base_model.model.model.{name}"
            made[f"{start}.lora_A.weight"] = rng.normal(0, size, (rank, rows))
            made[f"{start}.lora_B.weight"] = rng.normal(0, size, (columns, rank))
    made = {name: array.astype(np.float32) for name, array in made.items()}
    directory.mkdir(parents=True, exist_ok=True)
    safetensors.save_file(made if tensors is None else tensors, directory / lora.WEIGHTS)
    stated = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank}
    stated |= {"target_modules": list(modules), "bias": "none", "use_dora": False}
    (directory / lora.CONFIG).write_text(json.dumps(stated | config))
    return directory


def merged(base: Decoder, directory: pathlib.Path) -> Decoder:
    """A copy of a target with an adapter merged into its weights."""
    copy = _copy(base)
    adapters.merge(copy, lora.read(str(directory)))
    return copy


def adapted(base: Decoder, directories: Sequence[pathlib.Path]) -> Decoder:
    """A copy of a target with adapters that sequences choose among."""
    copy = _copy(base)
    found = adapters.declare(copy, {place.name: str(place) for place in directories})
    adapters.fill(copy, tuple(found.values()))
    return copy


def _copy(base: Decoder) -> Decoder:
    return move(base, type(base)(base.arch, dtype=base.dtype, sharding=base.sharding))
