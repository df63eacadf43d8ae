"""Reading, authenticating and answering the metaserver's HTTP requests; what they mean is `app`'s."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire.http_signature import NONCE_HEADER, SIGNATURE_HEADER, HttpSigner
from metaserver.metrics import Metrics
from metaserver.settings import Settings

Handler = Callable[[Request, bytes], Awaitable[Response]]

_FIELD = re.compile(r"(?:at `\$\.([A-Za-z_]+)|field `([A-Za-z_]+)`|^[a-z ]+: ([a-z_]+) )")


class RefusedError(Exception):
    """A request that gets a 4xx or 503, with the field at fault where there is one."""

    def __init__(self, status: int, message: str, field: str = "", retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s


def json_response(content: object, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def invalid(error: RemoteProtocolError) -> RefusedError:
    """The 422 for a body that is not what it should be, naming the field."""
    match = _FIELD.search(str(error))
    return RefusedError(422, str(error), next((g for g in match.groups() if g), "") if match else "")


class Gate:
    """Wraps handlers: reads the body within bounds, demands the signature, signs the reply, shapes refusals."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._signer = HttpSigner(settings.secret)

    def __call__(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that runs `handler` for genuine requests only."""

        async def endpoint(request: Request) -> Response:
            try:
                body = await self._read(request)
                self._authenticate(request, body)
                response = await handler(request, body)
            except RefusedError as error:
                self._metrics.refused.labels(str(error.status)).inc()
                response = _refusal(error)
            nonce = request.headers.get(NONCE_HEADER, "")
            signature = self._signer.reply_signature(response.status_code, nonce, bytes(response.body))
            if signature:
                response.headers[SIGNATURE_HEADER] = signature
            return response

        return endpoint

    async def _read(self, request: Request) -> bytes:
        bound = self._settings.max_body_bytes
        too_long = RefusedError(413, f"the body is longer than {bound} bytes")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > bound:
            raise too_long
        chunks = bytearray()
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                async for chunk in request.stream():
                    chunks += chunk
                    if len(chunks) > bound:
                        raise too_long
        except TimeoutError as error:
            raise RefusedError(408, f"the body took longer than {self._settings.body_timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise RefusedError(400, "the client went away while sending its body") from error
        return bytes(chunks)

    def _authenticate(self, request: Request, body: bytes) -> None:
        if not self._signer.authenticated:
            # The client would not believe our unsigned answer: let it know before it waits for one.
            if SIGNATURE_HEADER in request.headers:
                message = "the request is signed, and the metaserver has no secret (connector.secretFile)"
                raise RefusedError(401, message, SIGNATURE_HEADER)
            return
        if not self._signer.request_is_genuine(
            request.method,
            request_target(request.scope),
            request.headers.get(NONCE_HEADER, ""),
            request.headers.get(SIGNATURE_HEADER, ""),
            body,
        ):
            given = "signed with another secret" if SIGNATURE_HEADER in request.headers else "not signed"
            raise RefusedError(401, f"the request is {given} (connector.secretFile)", SIGNATURE_HEADER)


def request_target(scope: dict[str, Any] | Any) -> str:
    """Path and query as they stood in the request line."""
    raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope["query_string"]
    return (raw_path + (b"?" + query if query else b"")).decode("latin-1")


def float_parameter(request: Request, name: str, default: float, highest: float) -> float:
    """A number from the query.

    Raises:
        RefusedError: not a number between 0 and `highest`.
    """
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= highest:
        raise RefusedError(422, f"{name} is {text[:64]!r}, expected seconds between 0 and {highest:g}", name)
    return value


def _refusal(error: RefusedError) -> Response:
    kind = "server_busy" if error.status == 503 else "invalid_request_error"
    detail = {"message": error.message, "type": kind, "param": error.field or None, "code": error.status}
    response = json_response({"error": detail}, error.status)
    if error.retry_after_s:
        response.headers["Retry-After"] = str(error.retry_after_s)
    return response
