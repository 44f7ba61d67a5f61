"""Directory of a GGUF file's model: its config and tokenizer as files, and a link to its weights.

    ~/.cache/dflash/gguf/SmolLM2-135M-Instruct.Q4_1-5c1f0d9a3b2e/
        config.json, generation_config.json      architecture, ids that end an answer
        tokenizer.json or tokenizer.model        tokenizer
        tokenizer_config.json                    special tokens, chat template
        model.gguf -> /data/SmolLM2-135M-Instruct.Q4_1.gguf

A chat_template.jinja beside the file takes the place of the file's template, as in a checkpoint.
So only the reading of weights depends on the format; everything else sees a checkpoint directory.
"""

import hashlib
import json
import os
import pathlib
import secrets

from dflash.checkpoints.files import CONFIG
from dflash.checkpoints.gguf import file_header, kinds, tokenizer_files
from dflash.checkpoints.gguf.file_header import GgufHeader
from dflash.checkpoints.gguf.hf_tensors import WEIGHTS
from dflash.storage import files, paths

SUFFIX, CHAT_TEMPLATE = ".gguf", "chat_template.jinja"

_LAYOUT_VERSION = 2  # Counts changes of what the directory holds.


def open_file(file: pathlib.Path) -> pathlib.Path:
    """Returns the directory of a GGUF file's model, and creates it if it is missing."""
    file = pathlib.Path(os.path.abspath(file))
    header = file_header.read_header(file)
    directory = _directory(file)
    if not (directory / CONFIG).exists():
        contents = _contents(header)
        with files.explained(directory):
            _write(directory, file, contents)
    return directory


def _directory(file: pathlib.Path) -> pathlib.Path:
    status, has_template = file.stat(), file.with_name(CHAT_TEMPLATE).exists()
    state = _LAYOUT_VERSION, str(file), status.st_size, status.st_mtime_ns, has_template
    digest = hashlib.sha256(repr(state).encode()).hexdigest()[:12]
    return paths.cache_directory("gguf") / f"{file.stem}-{digest}"


def _contents(header: GgufHeader) -> dict[str, bytes]:
    """Returns the content of each file in the directory, config.json last."""
    tokenizer = tokenizer_files.of_file(header)
    ends = {"eos_token_id": list(tokenizer.end_ids())}
    config = kinds.of_file(header).config_of(header) | ends
    licence = header.metadata.get("general.license")
    # The licence stands in README.md as in the model cards of the hub.
    card = {} if licence is None else {"README.md": f"---\nlicense: {licence}\n---\n".encode()}
    return {
        **tokenizer.files(),
        "generation_config.json": json.dumps(ends).encode(),
        **card,
        CONFIG: json.dumps(config, indent=2).encode(),
    }


def _write(directory: pathlib.Path, file: pathlib.Path, contents: dict[str, bytes]) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    staged = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    try:
        staged.mkdir()
        (staged / WEIGHTS).symlink_to(file)
        if (template := file.with_name(CHAT_TEMPLATE)).exists():
            (staged / CHAT_TEMPLATE).symlink_to(template)
        for name, content in contents.items():
            files.write_whole(staged / name, content)
        with files.waiting_lock(directory.parent / ".lock"):
            if not (directory / CONFIG).exists():
                files.publish(staged, directory, CONFIG)
    finally:
        files.remove_tree(staged)
