"""A real proxy on a loopback port in front of strict fake engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import msgspec
import pytest
import uvicorn

from proxy.__main__ import bind, uvicorn_config
from proxy.app import create_app
from proxy.services import Secrets
from proxy.settings import (
    InstanceSettings,
    ObservabilitySettings,
    ProbeSettings,
    Settings,
    TimeoutSettings,
)
from tests.fakes.engine import FakeCluster, FakeEngine


class Stack:
    """Engines, a proxy in front of them and an HTTP client."""

    def __init__(self, cluster: FakeCluster, engines: dict[str, list[FakeEngine]], url: str, app: Any) -> None:
        self.cluster = cluster
        self.prefill = engines["prefill"]
        self.decode = engines["decode"]
        self.union = engines["union"]
        self.url = url
        self.app = app
        self.http = aiohttp.ClientSession()

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self.http.post(self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.read()

    async def chat(self, stream: bool = False, **fields: Any) -> tuple[int, bytes]:
        return await self.post("/v1/chat/completions", chat_body(stream, **fields))


StackOf = Callable[..., AbstractAsyncContextManager[Stack]]


def chat_body(stream: bool = False, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    return {**body, "stream": stream, "max_tokens": 5, **fields}


@contextlib.asynccontextmanager
async def open_stack(
    prefill: int = 1,
    decode: int = 1,
    union: int = 0,
    token_delay_s: float = 0.0,
    secrets: Secrets | None = None,
    sides: bool = False,
    speaks: str = "pull",
    **settings: Any,
) -> AsyncIterator[Stack]:
    cluster = FakeCluster()
    counts = {"prefill": prefill, "decode": decode, "union": union}
    engines = {
        role: [
            await FakeEngine(cluster, role, token_delay_s=token_delay_s, dialect=speaks).start()
            for _ in range(count)
        ]
        for role, count in counts.items()
    }
    fleet = {
        role: tuple(InstanceSettings(url=e.url, side=e.side.address if sides else "") for e in members)
        for role, members in engines.items()
    }
    settings.setdefault("timeouts", TimeoutSettings(prefill_s=5, first_event_s=5, inter_token_s=5, drain_s=1))
    settings.setdefault("probes", ProbeSettings(interval_s=0))
    settings.setdefault("observability", ObservabilitySettings(access_log=False, expose_records=True))
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    if "layerwise" in speaks:
        settings.setdefault("metaserver", f"http://127.0.0.1:{port}")
    chosen = Settings(port=port, dialect=speaks, **fleet, **settings)
    app = create_app(chosen, secrets)
    try:
        async with serving(chosen, app, listener):
            stack = Stack(cluster, engines, f"http://127.0.0.1:{port}", app)
            try:
                yield stack
            finally:
                await stack.http.close()
    finally:
        for engine in (e for members in engines.values() for e in members):
            await engine.stop()


@contextlib.asynccontextmanager
async def serving(settings: Settings, app: Any, listener: socket.socket | None = None) -> AsyncIterator[int]:
    """The app under uvicorn as in production; yields its port."""
    bound = listener or bind("127.0.0.1", 0)
    config = uvicorn_config(settings, app)
    config.load()
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve(sockets=[bound]))
    while not server.started:
        assert not task.done(), task
        await asyncio.sleep(0.01)
    try:
        yield bound.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def stack_of() -> StackOf:
    return open_stack


@pytest.fixture
async def stack() -> AsyncIterator[Stack]:
    async with open_stack() as opened:
        yield opened


@pytest.fixture(autouse=True)
def no_proxy_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
