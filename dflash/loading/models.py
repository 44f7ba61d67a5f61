"""Builds models from a config, and loads their weights.

The two steps are separate because building is cheap and finds mismatches, while loading takes time
and memory.
"""

import dataclasses
import functools
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx

from dflash import errors
from dflash.checkpoints import (
    checkpoint,
    files,
    hf_config,
    lora,
    safetensors_io,
    weight_formats,
)
from dflash.checkpoints.gguf import hf_tensors, stored_values
from dflash.checkpoints.lora import Adapter
from dflash.checkpoints.safetensors_header import StoredTensor
from dflash.config import registry, schema
from dflash.config.schema import DrafterConfig, TargetArchitecture, TargetConfig
from dflash.drafters.autoregressive_config import AutoregressiveConfig
from dflash.drafters.base import Drafter
from dflash.kernels import library_cpu
from dflash.layers.transformer import join_projections, use_panels
from dflash.loading import adapters, quantization
from dflash.models.decoder import Decoder
from dflash.parallel import parameters
from dflash.parallel.sharding import Sharding

RANDOM = schema.RANDOM
_TARGET_SEED, _DRAFTER_SEED = 0, 1
_MAX_QUOTED = 100  # Characters of a name from a checkpoint.
_MASK_EMBEDDING = "mask_embedding"


@dataclasses.dataclass(frozen=True)
class Source:
    """Source of the weights of a model.

    Attributes:
      directory: Directory of the checkpoint; None for random weights, or without a download.
      hf: Content of the checkpoint's config.json, or None.
      adapter: Adapter to merge into the weights, or None.
      is_dry: The weights will not be read, so building checks the headers of their files.
    """

    directory: pathlib.Path | None
    hf: Mapping[str, Any] | None
    seed: int
    adapter: Adapter | None = None
    is_dry: bool = False

    @functools.cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Tensors of safetensors or a GGUF file, by name; empty for others and random weights."""
        return {} if self.directory is None else checkpoint.stored_tensors(self.directory)


def find_target(config: TargetConfig, *, download: bool = True) -> Source:
    """Finds the target's checkpoint, and reads the adapter to merge into it.

    Args:
      download: Fetch what is not on this machine; otherwise use random weights, and no adapter.
    Raises:
      CheckpointError: The checkpoint or the adapter is missing or cannot be read.
    """
    source = _find(config.checkpoint, _TARGET_SEED, download)
    directory = config.adapter and checkpoint.find(config.adapter, download=download)
    return dataclasses.replace(source, adapter=lora.read(str(directory)) if directory else None)


def find_drafter(config: DrafterConfig, *, download: bool = True) -> Source:
    """Finds the drafter's checkpoint, if the strategy has one; see `find_target`."""
    return _find(getattr(config, "checkpoint", RANDOM), _DRAFTER_SEED, download)


def build_target(
    config: TargetConfig, source: Source, *, dtype: str, sharding: Sharding
) -> Decoder:
    """Builds the abstract target.

    Raises:
      ConfigError: The config states another family or shape than the checkpoint has.
      CheckpointError: The checkpoint belongs to an unknown family, or the adapter does not fit.
    """
    if source.hf is None:
        if config.name is None or config.architecture is None:
            raise errors.ConfigError(
                f"target: {config.checkpoint} is not on this machine, so target.name and "
                "target.architecture must be given"
            )
        kind = registry.load(
            registry.find(registry.TARGETS, config.name, "target.name").implementation
        )
        arch = config.architecture
    else:
        kind = _family(config, source)
        arch = kind.architecture_from_hf(source.hf)
        stop_ids = checkpoint.eos_token_ids(source.directory) or arch.eos_token_id
        arch = dataclasses.replace(arch, eos_token_id=stop_ids)
        _check_shape(config.architecture, arch, source.directory)
    if config.rope_scaling is not None:
        arch = hf_config.with_rope_scaling(arch, config.rope_scaling)
    model = kind(arch, dtype=jnp.dtype(dtype), sharding=sharding)
    _quantize(model, source, config.quantization, "target")
    if source.adapter is not None:
        adapters.check_mergeable(model, source.adapter)
    return model


def check_same_target(target: Decoder, config: TargetConfig, directory: pathlib.Path) -> None:
    """Raises if config.json of a checkpoint describes another target, stop ids aside."""
    hf = checkpoint.read_config(directory)
    _, kind = find_class(hf, directory, registry.TARGETS)
    if kind is not type(target):
        raise errors.CheckpointError(f"{directory}: holds {hf['architectures'][0]}, another family")
    arch = kind.architecture_from_hf(hf)
    if config.rope_scaling is not None:
        arch = hf_config.with_rope_scaling(arch, config.rope_scaling)
    _check_shape(target.arch, arch, directory)


def build_drafter(
    config: DrafterConfig,
    source: Source,
    target: TargetArchitecture,
    *,
    dtype: str,
    sharding: Sharding,
) -> Drafter:
    """Builds the abstract drafter; see `Drafter.create` for the errors.

    If the decode loop chooses the block size, the drafter is built for the largest one.
    """
    if config.adaptive:
        largest = next(f.default for f in dataclasses.fields(config) if f.name == "block_size")
        config = dataclasses.replace(config, block_size=largest)
    entry = registry.find(registry.DRAFTERS, config.name, "drafter.name")
    kind = registry.load(entry.implementation)
    options = {}
    if kind.drafts_with_model:
        options["family"] = _draft_model_family(config, source)
    elif source.hf is not None:
        classes = hf_config.read_classes(source.hf, file=str(source.directory / files.CONFIG))
        if not set(classes) & set(kind.hf_architectures):
            strategy = find_strategy(os.fspath(source.directory))
            raise errors.CheckpointError(
                f"{source.directory}: config.json: architectures {list(classes)} is no "
                f"{config.name!r} drafter; use drafter.name={strategy}"
            )
    model = kind.create(
        config,
        described(kind, source),
        target,
        dtype=jnp.dtype(dtype),
        sharding=sharding,
        **options,
    )
    _quantize(model, source, getattr(config, "quantization", None), "drafter")
    return model


def described(kind: type, source: Source) -> Mapping[str, Any] | None:
    """Returns a checkpoint's config.json with what its tensors state; None without a checkpoint.

    Args:
      kind: Class of the target or drafter, which may have a method `with_tensors`.
    Raises:
      CheckpointError: A pickle holds what a tensor should.
    """
    if source.hf is None or not hasattr(kind, "with_tensors"):
        return source.hf
    pickle = source.directory / f"{_MASK_EMBEDDING}.pt"
    if pickle.exists() and _MASK_EMBEDDING not in source.tensors:
        raise errors.CheckpointError(
            f"{pickle}: pickles are not read; store its embedding as the tensor "
            f"{_MASK_EMBEDDING!r} in a .safetensors file"
        )
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    return kind.with_tensors(source.hf, shapes)


def _quantize(model: nnx.Module, source: Source, scheme: str | None, group: str) -> None:
    """Declares weights as quantized if the checkpoint or the config quantizes them."""
    stored = None if source.hf is None else weight_formats.stored_format(source.hf)
    if stored is not None and scheme is not None:
        raise errors.ConfigError(
            f"{group}.quantization: {scheme}, but the weights in {source.directory} are in eight "
            "bits already; leave it out, or take an unquantized checkpoint"
        )
    module = getattr(model, "checkpointed", model)
    if scheme == quantization.Q8_0:
        _keep_q8_0(module, source, group)
        return
    if stored is not None:
        quantization.follow(module, source.tensors, stored)
    if source.is_dry and source.tensors:
        safetensors_io.find_tensors(module, source.tensors, source.directory)
    quantization.quantize(module, scheme)


def _keep_q8_0(model: nnx.Module, source: Source, group: str) -> None:
    """Declares as quantized those projections that a GGUF file stores in Q8_0."""
    in_eight_bits = hf_tensors.in_eight_bits(source.tensors, source.tensors)
    quantization.follow(model, in_eight_bits, stored_values.Q8_0_FORMAT)
    if all(kernel.format is None for _, kernel in quantization.projections(model)):
        place = "random weights have" if source.directory is None else f"{source.directory} has"
        raise errors.ConfigError(
            f"{group}.quantization: q8_0 keeps the projections of a GGUF file in Q8_0, and {place} "
            "none; leave it out, or take int8"
        )


def load_weights(module: nnx.Module, source: Source) -> None:
    """Fills an abstract module from its source.

    Args:
      module: Abstract module. The checkpoint holds the module itself, or its attribute
        `checkpointed` if there is one. A method `check_weights` is called after loading.
    Raises:
      CheckpointError: The checkpoint is damaged, or does not fit the module.
    """
    if source.directory is not None:
        checkpoint.load(getattr(module, "checkpointed", module), source.directory)
        if hasattr(module, "check_weights"):
            module.check_weights(source.directory)
    else:
        parameters.init_fast_random(module, source.seed)
    if source.adapter is not None:
        adapters.merge(module, source.adapter)


def load(model: nnx.Module, source: Source, sharding: Sharding) -> None:
    """Fills an abstract target or drafter, and arranges its weights for decoding.

    Args:
      model: Abstract target or drafter; see `load_weights`.
    Raises:
      CheckpointError: The checkpoint is damaged, or does not fit the model.
    """
    load_weights(model, source)
    arrange(model, sharding)


def arrange(model: nnx.Module, sharding: Sharding) -> None:
    """Arranges weights, abstract or not, in the layout that the platform reads fastest, in place.

    On a TPU, and where a CPU has kernels in C++, projections of the same rows are joined; see
    docs/results/tpu_compile.md. These kernels read matrices in panels; see
    docs/results/decode_cpu.md.
    """
    if sharding.platform == "tpu" or library_cpu.serves(sharding):
        join_projections(model)
    use_panels(model)


def find_class(
    hf: Mapping[str, Any], directory: pathlib.Path, entries: Mapping[str, registry.Entry]
) -> tuple[str, type]:
    """Returns name and class of an architecture; raises CheckpointError if none is registered."""
    classes = hf_config.read_classes(hf, file=str(directory / files.CONFIG))
    known = []
    for name, entry in entries.items():
        kind = registry.load(entry.implementation)
        if set(classes) & set(kind.hf_architectures):
            return name, kind
        known += [f"{architecture} ({name})" for architecture in kind.hf_architectures[:1]]
    what = ", ".join(classes) or f"none (model_type {hf.get('model_type')!r})"
    raise errors.CheckpointError(
        f"{directory / files.CONFIG}: architectures: {what[:_MAX_QUOTED]} is not supported, only "
        f"{', '.join(known)}"
    )


def find_strategy(reference: str) -> str:
    """Returns the name of the strategy that drafts with a checkpoint, from its config.json.

    Language models belong to the strategy that drafts with models.

    Args:
      reference: Directory or hf:org/name.
    Raises:
      CheckpointError: The checkpoint is missing or cannot be read, or no strategy has its
        architecture.
    """
    directory = checkpoint.resolve(reference)
    entries = {**registry.DRAFTERS, **registry.TARGETS}
    name, _ = find_class(checkpoint.read_config(directory), directory, entries)
    return name if name in registry.DRAFTERS else _drafts_with_models()


def overrides(
    target: str | os.PathLike | None, drafter: str | os.PathLike | None
) -> tuple[str, ...]:
    """Returns the overrides that select a target and a drafter.

    Args:
      target: Reference of a checkpoint; None for none.
      drafter: Name of a strategy, or reference of a checkpoint; None for none.
    Raises:
      CheckpointError: The drafter's checkpoint cannot be read.
    """
    target_overrides = () if target is None else (f"target.checkpoint={os.fspath(target)}",)
    return *target_overrides, *_drafter_overrides(drafter)


def _drafter_overrides(drafter: str | os.PathLike | None) -> tuple[str, ...]:
    if drafter is None:
        return ()
    reference = os.fspath(drafter)
    if reference in registry.DRAFTERS:
        return (f"drafter.name={reference}",)
    try:
        name = find_strategy(reference)
    except errors.CheckpointError as error:
        near = registry.suggest(reference, registry.DRAFTERS, exhaustive=False)
        raise errors.CheckpointError(f"drafter: {error}{near}") from error
    return f"drafter.name={name}", f"drafter.checkpoint={reference}"


def _drafts_with_models() -> str:
    for name, entry in registry.DRAFTERS.items():
        if registry.load(entry.implementation).drafts_with_model:
            return name
    raise LookupError("no strategy drafts with language models")


def _draft_model_family(config: AutoregressiveConfig, source: Source) -> type:
    """Returns the class of a draft model, from its checkpoint or the config's family.

    Raises:
      CheckpointError: No registered family has the checkpoint's architecture.
      ConfigError: There is no such family, or the config cannot state its whole architecture.
    """
    if source.hf is not None:
        return find_class(source.hf, source.directory, registry.TARGETS)[1]
    entry = registry.find(registry.TARGETS, config.family, "drafter.family")
    if not _is_dense(entry):
        dense = (name for name, entry in registry.TARGETS.items() if _is_dense(entry))
        raise errors.ConfigError(
            f"drafter.family: {config.family!r} has experts or attention of its own, which "
            "drafter.architecture does not state; use drafter.checkpoint, or a family of "
            f"{', '.join(dense)}"
        )
    return registry.load(entry.implementation)


def _is_dense(entry: registry.Entry) -> bool:
    """Returns whether `TargetArchitecture` alone describes the targets of a family."""
    kind = typing.get_type_hints(registry.load_schema(entry))["architecture"]
    return TargetArchitecture in typing.get_args(kind)


def _find(reference: str, seed: int, download: bool) -> Source:
    directory = None if reference == RANDOM else checkpoint.find(reference, download=download)
    if directory is None:
        return Source(None, None, seed)
    return Source(directory, checkpoint.read_config(directory), seed, is_dry=not download)


def _family(config: TargetConfig, source: Source) -> type:
    """Returns the class of the checkpoint's family; raises if the config states another one."""
    name, kind = find_class(source.hf, source.directory, registry.TARGETS)
    if config.name not in (None, name):
        raise errors.ConfigError(
            f"target.name: {config.name!r}, but {source.directory} holds "
            f"{source.hf['architectures'][0]}, which is {name!r}; leave target.name out"
        )
    return kind


def _check_shape(
    config: TargetArchitecture | None, shape: TargetArchitecture, directory: pathlib.Path
) -> None:
    """Raises if the config states another shape than the checkpoint's, stop ids aside."""
    if config is None:
        return
    problems = [
        f"target.architecture.{name}: {value}, but {directory} has {getattr(shape, name)}"
        for name, value in vars(config).items()
        if name != "eos_token_id" and value != getattr(shape, name)
    ]
    if problems:
        raise errors.ConfigError(*problems)
