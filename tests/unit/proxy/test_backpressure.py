"""A client that reads slowly holds its engines back; nothing is lost and nothing piles up in the proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from proxy import downstream
from proxy.app import create_app
from proxy.downstream import AsgiDownstream
from proxy.settings import InstanceSettings, ProbeSettings, Settings, TimeoutSettings
from tests.fakes.connectors import CONNECTORS
from tests.unit.proxy.conftest import chat_body, serving

TEXT = 8000
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"~" * TEXT + b'"}}]}\n\n'


class BigEngines:
    """P answers with a handoff, D with many big events as fast as they are taken."""

    def __init__(self, events: int) -> None:
        self.events = events
        self.sent = 0
        self.open = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    await self._answer(reader, writer)
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        body = msgspec.json.decode(await reader.readexactly(length))
        params = body.get("kv_transfer_params") or {}
        if params.get("do_remote_decode"):
            engine: Any = type("P", (), {"cluster": _Holds(), "side": _Side(), "lease_s": 0.0})()
            handoff = await CONNECTORS["pull"]().prefill(engine, params, "p")
            answer = msgspec.json.encode({"choices": [], "kv_transfer_params": handoff})
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n")
            writer.write(b"content-length: %d\r\n\r\n%s" % (len(answer), answer))
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(self.events):
            writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            await writer.drain()
            self.sent += len(EVENT)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()


class _Holds:
    def __init__(self) -> None:
        self.holds: dict[str, Any] = {}


class _Side:
    port = 9


@contextlib.asynccontextmanager
async def big_stack(events: int, roles: tuple[str, ...], **settings: Any) -> AsyncIterator[tuple[BigEngines, int]]:
    engines = BigEngines(events)
    listening = await asyncio.start_server(engines.serve, "127.0.0.1", 0)
    instance = InstanceSettings(url=f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    fleet = dict.fromkeys(roles, (instance,))
    chosen = Settings(**fleet, probes=ProbeSettings(interval_s=0), **settings)
    async with serving(chosen, create_app(chosen)) as port:
        yield engines, port
    listening.close()


async def ask(port: int, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=8192)
    body = msgspec.json.encode(chat_body(True, **fields))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
    writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
    return reader, writer


@pytest.mark.parametrize("n", [1, 2, 4])
async def test_a_slow_client_stops_the_engines_and_gets_everything(n: int) -> None:
    events = 8000 // n
    roles = ("union",) if n == 1 else ("prefill", "decode")
    async with big_stack(events, roles) as (engines, port):
        reader, writer = await ask(port, n=n, temperature=1.0)
        await asyncio.sleep(1.0)
        assert 0 < engines.sent < len(EVENT) * events * n * 0.75
        total, tail = 0, b""
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 20):
                total += piece.count(b"~")
                tail = (tail + piece)[-100:]
        writer.close()
        assert total == TEXT * events * n
        assert b"data: [DONE]" in tail


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_never_reads_is_given_up_when_its_time_is_over(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downstream, "LAST_S", 0.2)
    roles = ("union",) if n == 1 else ("prefill", "decode")
    async with big_stack(20_000, roles, timeouts=TimeoutSettings(request_s=0.5, drain_s=1)) as (engines, port):
        reader, writer = await ask(port, n=n, temperature=1.0)
        await asyncio.sleep(0.3)
        assert engines.open
        await asyncio.sleep(1.2)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(10):
                while await reader.read(1 << 20):
                    pass
                raise ConnectionError("ended before its end")  # reset or closed: both lost the rest
        writer.close()


class SlowServer:
    """An ASGI `send` that waits until told."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.sent: list[Any] = []

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.room.wait()
        self.sent.append(message)


async def test_everybody_who_was_held_back_is_told_once_when_there_is_room() -> None:
    server = SlowServer()
    down = AsgiDownstream(server)
    await down.start_stream()
    told: list[int] = []
    callbacks = [lambda i=i: told.append(i) for i in range(4)]  # type: ignore[misc]
    assert not any(down.write_now(b"%d" % i, callbacks[i]) for i in (0, 1, 2, 3, 2))
    await asyncio.sleep(0)
    assert told == []
    server.room.set()
    await asyncio.sleep(0.01)
    assert told == [0, 1, 2, 3]
    assert [m["body"] for m in server.sent[1:]] == [b"0", b"1", b"2", b"3", b"2"]
    assert down.write_now(b"x", callbacks[0])
    assert told == [0, 1, 2, 3]


@pytest.mark.parametrize("streaming", [False, True])
async def test_an_error_that_is_not_taken_in_time_closes_the_connection(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downstream, "LAST_S", 0.05)
    aborted: list[bool] = []
    down = AsgiDownstream(SlowServer(), lambda: aborted.append(True))
    if streaming:
        await down.start_stream()
    async with asyncio.timeout(2):
        await down.error(downstream.ProxyError("too late", 504))
    assert aborted == [True]


async def test_an_error_behind_half_an_answer_closes_the_connection() -> None:
    aborted: list[bool] = []
    down = AsgiDownstream(SlowServer(), lambda: aborted.append(True))
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.05):
            await down.whole(200, b"{}")
    await down.error(downstream.ProxyError("too late", 504))
    assert aborted == [True]
