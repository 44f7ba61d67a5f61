"""LoRA adapters in the layout of PEFT: adapter_config.json and adapter_model.safetensors.

Source: https://huggingface.co/docs/peft, "PEFT checkpoint format".
"""

import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dflash import errors
from dflash.checkpoints import checkpoint, files

if TYPE_CHECKING:
    import numpy as np

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
# Fields that are supported with these values only, beside null; other fields change nothing.
_FIXED: Mapping[str, Sequence[Any]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": ([],),
    "alpha_pattern": ({},),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "trainable_token_indices": ([], {}),
    # The others change the weights of the base model too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclasses.dataclass(frozen=True)
class LowRankUpdate:
    """Update W + b a of a linear map: a [rank, in], b [out, rank] with the scale, in float32."""

    a: "np.ndarray"
    b: "np.ndarray"

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """Adapter of a model; updates are by name of the base tensor, such as "….q_proj.weight"."""

    directory: pathlib.Path
    updates: Mapping[str, LowRankUpdate]


def check(reference: str) -> None:
    """Checks an adapter as far as possible without network access and without its weights."""
    directory = checkpoint.find(reference, download=False)
    if directory is not None:
        _read_config(directory)
        _headers(directory)


def read(reference: str) -> Adapter:
    """Reads an adapter; see `checkpoint.resolve` for references."""
    directory = checkpoint.resolve(reference)
    config, pairs = _read_config(directory), _headers(directory)
    return Adapter(directory, dict(_updates(directory, config, pairs)))


def _read_config(directory: pathlib.Path) -> Mapping[str, Any]:
    path = directory / CONFIG
    if not path.exists():
        raise errors.CheckpointError(
            f"{directory}: no {CONFIG}; give the directory of a LoRA adapter in PEFT's layout"
        )
    config = files.read_json(path)
    for field, supported in _FIXED.items():
        value, choices = json.dumps(config.get(field)), [*map(json.dumps, supported)]
        if value not in ("null", *choices):
            raise errors.CheckpointError(
                f"{path}: {field}: {value} is not supported, only {' or '.join(choices)}; "
                "merge the adapter with peft (merge_and_unload), and give the merged model"
            )
    for field in ("r", "lora_alpha"):
        if type(config.get(field)) not in (int, float) or not 0 < config[field] < math.inf:
            raise errors.CheckpointError(f"{path}: {field}: expected a number above 0")
    return config


def _headers(directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Returns the stored tensors A and B of every update, by the name of the base's tensor."""
    # Imported late, since --help does not need numpy.
    from dflash.checkpoints import safetensors_header

    file = directory / WEIGHTS
    if not file.exists():
        hint = f"{_PICKLE} is a pickle, which is never loaded: save the adapter as safetensors"
        again = hint if (directory / _PICKLE).exists() else "copy or download the adapter again"
        raise errors.CheckpointError(f"{directory}: no {WEIGHTS}; {again}")
    pairs: dict[str, dict[str, Any]] = {}
    for tensor in safetensors_header.read_file(file):
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            raise errors.CheckpointError(
                f"{file}: {tensor.name!r} is no LoRA weight of a linear map; merge the adapter "
                "with peft (merge_and_unload), and give the merged model"
            )
        if tensor.code not in safetensors_header.PLAIN_DTYPES or len(tensor.shape) != 2:
            raise errors.CheckpointError(
                f"{file}: {tensor.name!r} is {tensor.code} {list(tensor.shape)}, expected a matrix "
                f"in one of {', '.join(safetensors_header.PLAIN_DTYPES)}"
            )
        pairs.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
    if not pairs:
        raise errors.CheckpointError(f"{file}: holds no tensors; save the adapter again")
    for name, pair in pairs.items():
        if len(pair) < 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            shapes = " and ".join(f"{factor} {list(pair[factor].shape)}" for factor in sorted(pair))
            raise errors.CheckpointError(
                f"{file}: {name}: found {shapes}, expected A [rank, in] and B [out, rank]"
            )
    return pairs


def _updates(
    directory: pathlib.Path, config: Mapping[str, Any], pairs: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, LowRankUpdate]]:
    import numpy as np

    for name, pair in pairs.items():
        rank = pair["A"].shape[0]
        # The rank of a map may differ from the config's `r` by its rank_pattern.
        scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        a, b = (
            tensor.read(tuple(slice(0, size) for size in tensor.shape)).astype(np.float32)
            for tensor in (pair["A"], pair["B"])
        )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise errors.CheckpointError(
                f"{directory / WEIGHTS}: {name}: holds NaN or infinite numbers; train it again"
            )
        yield name, LowRankUpdate(a, np.float32(scale) * b)
