"""Checkpoints: resolving references, and reading and writing both layouts.

The light parts of this module (references, config.json) work without importing jax, so that a
wrong name in a config is reported at once.
"""

import importlib.resources
import pathlib
import re
from typing import TYPE_CHECKING, Any, Literal

from dflash import errors
from dflash.checkpoints import files, hf_config

if TYPE_CHECKING:
    import jax.numpy as jnp
    from flax import nnx

Layout = Literal["hf", "orbax"]

HUB_PREFIX = "hf:"
_HUB_REFERENCE = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
# No pickles (*.bin, *.pt), no code, no second copy of the weights in a folder.
_HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "LICENSE*", "NOTICE*")
_HUB_UNWANTED = ("*/*", "consolidated*")
_WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


def resolve(reference: str) -> pathlib.Path:
    """Returns the local directory of a checkpoint, downloaded to the hub's cache if need be.

    Args:
      reference: a directory, as given or of this package (assets/tiny_target), or hf:org/name or
        hf:org/name@revision.
    Raises:
      CheckpointError: there is no such directory, or it cannot be downloaded from the hub.
    """
    if reference.startswith(HUB_PREFIX):
        return _download(reference)
    directory = pathlib.Path(reference).expanduser()
    shipped = pathlib.Path(str(importlib.resources.files("dflash"))) / reference
    for candidate in (directory, shipped):
        if candidate.is_dir():
            return candidate
    if directory.exists():
        raise errors.CheckpointError(f"{reference}: a file; expected the directory around it")
    hint = "give an existing directory"
    if _HUB_REFERENCE.fullmatch(reference):
        hint += f", or {HUB_PREFIX}{reference} to download it from the Hugging Face hub"
    raise errors.CheckpointError(f"{reference}: no such directory; {hint}")


def layout(directory: pathlib.Path) -> Layout:
    """Detects the layout of a checkpoint directory.

    Raises:
      CheckpointError: neither.
    """
    if any((directory / name).exists() for name in _WEIGHT_FILES):
        return "hf"
    if (directory / "params").is_dir():
        return "orbax"
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise errors.CheckpointError(
            f"{directory}: holds pickled PyTorch weights only, which are never loaded because they "
            "can run code; convert them to safetensors (save_pretrained of transformers does)"
        )
    raise errors.CheckpointError(
        f"{directory}: no weights in it; expected {' or '.join(_WEIGHT_FILES)} or params/"
    )


def read_config(directory: pathlib.Path) -> dict[str, Any]:
    """Reads a checkpoint's config.json.

    Raises:
      CheckpointError: it is missing or malformed.
    """
    return files.read_json(directory / files.CONFIG)


def eos_token_ids(directory: pathlib.Path) -> tuple[int, ...]:
    """Ids that end a sequence: of generation_config.json, else of config.json, else none.

    Raises:
      CheckpointError: a file is malformed, or the ids are not integers.
    """
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

    Every parameter is created directly sharded, as its declaration says, and cast to its dtype.

    Raises:
      CheckpointError: the checkpoint is missing, damaged, or of another model.
    """
    _io(layout(directory)).load(module, directory)


def save_hf(
    module: "nnx.Module",
    directory: pathlib.Path,
    config: dict[str, Any],
    *,
    dtype: "jnp.dtype | None" = None,
    max_shard_bytes: int = 5 * 2**30,
    companions: pathlib.Path | None = None,
) -> int:
    """Writes a directory in the Hugging Face layout; it appears whole or not at all.

    Args:
      module: its parameters hold arrays.
      directory: must not exist, or be empty.
      config: becomes config.json; its dtype field is set to what is written.
      dtype: dtype of the stored tensors; None keeps each parameter's own.
      max_shard_bytes: larger models are split into several files and an index.
      companions: directory whose tokenizer, generation and licence files are copied along.
    Returns:
      Number of tensors written.
    Raises:
      CheckpointError: `directory` is taken or cannot be written.
    """
    from dflash.checkpoints import safetensors_io

    def write(staged):
        return safetensors_io.save(module, staged, dtype, max_shard_bytes)

    return _save(write, module, directory, config, dtype, companions)


def save_orbax(
    module: "nnx.Module",
    directory: pathlib.Path,
    config: dict[str, Any],
    *,
    companions: pathlib.Path | None = None,
) -> int:
    """Writes the native layout; it appears whole or not at all. See `save_hf`."""
    from dflash.checkpoints import orbax_io

    def write(staged):
        return orbax_io.save(module, staged)

    return _save(write, module, directory, config, None, companions)


def stored_dtype(directory: pathlib.Path) -> "jnp.dtype":
    """The narrowest dtype that holds every stored weight exactly.

    Raises:
      CheckpointError: the checkpoint cannot be read, or a tensor is not floating-point.
    """
    import jax.numpy as jnp

    found = _io(layout(directory)).stored_dtypes(directory)
    return jnp.dtype(found.pop() if len(found) == 1 else jnp.float32)


def _save(write, module, directory, config, dtype, companions) -> int:
    import jax
    import numpy as np

    from dflash.parallel import parameters

    if dtype is None:
        dtype = next(parameters.named_parameters(module))[1].get_value().dtype
    with files.staged(pathlib.Path(directory)) as staged:
        if jax.process_index() == 0:
            files.write_json(staged / files.CONFIG, _with_dtype(config, np.dtype(dtype).name))
            if companions is not None:
                files.copy_companions(companions, staged)
        return write(staged)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Newer files call it dtype, older ones torch_dtype, which readers of both still accept."""
    names = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
    return config | dict.fromkeys(names, dtype)


def _io(name: Layout):
    if name == "hf":
        from dflash.checkpoints import safetensors_io

        return safetensors_io
    from dflash.checkpoints import orbax_io

    return orbax_io


def _download(reference: str) -> pathlib.Path:
    """Fetches a repository of the Hugging Face hub, or finds it in the local cache."""
    name = reference.removeprefix(HUB_PREFIX)
    if not _HUB_REFERENCE.fullmatch(name):
        raise errors.CheckpointError(
            f"{reference}: expected {HUB_PREFIX}org/name or {HUB_PREFIX}org/name@revision"
        )
    try:
        import huggingface_hub
        from huggingface_hub import errors as hub
    except ImportError as error:
        raise errors.CheckpointError(
            f"{reference}: needs huggingface_hub; pip install 'dflash[hf]', or give a directory"
        ) from error
    repository, _, revision = name.partition("@")
    try:
        path = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_UNWANTED),
        )
    except hub.GatedRepoError as error:
        reason = f"gated; accept its terms at huggingface.co/{repository}, then hf auth login"
        raise errors.CheckpointError(f"{reference}: {reason}") from error
    except hub.RepositoryNotFoundError as error:
        reason = "not on the Hugging Face hub, or private; check the name, or hf auth login"
        raise errors.CheckpointError(f"{reference}: {reason}") from error
    except hub.RevisionNotFoundError as error:
        raise errors.CheckpointError(f"{reference}: no revision {revision!r}") from error
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        reason = "not in the local cache and the hub cannot be reached; download it while online"
        raise errors.CheckpointError(f"{reference}: {reason}, or give a directory") from error
    except Exception as error:  # of several HTTP libraries, depending on the version
        reason = str(error).partition("\n")[0]
        raise errors.CheckpointError(f"{reference}: cannot be downloaded: {reason}") from error
    return pathlib.Path(path)
