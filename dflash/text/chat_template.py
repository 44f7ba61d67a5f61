"""Chat templates, which render conversations as the text that a checkpoint was trained on."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config import encoding
from dflash.storage.files import read_regular
from dflash.text import template_process

Messages = Sequence[Mapping[str, Any]]

TOKENIZER_CONFIG = "tokenizer_config.json"
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Jinja template of a checkpoint, from chat_template.jinja or tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        """Stores the arguments; the template is read when it is first rendered.

        Args:
          directory: Directory of the checkpoint.
          variables: Variables of the template, such as those of `special_tokens`.
          date: Date that the template may print.
        """
        self._directory = directory
        self._variables = dict(variables)
        self._date = date

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation as text.

        Args:
          messages: Messages with "role" and "content".
          add_generation_prompt: Whether to end with the text that begins an answer.
          **variables: Variables that replace those of the constructor.
        Raises:
          InputError: The template is missing, fails, or exceeds a limit of its process.
          UserError: The process that renders was ended from outside.
        """
        path, source = self._tool_use if variables.get("tools") else self._source
        given = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            # Templates test these for None, as transformers always defines them.
            "tools": None,
            "documents": None,
        }
        try:
            return template_process.render(source, self._date, given | self._variables | variables)
        except errors.InputError as error:
            reason = first_line(error)
            raise errors.InputError(f"{path}: chat template fails: {reason}") from error

    @property
    def exists(self) -> bool:
        """Returns whether the checkpoint has a template, which may still be unusable."""
        return self._stored is not None

    @property
    def source(self) -> str:
        """Text of the template for conversations with tools; "" if there is none."""
        return self._tool_use[1] if self.exists else ""

    @property
    def _tool_use(self) -> tuple[pathlib.Path, str]:
        path, source = self._source
        return path, self._named.get("tool_use", source)

    @property
    def _source(self) -> tuple[pathlib.Path, str]:
        if self._stored is None:
            raise errors.InputError(
                f"{self._directory}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give plain text prompts or prompt_ids"
            )
        return self._stored

    @functools.cached_property
    def _stored(self) -> tuple[pathlib.Path, str] | None:
        path = self._directory / "chat_template.jinja"
        if path.exists():
            return path, _read(path)
        if "default" not in self._named:
            return None
        return self._directory / TOKENIZER_CONFIG, self._named["default"]

    @functools.cached_property
    def _named(self) -> dict[str, str]:
        """Templates of tokenizer_config.json by name."""
        template = tokenizer_config(self._directory).get("chat_template")
        entries = template if isinstance(template, list) else [{"template": template}]
        entries = [{"name": "default"} | entry for entry in entries if isinstance(entry, dict)]
        return {
            entry["name"]: entry["template"]
            for entry in entries
            if isinstance(entry.get("template"), str) and isinstance(entry["name"], str)
        }


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
    """Returns the spellings of bos_token, eos_token etc. by name, which templates refer to."""
    config = named_tokens(directory)
    tokens = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def tokenizer_config(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the content of tokenizer_config.json; empty if the file is missing."""
    return _read_json(directory / TOKENIZER_CONFIG)


def named_tokens(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the fields that name special tokens.

    Those of tokenizer_config.json take precedence over special_tokens_map.json.
    """
    return _read_json(directory / "special_tokens_map.json") | tokenizer_config(directory)


def _read(path: pathlib.Path) -> str:
    try:
        return encoding.decode(read_regular(path))
    except errors.InputError as error:
        raise errors.InputError(f"{path}: {error}") from error
    except OSError as error:
        raise errors.InputError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise errors.InputError(f"{path}: not valid JSON") from error
    if not isinstance(content, dict):
        raise errors.InputError(f"{path}: expected a JSON object")
    return content


def first_line(error: Exception) -> str:
    """Returns the first line of the message of an error."""
    return str(error).partition("\n")[0]
