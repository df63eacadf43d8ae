"""Requests that carry no generated tokens: passed whole to any instance of the given roles."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from starlette.types import Receive, Scope, Send

from proxy.endpoint import Entry, Work, serve
from proxy.errors import LegFailed, ProxyError, Refused
from proxy.metrics import PASSED
from proxy.policy import Work as Weight
from proxy.request import refuse_internal_fields
from proxy.services import Services
from proxy.settings import Role

_SAFE_PATH = re.compile(r"/[A-Za-z0-9_/.-]*")
_JSON = "application/json"
_FORM = "multipart/form-data"


async def serve_passage(
    services: Services, path: str, roles: Sequence[Role], scope: Scope, receive: Receive, send: Send
) -> None:
    """One such request, under the rules that token-carrying ones have; the first role that can takes it."""
    content_type = next((v.decode("latin-1") for n, v in scope["headers"] if n == b"content-type"), _JSON)

    def prepare(entry: Entry) -> Work:
        if not _SAFE_PATH.fullmatch(path) or ".." in path:
            raise Refused("this path is not served", status=404)
        if roles == (Role.UNION,) and not services.fleet.instances(Role.UNION):
            raise ProxyError(f"{path} needs a union instance, and this cluster has none", 501)
        if media_type(content_type) != _FORM:
            entry.record.model = check_json(entry.raw)
        return lambda: _pass(entry, roles, content_type)

    await serve(services, path, scope, receive, send, prepare, PASSED)


def media_type(content_type: str) -> str:
    """The type alone, as it compares: without parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def check_json(body: bytes) -> str:
    """Search a body for fields that only the proxy may set, whatever it calls itself: engines may read it as JSON.

    Returns the model that it names, or nothing.

    Raises:
        Refused: it has one, or it is no JSON object and so cannot be searched.
    """
    try:
        content = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refused(f"the body is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refused("the body must be a JSON object")
    refuse_internal_fields(content)
    model = content.get("model")
    return model[:256] if isinstance(model, str) else ""


async def _pass(entry: Entry, roles: Sequence[Role], content_type: str) -> None:
    services, record = entry.services, entry.record
    role = next((r for r in roles if any(i.available() for i in services.fleet.instances(r))), None)
    if role is None:
        raise ProxyError("no instance is available", 503, kind="no_instance", retry_after_s=5)
    load = services.fleet.select(role, Weight(max(1, len(entry.raw) // 4)))
    record.attempts = 1
    record.decode = load.instance.key
    leg = entry.trace.leg(role, "")
    headers = {"content-type": content_type, "x-request-id": record.request_id}
    headers |= {**leg.headers, **services.engine_headers}
    timeouts = services.settings.timeouts
    error_text = ""
    try:
        answer = await services.upstream.post(
            load.instance.settings.url, entry.path, entry.raw, headers, role, timeouts.request_s
        )
        try:
            content = await answer.read(timeouts.inter_token_s)
        finally:
            answer.close()
    except LegFailed as error:
        error_text = error.message
        if error.blame:
            load.instance.breaker.failed(services.now())
        raise
    finally:
        leg.end(error_text)
        load.close()
    await entry.down.whole(answer.status, content, answer.content_type)
