"""Errors of HTTP requests, in OpenAI's format."""

from typing import Any

from dflash import errors

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_MAX_PARAM = 200  # Characters; a client may send a field name of any length.


class RequestError(Exception):
    """A request that cannot be served.

    Attributes:
      status: HTTP status.
      message: Message in one line.
      param: Name of the invalid field; None if the error does not concern a single field.
      code: Machine-readable error code; None if there is none.
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


def unavailable(message: str) -> RequestError:
    """Returns the error of a request that may succeed a few seconds later."""
    return RequestError(message, status=503, code="unavailable", retry_after_s=5)


def unsupported(param: str, reason: str) -> RequestError:
    """Returns the error of a field that the server does not know or cannot serve."""
    return RequestError(f"{param}: {reason}", param=param, code="unsupported_parameter")


def _encodable(text: str) -> str:
    """Escapes unpaired surrogates, which JSON can express but UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
