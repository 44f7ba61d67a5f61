"""Validates JSON objects by pydantic; errors are one line that names the field and its value."""

import difflib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from dflash import errors
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


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Types of errors of Anthropic's API by the status.
_MESSAGES_TYPES = _TYPES | {
    403: "permission_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_MAX_PARAM = 200  # Characters; a client may send a field name of any length.


class RequestError(Exception):
    """A request that cannot be served.

    Attributes:
      param: Name of the invalid field; None if the error does not concern a single field.
      retry_after_s: Seconds after which a retry may succeed; None if it would not.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        self.message = errors.shorten(_encodable(" ".join(message.split())))
        super().__init__(self.message)
        self.param = None if param is None else errors.shorten(_encodable(param), _MAX_PARAM)
        self.status, self.code = status, code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """HTTP headers that the response needs."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}

    def renamed(self, message: str, param: str | None) -> "RequestError":
        """Returns the same error with another message and name of the field."""
        facts = {"status": self.status, "code": self.code, "retry_after_s": self.retry_after_s}
        return RequestError(message, param=param, **facts)

    def body(self) -> dict[str, Any]:
        """Returns the JSON object of the response."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, default),
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    def messages_body(self) -> dict[str, Any]:
        """Returns the JSON object of a response of Anthropic's API."""
        default = "invalid_request_error" if self.status < 500 else "api_error"
        error = {"type": _MESSAGES_TYPES.get(self.status, default), "message": self.message}
        return {"type": "error", "error": error}


def unavailable(message: str) -> RequestError:
    """Returns the error of a request that may succeed a few seconds later."""
    return RequestError(message, status=503, code="unavailable", retry_after_s=5)


def unsupported(param: str, reason: str) -> RequestError:
    """Returns the error of a field that the server does not know or cannot serve."""
    return RequestError(f"{param}: {reason}", param=param, code="unsupported_parameter")


def _encodable(text: str) -> str:
    """Escapes unpaired surrogates, which JSON can express but UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def parse(kind: type[Body], body: Mapping[str, Any], place: str = "") -> Body:
    """Validates a JSON object.

    Args:
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
        if any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in values
        ):
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
