"""Repositories of the Hugging Face hub, by references such as hf:org/name@revision.

A reference without a commit means another checkpoint after the next upload. So the commit that is
read is printed, and the config.yml of a work directory names it.
"""

import importlib.util
import pathlib
import re
import sys

from dflash import errors
from dflash.version import install_command

PREFIX = "hf:"
# Commit that this process has read last, by reference that names none.
commits: dict[str, str] = {}
_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Download neither pickles (*.bin, *.pt) nor code nor a second copy of the weights in a folder.
_FILES = (
    "*.safetensors",
    "*.json",
    "*.model",
    "*.jinja",
    "*.txt",
    "LICENSE*",
    "NOTICE*",
    "README.md",
)
# The pattern of Jinja files is also for those in additional_chat_templates/.
_UNWANTED = (*(f"*/{pattern}" for pattern in _FILES if pattern != "*.jinja"), "consolidated*")


def is_name(text: str) -> bool:
    """Returns whether a text is org/name or org/name@revision."""
    return _NAME.fullmatch(text) is not None


def download(reference: str) -> pathlib.Path:
    """Fetches a repository, or finds it in the local cache, and prints its commit."""
    check(reference)
    import huggingface_hub
    from huggingface_hub import errors as failures

    repository, _, revision = reference.removeprefix(PREFIX).partition("@")
    try:
        path = huggingface_hub.snapshot_download(
            repository,
            revision=revision or None,
            allow_patterns=list(_FILES),
            ignore_patterns=list(_UNWANTED),
        )
    except failures.GatedRepoError as error:
        reason = f"gated; accept its terms at huggingface.co/{repository}, then hf auth login"
        raise errors.CheckpointError(f"{reference}: {reason}") from error
    except failures.RepositoryNotFoundError as error:
        reason = "not on the Hugging Face hub, or private; check the name, or hf auth login"
        raise errors.CheckpointError(f"{reference}: {reason}") from error
    except failures.RevisionNotFoundError as error:
        raise errors.CheckpointError(f"{reference}: no revision {revision!r}") from error
    except (failures.LocalEntryNotFoundError, failures.OfflineModeIsEnabled) as error:
        reason = "not in the local cache and the hub cannot be reached; download it while online"
        raise errors.CheckpointError(f"{reference}: {reason}, or give a directory") from error
    except Exception as error:  # Raised by one of several HTTP libraries.
        reason = str(error).partition("\n")[0]
        raise errors.CheckpointError(f"{reference}: cannot be downloaded: {reason}") from error
    directory = pathlib.Path(path)  # In the cache, its name is the commit.
    if not _COMMIT.fullmatch(revision) and commits.get(reference) != directory.name:
        commits[reference] = directory.name
        print(f"{reference}: commit {directory.name}", file=sys.stderr)
    return directory


def pinned(reference: str) -> str:
    """Returns a reference with the commit that this process has read, if it has read one."""
    commit = commits.get(reference)
    return reference if commit is None else f"{repository_of(reference)}@{commit}"


def name_the_same(first: object, second: object) -> bool:
    """Returns whether two values are equal, or name one repository, and a commit only once."""
    if first == second:
        return True
    if not all(isinstance(value, str) and value.startswith(PREFIX) for value in (first, second)):
        return False
    pins = [bool(_COMMIT.fullmatch(value.partition("@")[2])) for value in (first, second)]
    return sum(pins) == 1 and repository_of(first) == repository_of(second)


def repository_of(reference: str) -> str:
    """Returns a reference without its revision."""
    return reference.partition("@")[0]


def check(reference: str) -> None:
    """Checks the form of a reference, and that huggingface_hub is installed."""
    if not is_name(reference.removeprefix(PREFIX)):
        raise errors.CheckpointError(
            f"{reference}: expected {PREFIX}org/name or {PREFIX}org/name@revision"
        )
    try:
        missing = importlib.util.find_spec("huggingface_hub") is None
    except ValueError:  # The module is set to None in sys.modules.
        missing = True
    if missing:
        raise errors.CheckpointError(
            f"{reference}: needs huggingface_hub; {install_command('hf')}, or give a directory"
        )
