"""The streaming client: split anywhere, cut off anywhere, reused, bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from proxy.errors import LegFailed
from proxy.settings import TimeoutSettings
from proxy.upstream import Upstream, request_head

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


class Server:
    def __init__(self) -> None:
        self.serve: Serve = self.plain
        self.connections = 0
        self.requests = 0
        self.url = ""

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                self.requests += 1
                await self.serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def plain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PLAIN)
        await writer.drain()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    listening = await asyncio.start_server(made.on_connection, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    yield made
    listening.close()


@pytest.fixture
async def upstream() -> AsyncIterator[Upstream]:
    made = Upstream(TimeoutSettings(connect_s=1))
    yield made
    await made.close()


async def test_connections_are_reused_and_a_used_answer_closes_nobody_elses(
    server: Server, upstream: Upstream
) -> None:
    first = await upstream.get(server.url, "/a", "engine", 2)
    assert await first.read(2) == b"{}"
    second = await upstream.get(server.url, "/b", "engine", 2)
    first.close()
    assert await second.read(2) == b"{}"
    assert (server.connections, server.requests) == (1, 2)


async def test_an_answer_not_yet_read_survives_the_reuse_of_its_connection(
    server: Server, upstream: Upstream
) -> None:
    first = await upstream.get(server.url, "/a", "engine", 2)
    await asyncio.sleep(0.05)
    await (await upstream.get(server.url, "/b", "engine", 2)).read(2)
    assert await first.read(2) == b"{}"


@pytest.mark.parametrize("piped", [False, True])
async def test_a_body_sent_byte_by_byte_arrives_whole(server: Server, upstream: Upstream, piped: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in CHUNKED + b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()

    server.serve = serve
    answer = await upstream.get(server.url, "/", "engine", 2)
    assert answer.streaming
    got = bytearray()
    if piped:
        await answer.pipe(got.extend, 2)
    else:
        got += await answer.read(2)
    assert got == b"hello world"


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nconte", b"SSH-2.0\r\n\r\n"])
async def test_a_head_that_never_comes_or_is_none_is_a_failed_leg(
    server: Server, upstream: Upstream, answer: bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        writer.close()

    server.serve = serve
    with pytest.raises(LegFailed) as failed:
        await upstream.get(server.url, "/", "engine", 2)
    assert failed.value.blame
    assert failed.value.retryable


async def test_a_body_cut_off_is_a_failed_leg(server: Server, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n6\r\n wo")
        writer.close()

    server.serve = serve
    answer = await upstream.get(server.url, "/", "engine", 2)
    with pytest.raises(LegFailed):
        await answer.read(2)


async def test_silence_ends_at_its_deadline(server: Server, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"5\r\nhello\r\n")
        await asyncio.sleep(30)

    server.serve = serve
    answer = await upstream.get(server.url, "/", "engine", 2)
    with pytest.raises(LegFailed) as failed:
        await answer.pipe(lambda piece: None, 0.1)
    assert failed.value.status == 504


async def test_pieces_put_the_deadline_of_a_pipe_off(server: Server, upstream: Upstream) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        for _ in range(8):
            writer.write(b"1\r\nx\r\n")
            await writer.drain()
            await asyncio.sleep(0.2)
        writer.write(b"0\r\n\r\n")

    server.serve = serve
    got = bytearray()
    await (await upstream.get(server.url, "/", "engine", 2)).pipe(got.extend, 1.0)
    assert got == b"x" * 8


async def test_an_idle_connection_closed_by_the_engine_is_nobodys_fault(
    server: Server, upstream: Upstream
) -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.requests == 1:
            writer.write(PLAIN)
        else:
            writer.close()

    server.serve = once
    await (await upstream.get(server.url, "/", "engine", 2)).read(2)
    with pytest.raises(LegFailed) as failed:
        await upstream.get(server.url, "/", "engine", 2)
    assert not failed.value.blame


async def test_a_port_where_nobody_listens_is_a_failed_leg(upstream: Upstream) -> None:
    with pytest.raises(LegFailed, match="cannot be reached"):
        await upstream.get("http://127.0.0.1:9", "/", "engine", 2)


async def test_a_slow_reader_stops_the_sender_and_loses_nothing(server: Server, upstream: Upstream) -> None:
    size = 8 << 20

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        for _ in range(size >> 16):
            writer.write(b"y" * (1 << 16))
            await writer.drain()

    server.serve = serve
    answer = await upstream.get(server.url, "/", "engine", 2)
    await asyncio.sleep(0.3)
    assert len(await answer.piece(2)) < size
    rest = await answer.read(5)
    assert set(rest) == {ord("y")}


def test_a_header_cannot_smuggle_a_line() -> None:
    with pytest.raises(ValueError, match="line break"):
        request_head("GET", "/", "h", {"x": "a\r\ny: b"}, 0)
