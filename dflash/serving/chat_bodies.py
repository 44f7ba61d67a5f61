"""JSON bodies of chats: messages, tools, and reasoning."""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from dflash import errors
from dflash.config.schema import MAX_TOKENS
from dflash.serving.bodies import Body, NumLogprobs, OpenAIBody, TokenizeOptions, listed
from dflash.serving.validation import Text, check_unicode, invalid, only
from dflash.text import jsonl

MAX_TOOLS = 512
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
ThinkingLimit = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Tools that an answer may call.

    Attributes:
      allowed: Whether it may call any.
      required: Whether it must call one.
      name: Name of the only function that it may call; None for all.
    """

    allowed: bool = True
    required: bool = False
    name: str | None = None


AUTO = ToolChoice()
_CHOICES = {"none": ToolChoice(allowed=False), "auto": AUTO, "required": ToolChoice(required=True)}


def _text_parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": check_unicode(content)}]
    return listed(content)


def _arguments(value: Any) -> dict[str, Any]:
    """Parses the arguments of a call in a message, which templates expect as an object."""
    if isinstance(value, str):
        try:
            value = jsonl.parse_json(value) if value.strip() else {}
        except errors.InputError as error:
            raise invalid(str(error)) from error
    if not isinstance(value, dict):
        raise invalid(f"expected a JSON object; got {jsonl.quote(value)}")
    return value


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments, which are an object."""
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid(f'type: expected "object"; got {jsonl.quote(kind)}')
    for name, expected in {"properties": dict, "required": list}.items():
        if not isinstance(schema.get(name, expected()), expected):
            kind = "an object" if expected is dict else "a list"
            raise invalid(f"{name}: expected {kind}; got {jsonl.quote(schema[name])}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise invalid("required: expected a list of names")
    return schema | {"type": "object"}


def _choice(value: Any) -> ToolChoice:
    if isinstance(value, str) and value in _CHOICES:
        return _CHOICES[value]
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if value != {"type": "function", "function": {"name": name}} or not isinstance(name, str):
        expected = '"none", "auto", "required", or an object that names a function'
        raise invalid(f"expected {expected}; got {jsonl.quote(value)}")
    return ToolChoice(required=True, name=name)


class Function(Body):
    """Function that a model may call."""

    name: FunctionName
    description: Text = ""
    parameters: Annotated[dict[str, Any], AfterValidator(_parameters)] = _NO_ARGUMENTS
    strict: bool = False


class ToolBody(Body):
    """Tool of OpenAI's chats; only functions are supported."""

    type: only("function") = "function"
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Returns the tool in the form that chat templates expect."""
        function = self.function.model_dump(exclude={"strict"})
        return {"type": "function", "function": function}


class CalledFunction(Body):
    """Function call in a message."""

    name: Text
    arguments: Annotated[Any, AfterValidator(_arguments)] = Field(default_factory=dict)
    parsed_arguments: Any = None  # The openai package adds it to answers, which come back.


class ToolCall(Body):
    """Tool call in an assistant's message."""

    id: Text = None
    type: only("function") = "function"
    function: CalledFunction
    index: Any = None  # Streams have it; the order of the list is the same.

    def for_template(self) -> dict[str, Any]:
        """Returns the call in the form that chat templates expect."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": function}


def _text_type(value: Any) -> Any:
    if value == "text":
        return value
    raise invalid(f'only "text" is supported, not {jsonl.quote(value)}', "unsupported")


class TextPart(Body):
    """Part of a message's content; other parts than text are not supported."""

    type: Annotated[Any, AfterValidator(_text_type)]
    text: Text


class Message(Body):
    """Message of a conversation, whose content is a text or a list of texts."""

    role: Text
    content: Annotated[list[TextPart], pydantic.FailFast(), BeforeValidator(_text_parts)]
    name: Text = None
    reasoning_content: Text = None
    tool_calls: Annotated[list[ToolCall], pydantic.FailFast(), Field(max_length=MAX_TOOLS)] = ()
    tool_call_id: Text = None
    parsed: Any = None  # The openai package adds it to answers, which come back.

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_empty_lists(cls, values: Any) -> Any:
        """Drops fields such as `"tool_calls": []` of responses that clients send back."""
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if value not in ([], None)}
        # A message with calls needs no content.
        return {"content": []} | values if "tool_calls" in values else values

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        content = "\n".join(part.text for part in self.content)
        message = self.model_dump(exclude_unset=True, exclude={"parsed"}) | {"content": content}
        if self.tool_calls:
            calls = [call.for_template() for call in self.tool_calls]
            message |= {"tool_calls": calls, "content": content or None}
        return message


class ChatPromptBody(Body):
    """Fields that determine a chat prompt."""

    tools: Annotated[list[ToolBody], pydantic.FailFast(), Field(max_length=MAX_TOOLS)] = ()
    tool_choice: Annotated[Any, AfterValidator(_choice)] = AUTO
    enable_thinking: bool = None
    reasoning_effort: Effort = None
    messages: Annotated[list[Message], pydantic.FailFast(), Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True


class ChatBody(OpenAIBody, ChatPromptBody):
    """Body of /v1/chat/completions."""

    logprobs: bool = False
    top_logprobs: NumLogprobs = None
    modalities: only(["text"]) = None
    parallel_tool_calls: bool = True
    max_thinking_tokens: ThinkingLimit = None
    thinking_budget: ThinkingLimit = None
    thinking_token_budget: ThinkingLimit = None
    include_reasoning: bool = True


class TokenizeChatBody(TokenizeOptions, ChatPromptBody):
    """Body of vLLM's /tokenize with a conversation."""
