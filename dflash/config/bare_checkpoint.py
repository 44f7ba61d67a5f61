"""Configs of a checkpoint alone, for commands that decode."""

import pathlib

from dflash.config import merging
from dflash.config.strict_yaml import Node
from dflash.storage import hub
from dflash.storage.paths import in_bucket, to_path


def is_checkpoint(path: str | pathlib.Path) -> bool:
    """Returns whether CONFIG names a checkpoint: hf:org/name, or a directory with a config.json.

    A directory with a config.yml is that of a run.
    """
    directory = to_path(path) if in_bucket(path) else pathlib.Path(path)
    model, run = (merging.exists(directory / name) for name in ("config.json", "config.yml"))
    return str(path).startswith(hub.PREFIX) or (model and not run)


def checkpoint_layer(path: str | pathlib.Path) -> Node:
    """Returns the config of a checkpoint alone: the target, without a drafter."""
    source = str(path)
    target = Node({"checkpoint": Node(source, source, source)}, source)
    chat = Node({"chat": Node(None, source)}, source)  # Prompts use the template if there is one.
    return Node({"target": target, "prompts": chat}, source)
