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

Messages = Sequence[Mapping[str, Any]]

TOKENIZER_CONFIG = "tokenizer_config.json"
NAMED_TEMPLATES = "additional_chat_templates"  # directory of templates such as tool_use.jinja
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Jinja template of a checkpoint, from a file of its own or tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        """Stores the arguments; the template is read when it is first rendered."""
        self._directory = directory
        self._variables = dict(variables)
        self._date = date

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation as text.

        Args:
          add_generation_prompt: Whether to end with the text that begins an answer.
          **variables: Variables that replace those of the constructor.
        """
        path, source = self._with_tools if variables.get("tools") else self._default
        defaults = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            # Templates test these for None, as transformers always defines them.
            "tools": None,
            "documents": None,
        }
        from dflash.text import template_sandbox  # Imported late, since jinja2 takes time.

        try:
            variables = defaults | self._variables | variables
            return template_sandbox.render(source, self._date, variables)
        except errors.InputError as error:
            reason = first_line(error)
            raise errors.InputError(f"{path}: chat template fails: {reason}") from error

    @property
    def exists(self) -> bool:
        """Returns whether the checkpoint has a template, which may still be unusable."""
        return "default" in self._named

    @property
    def source(self) -> str:
        """Text of the template for conversations with tools; "" if there is none."""
        return self._with_tools[1] if self.exists else ""

    @property
    def _with_tools(self) -> tuple[pathlib.Path, str]:
        return self._named.get("tool_use", self._default)

    @property
    def _default(self) -> tuple[pathlib.Path, str]:
        if not self.exists:
            raise errors.InputError(
                f"{self._directory}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give plain text prompts or prompt_ids"
            )
        return self._named["default"]

    @functools.cached_property
    def _named(self) -> dict[str, tuple[pathlib.Path, str]]:
        """Templates by name, each with its file.

        As in transformers, those of tokenizer_config.json count only where there are no others.
        """
        return self._in_files() or self._in_config()

    def _in_files(self) -> dict[str, tuple[pathlib.Path, str]]:
        paths = {path.stem: path for path in (self._directory / NAMED_TEMPLATES).glob("*.jinja")}
        if (default := self._directory / "chat_template.jinja").exists():
            paths["default"] = default
        return {name: (path, _read(path)) for name, path in paths.items()}

    def _in_config(self) -> dict[str, tuple[pathlib.Path, str]]:
        template = tokenizer_config(self._directory).get("chat_template")
        entries = template if isinstance(template, list) else [{"template": template}]
        entries = [{"name": "default"} | entry for entry in entries if isinstance(entry, dict)]
        return {
            entry["name"]: (self._directory / TOKENIZER_CONFIG, entry["template"])
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

    As in transformers, special_tokens_map.json counts only beside a tokenizer_config.json without
    `added_tokens_decoder`, and then takes precedence; lists are joined.
    """
    config = tokenizer_config(directory)
    if "added_tokens_decoder" in config:
        return config
    named = _read_json(directory / "special_tokens_map.json")
    for name, tokens in named.items():
        first = config.get(name)
        is_list = isinstance(tokens, list) and isinstance(first, list)
        config[name] = [*first, *tokens] if is_list else tokens
    return config


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
