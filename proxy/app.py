"""The ASGI application: FastAPI for what people read, a plain ASGI path for what carries tokens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

import ascend_pd
from proxy.dialects import dialect_named
from proxy.downstream import Downstream
from proxy.errors import LegFailed, ProxyError, Refused, error_body
from proxy.exchange import Exchange, Services
from proxy.fleet import Fleet
from proxy.request import Api, parse_request
from proxy.settings import Role, Settings
from proxy.upstream import Upstream

_log = logging.getLogger("proxy")
_APIS = {api.value: api for api in Api}
_FORWARDED_HEADERS = ("traceparent", "tracestate")


class ProxyApp(FastAPI):
    """FastAPI, with the token-carrying endpoints taken out of its per-request machinery."""

    services: Services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        api = _APIS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if api is None:
            await super().__call__(scope, receive, send)
        else:
            await serve(self.services, api, scope, receive, send)


async def serve(services: Services, api: Api, scope: Scope, receive: Receive, send: Send) -> None:
    """One token-carrying request."""
    down = Downstream(send)
    try:
        raw = await read_body(receive, services.settings.max_body_bytes)
        request = parse_request(api, raw)
    except ProxyError as error:
        await down.error(error)
        return
    except ClientGone:
        return
    headers = {
        name.decode("latin-1"): value.decode("latin-1")
        for name, value in scope["headers"]
        if name.decode("latin-1") in _FORWARDED_HEADERS
    }
    await run_until_gone(Exchange(services, request, down, headers), down, receive)


class ClientGone(Exception):
    """The client closed the connection."""


async def run_until_gone(exchange: Exchange, down: Downstream, receive: Receive) -> None:
    """Run the exchange; a client that leaves cancels it, and with it both legs."""
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        await exchange.run()
    except ProxyError as error:
        await down.error(error)
    except TimeoutError:
        await down.error(LegFailed("the request took longer than this proxy allows", 504, kind="timeout"))
    except asyncio.CancelledError:
        if not gone:
            raise
    finally:
        watcher.cancel()


async def read_body(receive: Receive, limit: int) -> bytes:
    """The request body.

    Raises:
        Refused: larger than `limit` (413).
        ClientGone: disconnected before its end.
    """
    pieces: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        piece = message.get("body", b"")
        size += len(piece)
        if size > limit:
            raise Refused(f"the body is larger than {limit} bytes", status=413)
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces) if len(pieces) > 1 else piece


def create_app(settings: Settings) -> ProxyApp:
    """The application of one process; connections open when it starts and close when it stops."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        upstream = Upstream(settings.timeouts)
        dialect = dialect_named(settings.dialect or settings.mode)
        app.services = Services(settings, Fleet(settings), upstream, dialect)
        yield
        await upstream.close()

    app = ProxyApp(title="ascend-pd proxy", version=ascend_pd.__version__, lifespan=lifespan)
    _add_reading_routes(app)
    return app


def _add_reading_routes(app: ProxyApp) -> None:
    @app.get("/health")
    async def health() -> Response:
        """Live: the process serves."""
        return Response(status_code=200)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The models of the first engine that answers."""
        services = app.services
        candidates = services.fleet.instances(Role.DECODE) + services.fleet.instances(Role.UNION)
        for instance in [i for i in candidates if i.available()]:
            with contextlib.suppress(LegFailed):
                answer = await services.upstream.get(
                    instance.settings.url + "/v1/models", {}, instance.role, services.settings.timeouts.connect_s
                )
                body = await answer.read(services.settings.timeouts.connect_s)
                return Response(body, answer.status, media_type=answer.content_type)
        return Response(
            error_body(ProxyError("no engine answers", 503)), status_code=503, media_type="application/json"
        )

    @app.get("/version")
    async def version() -> JSONResponse:
        """This proxy's version."""
        return JSONResponse({"version": ascend_pd.__version__})
