"""JSON bodies of the endpoints, as pydantic models; `chat_bodies` has those of chats.

Unknown fields are errors. A field that is null counts as absent, as in OpenAI's API. Fields that
clients send although the server does not implement them accept `only` the values that leave the
output unchanged. `completion_request` makes the checks that need the tokenizer.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field

from dflash import errors
from dflash.config.schema import FLOAT32_MAX, INT32_MAX, MAX_TOKENS, SamplingConfig
from dflash.inference.request import MAX_BIASED, MAX_LOGPROBS
from dflash.serving.request_error import RequestError
from dflash.serving.structured_output import StructuredOutput
from dflash.serving.validation import Text, invalid, only
from dflash.text import jsonl
from dflash.text.grammar import Kind

MAX_CHOICES = 128  # Outputs of one HTTP request, over all of its prompts.
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1000
MAX_SALT_CHARACTERS = 1000
MAX_FIELDS = 100  # Fields of a JSON object that the server reads.


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
    """Returns the type of a field whose value becomes a `StructuredOutput`.

    Args:
      kind: Language of the constraint. A JSON schema may be an object or its text.
      param: Full name of the field.
    """
    source = Annotated[Any, AfterValidator(_schema_text)] if kind == "json_schema" else Text
    return Annotated[source, AfterValidator(lambda text: StructuredOutput(kind, text, param))]


Stops = Annotated[
    list[Text],
    pydantic.FailFast(),
    BeforeValidator(listed),
    Field(max_length=MAX_STOPS),
    AfterValidator(_check_stops),
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

    LIMITS, MINIMUM, SEEDS = ("max_completion_tokens", "max_tokens"), "min_tokens", ("seed",)

    model: Text = None
    max_tokens: Limit = None
    max_completion_tokens: Limit = None
    min_tokens: Minimum = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    include_stop_str_in_output: bool = False
    show_drafts: bool = False
    include_metrics: bool = False
    response_format: ResponseFormat = ResponseFormat()
    guided_json: _constraint("json_schema", "guided_json") = None
    guided_regex: _constraint("regex", "guided_regex") = None
    guided_grammar: _constraint("lark", "guided_grammar") = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    length_penalty: only(1) = None
    metadata: only({}) = None
    cache_salt: CacheSalt = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX)] = 0
    service_tier: only("auto", "default") = None
    store: only(False) = None
    use_beam_search: only(False) = None
    user: Any = None


class CompletionBody(OpenAIBody):
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
