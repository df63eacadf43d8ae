"""A client that reads slowly holds its engine back; nothing is lost and nothing piles up in the proxy."""

from __future__ import annotations

import asyncio

import msgspec

from proxy.app import create_app
from proxy.settings import InstanceSettings, ProbeSettings, Settings
from tests.unit.proxy.conftest import chat_body, serving

EVENT = b"data: " + b"x" * 8000 + b"\n\n"
EVENTS = 8000


async def test_a_slow_client_stops_the_engine_and_gets_everything() -> None:
    sent = 0

    async def engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(EVENTS):
            writer.write(b"%x\r\n%s\r\n" % (len(EVENT), EVENT))
            await writer.drain()
            sent += len(EVENT)
        writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
        await writer.drain()

    listening = await asyncio.start_server(engine, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    settings = Settings(union=(InstanceSettings(url=url),), probes=ProbeSettings(interval_s=0))
    async with serving(settings, create_app(settings)) as proxy:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy, limit=8192)
        body = msgspec.json.encode(chat_body(True))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await asyncio.sleep(1.0)
        held_back = sent
        assert held_back < len(EVENT) * EVENTS * 0.75
        total = 0
        async with asyncio.timeout(60):
            while piece := await reader.read(1 << 20):
                total += piece.count(b"x")
        writer.close()
        assert 8000 * EVENTS <= total < 8000 * EVENTS + 100  # a few more are in the head
    listening.close()
