"""Form of messages that a chat template reads.

Templates differ in the name of an answer's reasoning, in whether the arguments of a call are an
object or its JSON text, and in what they expect of a call without text. The form of a template is
found by its source and by rendering a short conversation.
"""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dflash import errors
from dflash.text import jsonl

_QUESTION = {"role": "user", "content": "a"}
_ARGUMENTS = {"probe": "5d41402a"}  # text that no template contains
_CALL = {  # Some templates demand ids of nine characters.
    "id": "call00000",
    "type": "function",
    "function": {"name": "f", "arguments": _ARGUMENTS},
}
_ANSWER = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "b"}
_PROPERTIES = {"probe": {"type": "string", "description": "c"}}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["probe"]},
        },
    }
]
Render = Callable[[list[Mapping[str, Any]]], str]


@dataclasses.dataclass(frozen=True)
class MessageForm:
    """Form of messages that a chat template reads.

    Attributes:
      reasoning: Name of the field for the reasoning of an answer; "content" if it is a part of
        that.
      reasons_beside_text: Whether an answer with calls may have reasoning and a text.
      arguments_are_text: Whether the arguments of calls are JSON text.
      no_text: Content of an answer with calls and without a text.
    """

    reasoning: str = jsonl.REASONING_FIELDS[0]
    reasons_beside_text: bool = True
    arguments_are_text: bool = False
    no_text: str | None = ""

    def apply(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message, as `jsonl.normalized` returns it, in this form."""
        message = dict(message)
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
        return {**call, "function": function} if "function" in call else function


def form_of(fields_read: set[str], render: Render) -> MessageForm:
    """Returns the form of a template: the first one in which it renders a call as JSON would be.

    Args:
      render: Renders messages; raises InputError if the template rejects them.
    """
    names = [name for name in jsonl.REASONING_FIELDS if name in fields_read]
    names += ["content"] if "thinking" in names else []
    defaults = [MessageForm(name) for name in names] or [MessageForm()]
    default = next((form for form in defaults if _shows_reasoning(form, render)), defaults[0])
    form = next((form for form in _forms(default) if _shows_call(form, render)), default)
    answer = _ANSWER | {"content": "e"}
    reasoned = answer | {jsonl.REASONING_FIELDS[0]: "g"}
    shows, shows_both = (_rendered(form.apply(message), render) for message in (answer, reasoned))
    return dataclasses.replace(form, reasons_beside_text=shows is None or shows_both is not None)


def _forms(default: MessageForm) -> Iterator[MessageForm]:
    for no_text, arguments_are_text in itertools.product(("", None), (False, True)):
        yield dataclasses.replace(default, arguments_are_text=arguments_are_text, no_text=no_text)


def _shows_call(form: MessageForm, render: Render) -> bool:
    text = _rendered(form.apply(_ANSWER), render) or ""
    return _ARGUMENTS["probe"] in text and str(_ARGUMENTS) not in text


def _shows_reasoning(form: MessageForm, render: Render) -> bool:
    answer = {"role": "assistant", "content": "e", jsonl.REASONING_FIELDS[0]: _ARGUMENTS["probe"]}
    text = _rendered(form.apply(answer), render, ()) or ""
    return _ARGUMENTS["probe"] in text and "'thinking'" not in text


def _rendered(
    answer: Mapping[str, Any], render: Render, following: Sequence[Any] = (_RESULT,)
) -> str | None:
    try:
        return render([_QUESTION, answer, *following])
    except errors.InputError:
        return None
