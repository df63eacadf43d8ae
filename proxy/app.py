"""The ASGI application: FastAPI for what people read, plain ASGI for what carries tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

import ascend_pd
from proxy.auth import bearer
from proxy.endpoint import read_body, serve
from proxy.errors import LegFailed, ProxyError, error_body
from proxy.load import load_secrets
from proxy.openapi import document
from proxy.passage import serve_passage
from proxy.request import CHAT, COMPLETIONS, WHOLE_PATHS
from proxy.services import Secrets, Services, make_services
from proxy.settings import Role, Settings

MAX_CALLBACK_BYTES = 4 << 20
TOKEN_PATHS = frozenset((CHAT, COMPLETIONS, *WHOLE_PATHS))


class ProxyApp(FastAPI):
    """FastAPI, with the token-carrying endpoints taken out of its per-request machinery."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.services.admission.draining:
            send = _closing(send)
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in TOKEN_PATHS:
            await serve(self.services, scope["path"], scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """The document with the plain ASGI endpoints added."""
        if self.openapi_schema is None:
            self.openapi_schema = document(super().openapi())
        return self.openapi_schema


def _closing(send: Send) -> Send:
    """Answers that end their connection: a client that comes again is to meet another proxy."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    return send_closing


def create_app(settings: Settings, secrets: Secrets | None = None) -> ProxyApp:
    """The application of one process; connections open when it starts and close when it stops."""
    known = secrets if secrets is not None else load_secrets(settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        app.services = make_services(settings, known)
        yield
        await app.services.close()

    app = ProxyApp(title="ascend-pd proxy", version=ascend_pd.__version__, lifespan=lifespan, docs_url=None)
    app.add_exception_handler(ProxyError, _answer_error)
    _add_status_routes(app)
    _add_engine_routes(app)
    if settings.observability.expose_records:
        add_record_route(app, app)
    return app


async def _answer_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, ProxyError):
        raise error
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else None
    return Response(error_body(error), error.status, headers, media_type="application/json")


def check_key(app: ProxyApp, request: Request) -> None:
    """The same rule as for token-carrying requests.

    Raises:
        ProxyError: 401.
    """
    given = bearer(*(request.headers.get(n, "").encode("latin-1") for n in ("authorization", "x-api-key")))
    app.services.keyring.check(given)


def _add_status_routes(app: ProxyApp) -> None:
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """Live: the process serves."""
        return Response(status_code=200)

    @app.get("/ready", responses={503: {"description": "Not now", "content": {"application/json": {}}}})
    async def ready() -> JSONResponse:
        """Ready: a request can be served now."""
        services = app.services
        able = services.fleet.can_serve(services.settings.policy.fallback) and not services.admission.draining
        return JSONResponse({"ready": able}, 200 if able else 503)

    @app.get("/version")
    async def version() -> JSONResponse:
        """This proxy's version."""
        return JSONResponse({"version": ascend_pd.__version__})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Prometheus metrics. They name instances, so API keys guard them where there are any."""
        check_key(app, request)
        return Response(app.services.metrics.exposition(), media_type="text/plain; version=0.0.4")


def _add_engine_routes(app: ProxyApp) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models of the first engine that answers."""
        check_key(app, request)
        services = app.services
        for role in (Role.DECODE, Role.UNION):
            for instance in [i for i in services.fleet.instances(role) if i.available()]:
                with contextlib.suppress(LegFailed):
                    timeout_s = services.settings.probes.timeout_s
                    url = instance.settings.url
                    answer = await services.upstream.get(
                        url, "/v1/models", role, timeout_s, services.engine_headers
                    )
                    body = await answer.read(timeout_s)
                    return Response(body, answer.status, media_type=answer.content_type)
        raise ProxyError("no engine answers", 503, kind="no_instance", retry_after_s=5)

    tokenizers = (Role.UNION, Role.DECODE, Role.PREFILL)

    @app.post("/tokenize")
    async def tokenize() -> Response:
        """Any engine's tokenizer."""
        return _Passage(app, "/tokenize", tokenizers)

    @app.post("/detokenize")
    async def detokenize() -> Response:
        """Any engine's tokenizer."""
        return _Passage(app, "/detokenize", tokenizers)

    @app.post("/v1/metaserver/{token}", include_in_schema=False)
    async def called_back(token: str, request: Request) -> JSONResponse:
        """A waiting D of vllm-ascend's layer-wise connector says where its blocks are."""
        raw = await read_body(request.receive, MAX_CALLBACK_BYTES, b"")
        try:
            message = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise ProxyError(f"no reservation: {error}", 400) from error
        done = await app.services.callbacks.arrive(token, message)
        if done is None:
            raise ProxyError("nobody waits for this call", 404)
        return JSONResponse({"status": "ok" if done else "failed"}, 200 if done else 502)

    @app.post("/v1/{path:path}", include_in_schema=False)
    async def others(path: str) -> Response:
        """Endpoints that cannot be split over P and D: a union instance, or 501."""
        return _Passage(app, f"/v1/{path}", (Role.UNION,))


class _Passage(Response):
    """Stands in for an answer that `serve_passage` writes by itself."""

    def __init__(self, app: ProxyApp, path: str, roles: tuple[Role, ...]) -> None:
        super().__init__()
        self._app = app
        self._path = path
        self._roles = roles

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await serve_passage(self._app.services, self._path, self._roles, scope, receive, send)


def add_record_route(on: FastAPI, app: ProxyApp) -> None:
    """`/debug/records`: the last requests of all clients and their phases; API keys guard it on the public listener."""

    @on.get("/debug/records", include_in_schema=False)
    async def records(request: Request, transfer_id: str = "", limit: int = 100) -> JSONResponse:
        if on is app:
            check_key(app, request)
        return JSONResponse({"records": await app.services.journal.views(transfer_id, max(1, min(limit, 1000)))})
