"""JSON bodies of the endpoints, as pydantic models.

Unknown fields are errors. A field that is null counts as absent, as in OpenAI's API. Fields that
clients send although the server does not implement them accept `only` the values that leave the
output unchanged. `completion_request` makes the checks that need the tokenizer.
"""

import dataclasses
import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from dflash import errors
from dflash.config.schema import FLOAT32_MAX, INT32_MAX, MAX_TOKENS, SamplingConfig
from dflash.inference.request import MAX_BIASED, MAX_LOGPROBS
from dflash.serving.structured_output import StructuredOutput
from dflash.serving.validation import RequestError, Text, check_unicode, invalid, only
from dflash.text import jsonl
from dflash.text.grammar import Kind

MAX_CHOICES = 128  # Outputs of one HTTP request, over all of its prompts.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_SALT_CHARACTERS = 1000
MAX_BAD_WORDS = 300
MAX_FIELDS = 100  # Fields of a JSON object that the server reads.
MAX_TOOLS = 512
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _check_stops(stops: list[str]) -> list[str]:
    if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(f"expected strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _at_most(maximum: int, what: str) -> Callable[[Any], Any]:
    """Returns a validator that rejects large objects before pydantic notes an error per item."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > maximum:
            raise invalid(f"expected at most {maximum} {what}")
        return value

    return check


def listed(value: Any) -> list[Any]:
    """Wraps a string in a list, and returns a list unchanged."""
    if not isinstance(value, str | list):
        raise invalid(f"expected a string or a list; got {jsonl.quote(value)}")
    return [value] if isinstance(value, str) else value


def _sampling(name: str) -> Any:
    """Returns the type of a sampling parameter, with the bounds of `SamplingConfig`."""
    field = SamplingConfig.__dataclass_fields__[name]
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if high is None:
        high = FLOAT32_MAX if field.type is float else INT32_MAX
    return Annotated[field.type, Field(ge=low, le=high)]


def _schema_text(schema: Any) -> str:
    if isinstance(schema, str):
        try:
            schema = jsonl.parse_json(schema)
        except errors.InputError as error:
            raise invalid(str(error)) from error
    if not isinstance(schema, dict):
        raise invalid(f"expected an object; got {jsonl.quote(schema)}")
    return json.dumps(schema, ensure_ascii=False)


def _constraint(kind: Kind, param: str) -> Any:
    """Returns the type of a field that becomes a `StructuredOutput`; a schema may be its text."""
    source = Annotated[Any, AfterValidator(_schema_text)] if kind == "json_schema" else Text
    return Annotated[source, AfterValidator(lambda text: StructuredOutput(kind, text, param))]


Stops = Annotated[
    list[Text],
    pydantic.FailFast(),
    BeforeValidator(listed),
    Field(max_length=MAX_STOPS),
    AfterValidator(_check_stops),
]
BadWords = Annotated[
    list[Text], pydantic.FailFast(), Field(max_length=MAX_BAD_WORDS), AfterValidator(_check_stops)
]
Limit = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Minimum = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[str, Bias | None], BeforeValidator(_at_most(MAX_BIASED, "tokens"))]
CacheSalt = Annotated[Text, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class Body(pydantic.BaseModel):
    """JSON object in which unknown fields are errors and null fields count as absent."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict):
            _at_most(MAX_FIELDS, "fields")(values)
            return {name: value for name, value in values.items() if value is not None}
        return values

    def constraints(self) -> list[StructuredOutput]:
        """Returns all constraints on the output, those of nested objects included."""
        nested = [value.constraints() for value in dict(self).values() if isinstance(value, Body)]
        values = [value for value in dict(self).values() if isinstance(value, StructuredOutput)]
        return sum(nested, values)


class SamplingBody(Body):
    """Fields that the generation endpoints of all dialects share.

    Attributes:
      LIMITS: Names of the fields for the maximum number of output tokens; all that are present
        must be equal.
      MINIMUM: Name of the field for the minimum number of output tokens.
      SEEDS: Names of the fields for the seed; all that are present must be equal.
    """

    LIMITS: ClassVar[tuple[str, ...]]
    MINIMUM: ClassVar[str]
    SEEDS: ClassVar[tuple[str, ...]]

    temperature: _sampling("temperature") = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] = None  # Both -1 and 0 turn it off.
    top_p: _sampling("top_p") = None
    min_p: _sampling("min_p") = None
    presence_penalty: _sampling("presence_penalty") = None
    frequency_penalty: _sampling("frequency_penalty") = None
    repetition_penalty: _sampling("repetition_penalty") = None
    seed: _sampling("seed") = None
    logit_bias: Biases = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops = ()
    stop_token_ids: Any = ()
    ignore_eos: bool = None
    skip_special_tokens: bool = True
    drafting: bool = True
    best_of: only(1) = None


class StreamOptions(Body):
    """OpenAI's stream_options."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: only(False) = None


class JsonSchema(Body):
    """OpenAI's response_format.json_schema."""

    schema_: _constraint("json_schema", "response_format.json_schema.schema") = Field(
        None, alias="schema"
    )
    name: Any = None
    description: Any = None
    strict: Any = None


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: only("text", "json_object", "json_schema") = "text"
    json_schema: JsonSchema = JsonSchema()

    def constraints(self) -> list[StructuredOutput]:
        if self.type == "json_object":
            return [StructuredOutput("json_object", "", "response_format")]
        if self.type == "json_schema" and self.json_schema.schema_ is None:
            param = "response_format.json_schema.schema"
            raise RequestError(f"{param}: required", param=param)
        return super().constraints() if self.type == "json_schema" else []


class StructuredOutputs(Body):
    """Field structured_outputs of vLLM."""

    json_: _constraint("json_schema", "structured_outputs.json") = Field(None, alias="json")
    regex: _constraint("regex", "structured_outputs.regex") = None
    grammar: _constraint("lark", "structured_outputs.grammar") = None
    json_object: bool = False
    disable_any_whitespace: only(False) = None

    def constraints(self) -> list[StructuredOutput]:
        json_object = StructuredOutput("json_object", "", "structured_outputs.json_object")
        return super().constraints() + [json_object] * self.json_object


class OpenAIBody(SamplingBody):
    """Fields that OpenAI's generation endpoints share, with vLLM's extensions."""

    MINIMUM, SEEDS = "min_tokens", ("seed",)

    model: Text = None
    min_tokens: Minimum = None
    allowed_token_ids: Any = None
    bad_words: BadWords = ()
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    cache_salt: CacheSalt = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    service_tier: only("auto", "default") = None
    store: only(False) = None
    metadata: Any = None
    user: Any = None


# Fields that messages of Anthropic and responses of OpenAI have as chats have them.
OF_CHATS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "stop_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "min_tokens"),
    *("stream", "cache_salt", "drafting", "priority", "chat_template_kwargs"),
    *("allowed_token_ids", "bad_words"),
)


class OutputBody(OpenAIBody):
    """Fields that OpenAI's completions and chats share."""

    LIMITS = ("max_completion_tokens", "max_tokens")

    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    include_stop_str_in_output: bool = False
    show_drafts: bool = False
    include_metrics: bool = False
    return_token_ids: bool = False
    prompt_logprobs: NumLogprobs = None
    response_format: ResponseFormat = ResponseFormat()
    guided_json: _constraint("json_schema", "guided_json") = None
    guided_regex: _constraint("regex", "guided_regex") = None
    guided_grammar: _constraint("lark", "guided_grammar") = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    length_penalty: only(1) = None
    metadata: only({}) = None
    use_beam_search: only(False) = None


class CompletionBody(OutputBody):
    """Body of /v1/completions."""

    prompt: Any
    add_special_tokens: bool = True
    echo: bool = False
    logprobs: NumLogprobs = None
    suffix: only("") = None


class TokenizeOptions(Body):
    """Fields of vLLM's /tokenize besides the prompt."""

    model: Text = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeTextBody(TokenizeOptions):
    """Body of vLLM's /tokenize with a text."""

    prompt: Text


class DetokenizeBody(Body):
    """Body of vLLM's /detokenize."""

    model: Text = None
    tokens: Any


class UpdateWeightsBody(Body):
    """Body of /update_weights."""

    path: Text


class SGLangSampling(SamplingBody):
    """SGLang's sampling_params."""

    LIMITS, MINIMUM, SEEDS = ("max_new_tokens",), "min_new_tokens", ("sampling_seed", "seed")

    max_new_tokens: Limit = None
    min_new_tokens: Minimum = None
    sampling_seed: _sampling("seed") = None
    json_schema: _constraint("json_schema", "sampling_params.json_schema") = None
    regex: _constraint("regex", "sampling_params.regex") = None
    ebnf: _constraint("lark", "sampling_params.ebnf") = None
    no_stop_trim: only(False) = None
    spaces_between_special_tokens: Any = None  # No supported tokenizer puts spaces there.


class GenerateBody(Body):
    """Body of SGLang's /generate."""

    text: Any = None
    input_ids: Any = None
    sampling_params: SGLangSampling = SGLangSampling()
    return_logprob: bool = False
    top_logprobs_num: NumLogprobs = 0
    stream: bool = False
    logprob_start_len: only(-1) = None
    lora_path: Text = None
    return_hidden_states: only(False) = None
    return_text_in_logprobs: Any = None  # Responses always contain the texts.
    log_metrics: Any = None
    cache_salt: CacheSalt = None
    image_data: only([]) = None
    rid: Any = None


@dataclasses.dataclass(frozen=True)
class ToolChoice:
    """Tools that an answer may call; `name` is the only one, and None stands for all."""

    allowed: bool = True
    required: bool = False
    name: str | None = None


AUTO = ToolChoice()
_CHOICES = {"none": ToolChoice(allowed=False), "auto": AUTO, "required": ToolChoice(required=True)}


def _text_parts(content: Any) -> list[Any]:
    """Returns the parts of a content, refusals of OpenAI's models as texts."""
    if isinstance(content, str):
        return [{"type": "text", "text": check_unicode(content)}]
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, dict) and part.get("type") == "refusal"
        else part
        for part in listed(content)
    ]


def _arguments(value: Any) -> Any:
    """Checks the arguments of a call in a message: an object or its text."""
    try:
        jsonl.parse_arguments(value)
    except errors.InputError as error:
        raise invalid(str(error)) from error
    return value


def _parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a function's arguments, which are an object."""
    kind = schema.get("type", "object")
    if kind != "object":
        raise invalid(f'type: expected "object"; got {jsonl.quote(kind)}')
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
    strict: bool = False  # Schemas are followed in either case.


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
        id = {} if self.id is None else {"id": self.id}
        return id | {"type": "function", "function": function}


class TextPart(Body):
    """Part of a message's content; other parts than text are not supported."""

    type: only("text")
    text: Text


class Message(Body):
    """Message of a conversation, whose content is a text or a list of texts."""

    role: Text
    content: Annotated[list[TextPart], pydantic.FailFast(), BeforeValidator(_text_parts)]
    name: Text = None
    reasoning_content: Text = None
    reasoning: Text = None
    thinking: Text = None
    refusal: Text = None
    tool_calls: Annotated[list[ToolCall], pydantic.FailFast(), Field(max_length=MAX_TOOLS)] = ()
    tool_call_id: Text = None
    parsed: Any = None  # The openai package adds it to answers, which come back.

    @pydantic.model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, values: Any) -> Any:
        """Drops fields such as `"tool_calls": []` of responses that clients send back."""
        if not isinstance(values, dict):
            return values
        has_content = "content" in values or values.get("role") not in jsonl.ASKING
        values = {name: value for name, value in values.items() if value not in ([], None)}
        return {"content": []} | values if has_content else values

    def for_template(self) -> dict[str, Any]:
        """Returns the message in the form that chat templates expect."""
        message = self.model_dump(exclude_unset=True, exclude={"parsed"})
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return jsonl.normalized(message)


class ChatPromptBody(Body):
    """Fields that determine a chat prompt."""

    tools: Annotated[list[ToolBody], pydantic.FailFast(), Field(max_length=MAX_TOOLS)] = ()
    tool_choice: Annotated[Any, AfterValidator(_choice)] = AUTO
    enable_thinking: bool = None
    reasoning_effort: Effort = None
    messages: Annotated[list[Message], pydantic.FailFast(), Field(min_length=1)]
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ChatBody(OutputBody, ChatPromptBody):
    """Body of /v1/chat/completions."""

    logprobs: bool = False
    top_logprobs: NumLogprobs = None
    modalities: only(["text"]) = None
    parallel_tool_calls: bool = True
    max_thinking_tokens: Minimum = None
    thinking_budget: Minimum = None
    thinking_token_budget: Minimum = None
    include_reasoning: bool = True


class TokenizeChatBody(TokenizeOptions, ChatPromptBody):
    """Body of vLLM's /tokenize with a conversation."""
