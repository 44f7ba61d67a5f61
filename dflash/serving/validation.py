"""Validates JSON objects by pydantic; errors are one line that names the field and its value."""

import difflib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from dflash import errors
from dflash.serving.request_error import RequestError, unsupported
from dflash.text import jsonl

Body = TypeVar("Body", bound=pydantic.BaseModel)
# Expected values by pydantic's type of the error; braces hold fields of the error's context.
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "greater_than_equal": "{ge:g} or more",
    "less_than_equal": "at most {le:.10g}",
    "literal_error": "{expected}",
    "string_pattern_mismatch": "a text that matches {pattern}",
    "too_long": "at most {max_length} items",
    "too_short": "at least {min_length} item",
}


def parse(kind: type[Body], body: Mapping[str, Any], place: str = "") -> Body:
    """Validates a JSON object.

    Args:
      kind: Model of the object.
      body: Object to validate.
      place: Name of the field that holds the object; "" for the body of a request.
    Raises:
      RequestError: A field is unknown or missing, or its value is not supported; names the first
        such field.
    """
    try:
        return kind.model_validate(body)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
    path = (place, *problem["loc"]) if place else problem["loc"]
    param, message = jsonl.place_of(path), problem["msg"]
    match problem["type"]:
        case "extra_forbidden":
            raise unsupported(param, f"not supported{_suggestion(kind, problem['loc'])}")
        case "unsupported":
            raise unsupported(param, message)
        case "missing":
            message = "required"
        case name if name in _EXPECTED:
            expected = _EXPECTED[name].format(**problem.get("ctx", {}))
            message = f"expected {expected}; got {jsonl.quote(problem['input'])}"
    raise RequestError(f"{param or 'body'}: {message}", param=param or None)


def only(*values: Any) -> Any:
    """Returns the type of a field that accepts these values and no others."""

    def check(value: Any) -> Any:
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values):
            return value
        expected = " or ".join(map(jsonl.quote, values))
        raise invalid(f"only {expected} is supported, not {jsonl.quote(value)}", "unsupported")

    return Annotated[Any, AfterValidator(check)]


def invalid(message: str, kind: str = "invalid") -> PydanticCustomError:
    """Returns the exception with which a validator rejects a value."""
    return PydanticCustomError(kind, message)


def check_unicode(text: str) -> str:
    """Returns a text unchanged; rejects unpaired surrogates, which UTF-8 cannot encode."""
    try:
        return jsonl.check_unicode(text, "")
    except errors.InputError as error:
        raise invalid(str(error).removeprefix(": ")) from error


Text = Annotated[str, AfterValidator(check_unicode)]


def _suggestion(kind: type[pydantic.BaseModel], location: tuple[str | int, ...]) -> str:
    *parents, unknown = location
    for name in parents:
        if isinstance(name, str):
            annotation = kind.model_fields[name].annotation
            kind = (*typing.get_args(annotation), annotation)[0]
    names = [field.alias or name for name, field in kind.model_fields.items()]
    near = difflib.get_close_matches(unknown[:100], names, n=1)
    return f"; did you mean {jsonl.place_of((*parents, near[0]))!r}?" if near else ""
