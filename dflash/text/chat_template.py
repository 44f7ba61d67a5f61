"""Chat templates: conversations as the text that a checkpoint was trained on."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config import encoding

Messages = Sequence[Mapping[str, Any]]

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A checkpoint's Jinja template: chat_template.jinja, else in tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        """Reads nothing yet.

        Args:
          directory: directory of the checkpoint.
          variables: names that the template may use, such as those of `special_tokens`.
          date: what templates that print the date print.
        """
        self._directory = directory
        self._variables = dict(variables)
        self._date = date

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The conversation as text, up to where the answer begins unless asked otherwise.

        Args:
          messages: each with "role" and "content".
          add_generation_prompt: whether the answer is to begin where the text ends.
          **variables: in place of the template's own of these names.
        Raises:
          InputError: there is no template, or it fails, or exceeds a limit of `template_sandbox`.
        """
        from dflash.text import template_sandbox  # jinja2 only where a template is rendered

        source, _ = self._source
        try:
            return template_sandbox.render(
                self._template,
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._variables | variables,
            )
        except Exception as error:  # templates are other people's code, and may raise anything
            raise _failure(source, error) from error

    @functools.cached_property
    def _template(self) -> Any:
        from dflash.text import template_sandbox

        return template_sandbox.compile_source(self._source[1], self._date)

    @functools.cached_property
    def _source(self) -> tuple[pathlib.Path, str]:
        path = self._directory / "chat_template.jinja"
        if path.exists():
            return path, _read(path)
        path = self._directory / "tokenizer_config.json"
        template = tokenizer_config(self._directory).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = [one for one in template if isinstance(one, dict)]
            found = (one.get("template") for one in named if one.get("name") == "default")
            template = next(found, None)
        if not isinstance(template, str):
            raise errors.InputError(
                f"{self._directory}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give plain text prompts or prompt_ids"
            )
        return path, template


def special_tokens(directory: pathlib.Path) -> dict[str, str]:
    """Spelling of bos_token, eos_token and so on, which templates refer to."""
    config = _read_json(directory / "special_tokens_map.json") | tokenizer_config(directory)
    tokens = {}
    for name in _SPECIAL_NAMES:
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def tokenizer_config(directory: pathlib.Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty where there is none."""
    return _read_json(directory / "tokenizer_config.json")


def _failure(source: pathlib.Path, error: Exception) -> errors.InputError:
    import jinja2

    reason = first_line(error)
    if not isinstance(error, jinja2.TemplateError):
        reason = f"{type(error).__name__}: {reason}"
    return errors.InputError(f"{source}: chat template fails: {reason}")


def _read(path: pathlib.Path) -> str:
    try:
        return encoding.decode(path.read_bytes())
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
    """The first line of an error's message."""
    return str(error).partition("\n")[0]
