"""Chat templates, which render conversations as the text that a checkpoint was trained on.

Templates differ in the name of an answer's reasoning, in whether the arguments of a call are an
object or its JSON text, in what they expect of a call without text, in the ids and results that
they accept, and in whether they know developers. The form of a template is found by its source and
by rendering short conversations.
"""

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.config import encoding
from dflash.storage.files import read_regular
from dflash.text import jsonl, tool_declarations

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[list[Mapping[str, Any]]], str]

TOKENIZER_CONFIG = "tokenizer_config.json"
NAMED_TEMPLATES = "additional_chat_templates"  # directory of templates such as tool_use.jinja
# Fields whose form depends on the template.
_FORMED = {"tool_calls", "reasoning_content", "tool_call_id"}
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
NO_EFFORT = ("none",)  # values of reasoning_effort that turn reasoning off
_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_QUESTION = {"role": "user", "content": "a"}
_ARGUMENTS = {"probe": "5d41402a"}  # text that no template contains
_CALL = {  # Some templates demand ids of nine characters.
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": _ARGUMENTS},
}
_ANSWER = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_LONG_ID = "call_5d41402a"
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "b"}
_PROPERTIES = {"probe": {"type": "string", "description": "c"}}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["probe"]},
        },
    }
]


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """Form of messages that a chat template reads.

    Attributes:
      reasoning: Name of the field for the reasoning of an answer; "content" if it is a part of
        that.
      reasons_beside_text: Whether an answer with calls may have reasoning and a text.
      arguments_are_text: Whether the arguments of calls are JSON text.
      no_text: Content of an answer with calls and without a text.
      has_short_ids: Whether ids of calls must be nine letters and digits, as Mistral's are.
      has_results_inside: Whether an answer has the results of its calls, in `tool_responses`.
      developer: Role of a developer's messages.
    """

    reasoning: str = jsonl.REASONING_FIELDS[0]
    reasons_beside_text: bool = True
    arguments_are_text: bool = False
    no_text: str | None = ""
    has_short_ids: bool = False
    has_results_inside: bool = False
    developer: str = "developer"

    def apply_all(self, messages: Messages) -> list[dict[str, Any]]:
        """Returns messages, as `jsonl.normalized` returns them, in this form."""
        formed: list[dict[str, Any]] = []
        for message in map(self.apply, messages):
            if self.has_results_inside and message["role"] == "tool" and formed:
                name = _called_name(message, formed[-1])
                result = {"name": name, "response": message["content"]}
                formed[-1].setdefault("tool_responses", []).append(result)
            else:
                formed.append(message)
        return formed

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message, as `jsonl.normalized` returns it, in this form."""
        message = dict(message)
        if message.get("role") == "developer":
            message["role"] = self.developer
        if self.has_short_ids and isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _short_id(message["tool_call_id"])
        reasoning = message.pop(jsonl.REASONING_FIELDS[0], None)
        if message.get("tool_calls"):
            message["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if message["content"] and not self.reasons_beside_text:
                reasoning = None
            message["content"] = message["content"] or self.no_text
        if reasoning and self.reasoning == "content":
            texts = [{"type": "text", "text": message["content"]}] if message["content"] else []
            reasoning = [{"type": "thinking", "thinking": reasoning}, *texts]
        return message | ({self.reasoning: reasoning} if reasoning else {})

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        arguments = function.get("arguments")
        if not self.arguments_are_text:
            arguments = jsonl.parse_arguments(arguments)
        elif not isinstance(arguments, str) or not arguments.strip():
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        function = {**function, "arguments": arguments}
        if self.has_short_ids and isinstance(call.get("id"), str):
            call = {**call, "id": _short_id(call["id"])}
        return {**call, "function": function} if "function" in call else function


class ChatTemplate:
    """Jinja template of a checkpoint, from a file of its own or tokenizer_config.json."""

    def __init__(self, directory: pathlib.Path, variables: Mapping[str, Any], date: datetime.date):
        """Stores the arguments; the template is read when it is first rendered."""
        self._directory = directory
        self._variables = dict(variables)
        self._date = date
        self._forms: dict[bool, MessageForm] = {}

    def formed(self, messages: Messages, *, tools: bool) -> list[dict[str, Any]]:
        """Returns normalized messages in the form of the template, which may be one for tools."""
        messages = [jsonl.normalized(message) for message in messages]
        if not any(
            message.keys() & _FORMED or message.get("role") == "developer" for message in messages
        ):
            return messages
        if tools not in self._forms:
            self._forms[tools] = self._find_form(tools)
        return self._forms[tools].apply_all(messages)

    def _find_form(self, tools: bool) -> MessageForm:
        from dflash.text import template_sandbox  # Imported late, since jinja2 takes time.

        _, source = self._with_tools if tools else self._default
        render = functools.partial(self.render, tools=_TOOLS if tools else None)
        return _form_of(template_sandbox.fields_read(source, self._date), render)

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation as text.

        Args:
          add_generation_prompt: Whether to end with the text that begins an answer.
          **variables: Variables that replace those of the constructor.
        """
        path, source = self._with_tools if variables.get("tools") else self._default
        if variables.get("tools") and not self._shows_joined:
            variables["tools"] = [tool_declarations.simplified(tool) for tool in variables["tools"]]
        variables = {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            # Templates test these for None, as transformers always defines them.
            "tools": None,
            "documents": None,
            **self._variables,
            **thinking_variables(self._variables),
            **thinking_variables(variables),
            **variables,
        }
        try:
            return self._rendered(source, variables)
        except errors.InputError as error:
            reason = first_line(error)
            if self._always_thinks(source, variables):
                reason += " (enable_thinking is false: leave it and prompts.thinking unset)"
            raise errors.InputError(f"{path}: chat template fails: {reason}") from error

    @functools.cached_property
    def _shows_joined(self) -> bool:
        """True if the template shows schemas that are joined of others."""
        joined = {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}]}}}
        tool = {"name": "f", "description": "", "parameters": joined}
        variables = {**self._variables, "messages": [_QUESTION], "add_generation_prompt": True}
        variables |= {"tools": [{"type": "function", "function": tool}], "documents": None}
        with contextlib.suppress(errors.InputError):
            return "integer" in self._rendered(self._with_tools[1], variables).lower()
        return True

    def _rendered(self, source: str, variables: Mapping[str, Any]) -> str:
        from dflash.text import template_sandbox  # Imported late, since jinja2 takes time.

        return template_sandbox.render(source, self._date, variables)

    def _always_thinks(self, source: str, variables: Mapping[str, Any]) -> bool:
        """Returns whether the template fails only because reasoning is turned off."""
        if variables.get("enable_thinking") is not False:
            return False
        remaining = variables.keys() - {"enable_thinking", "thinking"}
        with contextlib.suppress(errors.InputError):
            return bool(self._rendered(source, {name: variables[name] for name in remaining}))
        return False

    @property
    def exists(self) -> bool:
        """Returns whether the checkpoint has a template, which may still be unusable."""
        return "default" in self._named

    @property
    def source(self) -> str:
        """Text of the template for conversations with tools; "" if there is none."""
        return self._with_tools[1] if self.exists else ""

    @property
    def sources(self) -> dict[str, str]:
        """Texts of the templates by name, such as "default" and "tool_use"."""
        return {name: text for name, (_, text) in self._named.items()}

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


def thinking_variables(variables: Mapping[str, Any]) -> dict[str, bool]:
    """Returns the variables that turn reasoning on or off, under each name that templates read."""
    effort = variables.get("reasoning_effort")
    asked = None if effort is None else effort not in NO_EFFORT
    value = variables.get("enable_thinking", variables.get("thinking", asked))
    return {"enable_thinking": value, "thinking": value} if isinstance(value, bool) else {}


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
    return read_json(directory / TOKENIZER_CONFIG)


def named_tokens(directory: pathlib.Path) -> dict[str, Any]:
    """Returns the fields that name special tokens.

    As in transformers, special_tokens_map.json counts only beside a tokenizer_config.json without
    `added_tokens_decoder`, and then takes precedence; lists are joined.
    """
    config = tokenizer_config(directory)
    if "added_tokens_decoder" in config:
        return config
    named = read_json(directory / "special_tokens_map.json")
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


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Returns the object in a file; empty if the file is missing."""
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


def _form_of(fields_read: set[str], render: Render) -> MessageForm:
    """Returns the form of a template: the first one in which it renders a call as JSON would be.

    Of no text and no content, the one that it renders without "None" or an empty answer counts.

    Args:
      render: Renders messages; raises InputError if the template rejects them.
    """
    names = [name for name in jsonl.REASONING_FIELDS if name in fields_read]
    names += ["content"] if "thinking" in names else []
    defaults = [MessageForm(name) for name in names] or [MessageForm()]
    default = next((form for form in defaults if _shows_reasoning(form, render)), defaults[0])
    forms = [form for form in _forms(default) if _shows_call(form, render)]
    form = min(forms, key=functools.partial(_extent, render=render), default=default)
    answer = _ANSWER | {"content": "e"}
    reasoned = answer | {jsonl.REASONING_FIELDS[0]: "g"}
    shows, shows_both = (_rendered(form.apply(message), render) for message in (answer, reasoned))
    inside = dataclasses.replace(form, has_results_inside=True)
    return dataclasses.replace(
        form,
        reasons_beside_text=shows is None or shows_both is not None,
        has_short_ids=_shows_call(form, render) and not _shows_call(form, render, _LONG_ID),
        has_results_inside="tool_responses" in fields_read
        and _shows_results(inside, render) != _shows_results(form, render),
        developer="developer" if _shows_developer(render) else "system",
    )


def _forms(default: MessageForm) -> Iterator[MessageForm]:
    for no_text, arguments_are_text in itertools.product(("", None), (False, True)):
        yield dataclasses.replace(default, arguments_are_text=arguments_are_text, no_text=no_text)


def _shows_call(form: MessageForm, render: Render, id: str = _CALL["id"]) -> bool:
    answer = form.apply(_ANSWER | {"tool_calls": [_CALL | {"id": id}]})
    text = _rendered(answer, render, [_RESULT | {"tool_call_id": id}]) or ""
    return _ARGUMENTS["probe"] in text and str(_ARGUMENTS) not in text


def _extent(form: MessageForm, render: Render) -> tuple[bool, int]:
    return form.arguments_are_text, len(_rendered(form.apply(_ANSWER), render))


def _shows_results(form: MessageForm, render: Render) -> str | None:
    answer, *following = form.apply_all([_ANSWER, _RESULT])
    return _rendered(answer, render, following)


def _shows_developer(render: Render) -> bool:
    developer = {"role": "developer", "content": _ARGUMENTS["probe"]}
    try:
        return _ARGUMENTS["probe"] in render([developer, _QUESTION])
    except errors.InputError:
        return False


def _shows_reasoning(form: MessageForm, render: Render) -> bool:
    answer = {"role": "assistant", "content": "e", jsonl.REASONING_FIELDS[0]: _ARGUMENTS["probe"]}
    text = _rendered(form.apply(answer), render, ()) or ""
    return _ARGUMENTS["probe"] in text and "'thinking'" not in text


def _called_name(result: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
    """Returns the name of the function whose result a message is."""
    calls = answer.get("tool_calls", ())
    names = {call.get("id"): call.get("function", call).get("name") for call in calls}
    return names.get(result.get("tool_call_id"), result.get("name"))


def _short_id(id: str) -> str:
    if _SHORT_ID.fullmatch(id):
        return id
    return hashlib.sha256(id.encode()).hexdigest()[:9]


def _rendered(
    answer: Mapping[str, Any], render: Render, following: Sequence[Any] = (_RESULT,)
) -> str | None:
    try:
        return render([_QUESTION, answer, *following])
    except errors.InputError:
        return None
