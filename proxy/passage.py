"""Requests that carry no generated tokens: passed whole to any instance of the given roles."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
from fastapi import Request, Response

from proxy.endpoint import read_body
from proxy.errors import LegFailed, ProxyError, Refused
from proxy.policy import Work
from proxy.request import refuse_internal_fields
from proxy.services import Services
from proxy.settings import Role

_SAFE_PATH = re.compile(r"/[A-Za-z0-9_/.-]*")


async def read_checked(services: Services, request: Request) -> bytes:
    """The body, within the limit; JSON bodies are searched for fields that only the proxy may set.

    Raises:
        Refused
    """
    length = request.headers.get("content-length", "").encode("latin-1")
    body = await read_body(request.receive, services.settings.admission.max_body_bytes, length)
    if request.headers.get("content-type", "application/json").startswith("application/json"):
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(f"the body is not valid JSON: {error}") from error
        if not isinstance(content, dict):
            raise Refused("the body must be a JSON object")
        refuse_internal_fields(content)
    return body


async def pass_to_any(
    services: Services, path: str, body: bytes, request: Request, roles: Sequence[Role]
) -> Response:
    """The answer of the first role that has an available instance.

    Raises:
        ProxyError: none has, or it failed.
    """
    if not _SAFE_PATH.fullmatch(path) or ".." in path:
        raise Refused("this path is not served", status=404)
    role = next((r for r in roles if any(i.available() for i in services.fleet.instances(r))), None)
    if role is None:
        raise ProxyError("no instance is available", 503, kind="no_instance", retry_after_s=5)
    load = services.fleet.select(role, Work(max(1, len(body) // 4)))
    headers = {"content-type": request.headers.get("content-type", "application/json"), **services.engine_headers}
    timeouts = services.settings.timeouts
    try:
        answer = await services.upstream.post(
            load.instance.settings.url, path, body, headers, role, timeouts.request_s
        )
        try:
            content = await answer.read(timeouts.inter_token_s)
        finally:
            answer.close()
    except LegFailed as error:
        if error.blame:
            load.instance.breaker.failed(services.now())
        raise
    finally:
        load.close()
    return Response(content, answer.status, media_type=answer.content_type)
