"""Options of a rollout engine, in the words of our configs, from Tunix's `RolloutConfig`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config import loader
from dflash.config.train_schema import UpkeepRun

KEY = "dflash"  # Entry of `rollout_vllm_additional_config` and `rollout_vllm_kwargs`.
CONFIG = "config"  # Option that names a config file.
CHECKPOINT = "target.checkpoint"
# Options that are not keys of a decode config: the LoRA's scale, the number of sequences that were
# drawn before a run was resumed, and groups of `UpkeepRun`.
LORA_ALPHA, NUM_SEQUENCES = "lora_alpha", "num_sequences"
UPKEEP = ("train.", "optimizer.", "loss.")
# The number of steps is unknown, so the rate of the drafter's training is constant after a warm-up
# of ten steps. The drafter learns the policy's distribution, not the one token that was drawn from
# it, and learns it at the temperature of the rollouts: a drafter that agrees at another temperature
# is too flat, and is accepted less often than before its training.
UPKEEP_DEFAULTS = {
    "loss.name": "kl",
    "loss.gamma": 0.0,
    "loss.num_anchors": 32,
    "optimizer.learning_rate": 3e-4,
    "optimizer.schedule": "constant",
    "optimizer.warmup_fraction": 0.001,
}


def find(rollout_config: Any, direct: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the options of a rollout engine, by dotted key.

    Args:
      rollout_config: Tunix's RolloutConfig, in whose `rollout_vllm_additional_config` or
        `rollout_vllm_kwargs` the entry `dflash` holds options.
      direct: Options that the caller passes directly; they take precedence.
    Raises:
      ConfigError: The options are no mapping, or name neither a config file nor a target.
    """
    options: dict[str, Any] = {}
    for name in ("rollout_vllm_additional_config", "rollout_vllm_kwargs"):
        entry = (getattr(rollout_config, name, None) or {}).get(KEY, {})
        if not isinstance(entry, Mapping):
            raise errors.ConfigError(f"{name}: {KEY}: expected a mapping of options, got {entry!r}")
        options |= dict(_dotted(entry, ""))
    options |= dict(_dotted(direct or {}, ""))
    if CONFIG not in options and CHECKPOINT not in options:
        raise errors.ConfigError(
            "DFlashRollout: expected options such as dflash={'target': {'checkpoint': DIRECTORY}, "
            "'drafter': {'name': 'ngram'}}, or 'config': FILE"
        )
    return options


def overrides(options: Mapping[str, Any]) -> list[str]:
    """Returns options as overrides `key=value` of a decode config."""
    return [
        f"{key}={_text(value)}"
        for key, value in options.items()
        if key not in (CONFIG, LORA_ALPHA, NUM_SEQUENCES) and not key.startswith(UPKEEP)
    ]


def upkeep(options: Mapping[str, Any], temperature: float = 1.0) -> UpkeepRun:
    """Returns the options of the drafter's training.

    Args:
      temperature: Temperature of the rollouts; 0 is greedy.
    Raises:
      ConfigError: An option is unknown or invalid.
    """
    chosen = {name: value for name, value in options.items() if name.startswith(UPKEEP)}
    settings = UPKEEP_DEFAULTS | {"loss.temperature": float(temperature or 1.0)} | chosen
    arguments = [f"{key}={_text(value)}" for key, value in settings.items()]
    return loader.load(None, arguments, UpkeepRun)


def num_sequences(options: Mapping[str, Any]) -> int:
    """Returns the number of sequences that were drawn before; raises ConfigError if it is none."""
    number = options.get(NUM_SEQUENCES, 0)
    if type(number) is not int or number < 0:
        raise errors.ConfigError(f"{NUM_SEQUENCES}: expected an integer >= 0, got {number!r}")
    return number


def defaults(options: Mapping[str, Any], rollout_config: Any) -> list[str]:
    """Returns overrides that the options leave open: room for the sequences, and a prefix cache.

    A config file states everything itself.
    """
    if CONFIG in options:
        return []
    length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
    settings = {
        "decode.max_length": length,
        "decode.max_new_tokens": rollout_config.max_tokens_to_generate,
        "decode.prefix_cache": True,
    }
    dtype = getattr(rollout_config, "data_type", None)
    if dtype is not None:
        settings["dtype"] = getattr(dtype, "__name__", None) or str(dtype)
    return [f"{key}={_text(value)}" for key, value in settings.items() if key not in options]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _dotted(options: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{name}.")
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield f"{prefix}{name}", list(value)
        else:
            yield f"{prefix}{name}", value
