"""Errors on their way to a client, in the OpenAI shape that vLLM uses.

ProxyError          has a status; shown to the client as it is
├── Refused         the request itself cannot be served (4xx)
└── LegFailed       an upstream leg failed; another attempt may help when `retryable`
"""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from ascend_pd.errors import AscendPdError

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}


class ProxyError(AscendPdError):
    """What the client is told.

    Args:
        message: one line, free of addresses and secrets.
        status: HTTP status.
        param: the field of the request that is to blame, if one is.
        kind: machine-readable kind, e.g. `transfer_failed`.
        retry_after_s: advice for 429 and 503, 0 for none.
    """

    def __init__(
        self, message: str, status: int = 500, *, param: str | None = None, kind: str = "", retry_after_s: int = 0
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.kind = kind
        self.retry_after_s = retry_after_s


class Refused(ProxyError):
    """The request cannot be served as it is."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, status, param=param)


class LegFailed(ProxyError):
    """One leg failed. `blame` says whether the instance's breaker counts it."""

    def __init__(
        self,
        message: str,
        status: int = 502,
        *,
        kind: str = "leg_failed",
        retryable: bool = True,
        blame: bool = True,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message, status, kind=kind, retry_after_s=retry_after_s)
        self.retryable = retryable
        self.blame = blame


def error_body(error: ProxyError) -> bytes:
    """The JSON body of an error answer."""
    return msgspec.json.encode({"error": _object(error)})


def _object(error: ProxyError) -> dict[str, object]:
    kind = _TYPES.get(error.status, "InternalServerError")
    if error.status not in _TYPES and error.status < 500:
        kind = HTTPStatus(error.status).phrase.replace(" ", "") + "Error"
    inner: dict[str, object] = {
        "message": error.message,
        "type": kind,
        "param": error.param,
        "code": error.status,
    }
    if error.kind:
        inner["kind"] = error.kind
    return inner


def error_event(error: ProxyError, named: bool = False) -> bytes:
    """The same as a server-sent event; no `[DONE]` follows it.

    Args:
        named: the stream names its events; then it has what clients of `/v1/messages` (`error`) and of `/v1/responses`
            (`code`, `message`, `param`) look for.
    """
    if not named:
        return b"data: " + error_body(error) + b"\n\n"
    inner = _object(error)
    event = {
        "type": "error",
        "code": inner["type"],
        "message": error.message,
        "param": error.param,
        "error": inner,
    }
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"
