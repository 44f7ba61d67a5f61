"""Answers that are errors, in OpenAI's form."""

from typing import Any

from dflash import errors

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_MAX_PARAM = 200  # characters of a field's name, which may be anything


class Refusal(Exception):
    """A request that is not served: its HTTP status, and a line that says why.

    Attributes:
      status: of HTTP.
      message: one line.
      param: the field at fault; None: no single one.
      code: a word for programs; None: none.
      retry_after_s: seconds after which to try again; None: trying again is no use.
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
        self.message = errors.shorten(" ".join(message.split()))
        super().__init__(self.message)
        self.param = None if param is None else errors.shorten(param, _MAX_PARAM)
        self.status, self.code = status, code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer beside the usual ones."""
        if self.retry_after_s is None:
            return {}
        return {"Retry-After": str(self.retry_after_s)}

    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        usual = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, usual)
        error = {
            "message": self.message,
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}


def unsupported(param: str, why: str) -> Refusal:
    """The refusal of a field that this server does not know or cannot serve."""
    return Refusal(f"{param}: {why}", param=param, code="unsupported_parameter")
