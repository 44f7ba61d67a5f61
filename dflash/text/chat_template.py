"""Chat templates: conversations as the text that a checkpoint was trained on."""

import datetime
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from dflash import errors

Messages = Sequence[Mapping[str, Any]]

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A checkpoint's Jinja template: chat_template.jinja, else in tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, special_tokens: Mapping[str, Any]):
        self._directory = directory
        self._special_tokens = dict(special_tokens)
        self._compiled = None

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, up to where the answer begins unless asked otherwise.

        Raises:
          InputError: there is no template, or it refuses.
        """
        import jinja2

        source, text = self._source
        try:
            self._compiled = self._compiled or _environment().from_string(text)
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            reason = first_line(error)
            raise errors.InputError(f"{source}: chat template fails: {reason}") from error
        except (TypeError, ValueError, LookupError, AttributeError) as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise errors.InputError(f"{source}: chat template fails: {reason}") from error

    @functools.cached_property
    def _source(self) -> tuple[pathlib.Path, str]:
        path = self._directory / "chat_template.jinja"
        if path.exists():
            return path, path.read_text(encoding="utf-8")
        path = self._directory / "tokenizer_config.json"
        template = tokenizer_config(self._directory).get("chat_template")
        if isinstance(template, list):  # several, by name
            named = {entry["name"]: entry["template"] for entry in template}
            template = named.get("default")
        if not isinstance(template, str):
            raise errors.InputError(
                f"{self._directory}: no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); give plain text prompts or prompt_ids"
            )
        return path, template


def _environment():
    """The names and settings that templates on the Hugging Face hub are written for.

    Templates are other people's code: they run in jinja2's sandbox.
    Source: transformers, `utils/chat_template_utils.py`.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks the answer for training; here its body is all that counts."""

        tags = frozenset({"generation"})

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        # jinja2's own filter escapes <, > and & for HTML.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def raise_exception(message):
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


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
    """What tokenizer_config.json says; empty where there is none."""
    return _read_json(directory / "tokenizer_config.json")


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise errors.InputError(f"{path}: not valid JSON") from error
    if not isinstance(content, dict):
        raise errors.InputError(f"{path}: expected a JSON object")
    return content


def first_line(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).partition("\n")[0]
