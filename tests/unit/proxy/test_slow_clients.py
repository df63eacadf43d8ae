"""Clients that begin and do not go on: everything they leave open has an end, and others are not touched."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec
import pytest

from proxy import bounded_http
from proxy.settings import TimeoutSettings
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

CHAT = "/v1/chat/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nhost: x\r\n%s\r\n\r\n"


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *pieces: bytes, pause_s: float = 0.0) -> None:
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(pause_s)

    async def rest(self, within_s: float = 5.0) -> bytes:
        """All until the connection ends, which it must."""
        got = b""
        async with asyncio.timeout(within_s):
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    got += piece
        return got


@contextlib.asynccontextmanager
async def client(stack: Stack) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    try:
        yield Client(reader, writer)
    finally:
        writer.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_http, "HEAD_S", 0.2)


def chat(stream: bool = False) -> bytes:
    body = msgspec.json.encode(chat_body(stream))
    return POST % (CHAT.encode(), b"content-length: %d" % len(body)) + body


@pytest.mark.parametrize(
    "framing",
    [b"content-length: 1000", b"transfer-encoding: chunked", b"content-length: 1000\r\nexpect: 100-continue"],
)
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/v1/messages", b"/tokenize", b"/v1/embeddings"])
async def test_a_body_that_does_not_end_is_a_408(stack_of: StackOf, path: bytes, framing: bytes) -> None:
    async with stack_of(union=1, timeouts=TimeoutSettings(body_s=0.3, drain_s=1)) as stack, client(stack) as slow:
        await slow.send(POST % (path, framing))
        dribble = b"1\r\n{\r\n" if b"chunked" in framing else b"{"
        sending = asyncio.create_task(slow.send(*[dribble] * 100, pause_s=0.02))
        answer = await slow.rest()
        await sending
        answer = answer.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408")
        assert msgspec.json.decode(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == 408
        assert (await stack.chat())[0] == 200


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("first", [b"", HEALTH, chat(), HEALTH + chat() + HEALTH])
@pytest.mark.parametrize(
    "begun", [b"G", b"GET /hea", b"GET /health HTTP/1.1\r\nhost: x\r\n", b"\r\n", chat()[:40]]
)
async def test_a_head_that_is_not_finished_ends_the_connection(stack: Stack, first: bytes, begun: bytes) -> None:
    async with client(stack) as slow:
        await slow.send(first)
        if first:
            await slow.reader.readuntil(b"200 OK")
        await slow.send(begun)
        await slow.rest()


@pytest.mark.usefixtures("impatient")
async def test_a_head_sent_byte_by_byte_has_a_deadline(stack: Stack) -> None:
    async with client(stack) as slow:
        await slow.send(HEALTH)
        await slow.reader.readuntil(b"200 OK")
        sending = asyncio.create_task(slow.send(*[b"G", b"E", b"T", b" ", b"/"] + [b"x"] * 100, pause_s=0.02))
        await slow.rest()
        await sending


@pytest.mark.usefixtures("impatient")
async def test_a_head_begun_while_an_answer_is_on_its_way_does_not_cut_the_answer(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.2) as stack, client(stack) as piped:
        await piped.send(chat(stream=True), b"GET /health HT")
        async with asyncio.timeout(5):
            await piped.reader.readuntil(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await piped.send(b"TP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(5):
            await piped.reader.readuntil(b"200 OK")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/health", b"/nowhere"])
async def test_the_rest_of_a_request_that_has_its_answer_is_not_waited_for_long(stack: Stack, path: bytes) -> None:
    async with client(stack) as slow:
        await slow.send(POST % (path, b"x-ascend-pd-x: 1\r\ncontent-length: 100000"))
        await slow.reader.readuntil(b"HTTP/1.1 4")
        sending = asyncio.create_task(slow.send(*[b"x"] * 100, pause_s=0.02))
        await slow.rest()
        await sending


@pytest.mark.usefixtures("impatient")
async def test_requests_after_one_another_are_served_however_long_the_pauses(stack: Stack) -> None:
    async with client(stack) as calm:
        for _ in range(2):
            await calm.send(chat())
            await calm.reader.readuntil(b"200 OK")
            await asyncio.sleep(0.5)
        await calm.send(HEALTH)
        await calm.reader.readuntil(b"200 OK")


async def test_a_long_body_and_a_split_head_behind_it_are_no_long_head(stack: Stack) -> None:
    body = msgspec.json.encode(chat_body(messages=[{"role": "user", "content": "x" * 100_000}]))
    whole = POST % (CHAT.encode(), b"content-length: %d" % len(body)) + body
    async with client(stack) as piped:
        await piped.send(whole[:50_000], whole[50_000:] + HEALTH[:20], HEALTH[20:], pause_s=0.1)
        async with asyncio.timeout(5):
            await piped.reader.readuntil(b"200 OK")
            await piped.reader.readuntil(b"200 OK")


@pytest.mark.parametrize(
    "endless",
    [
        [b"0\r\n", *(b"x-%d: %s\r\n" % (n, b"y" * 8000) for n in range(200))],
        [b"0\r\nx-y: ", *[b"y" * 8000] * 200],
        [b"1;x=", *[b"y" * 8000] * 200],
        [b"0\r\n", *(b"x: y\r\n" * 2000 for _ in range(100))],
    ],
)
async def test_endless_trailers_and_extensions_are_cut_off(stack: Stack, endless: list[bytes]) -> None:
    async with client(stack) as hostile:
        await hostile.send(POST % (CHAT.encode(), b"transfer-encoding: chunked"), b"2\r\n{}\r\n", *endless)
        answer = await hostile.rest()
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431")
        assert not stack.decode[0].seen
    assert (await stack.chat())[0] == 200


async def test_trailers_are_no_headers(stack: Stack) -> None:
    body = msgspec.json.encode(chat_body())
    chunks = b"%x\r\n%s\r\n0\r\nx-request-id: trailer\r\nx-ascend-pd-x: 1\r\n\r\n" % (len(body), body)
    async with client(stack) as client_:
        await client_.send(POST % (CHAT.encode(), b"transfer-encoding: chunked") + chunks)
        head = await client_.reader.readuntil(b"\r\n\r\n")
    assert b"200 OK" in head
    assert b"trailer" not in head


async def test_many_small_chunks_are_a_body_and_no_long_head(stack: Stack) -> None:
    body = msgspec.json.encode(chat_body(messages=[{"role": "user", "content": "x" * 30_000}]))
    chunks = b"".join(b"1\r\n%c\r\n" % c for c in body) + b"0\r\n\r\n"
    async with client(stack) as fussy:
        await fussy.send(POST % (CHAT.encode(), b"transfer-encoding: chunked"), chunks)
        async with asyncio.timeout(10):
            await fussy.reader.readuntil(b"200 OK")


@pytest.mark.parametrize("close", [False, True])
async def test_an_answer_that_is_never_read_does_not_keep_its_connection(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, close: bool
) -> None:
    monkeypatch.setattr(bounded_http, "FLUSH_S", 0.3)
    made: list[bounded_http.BoundedHttp] = []
    begin = bounded_http.BoundedHttp.connection_made

    def connection_made(self: bounded_http.BoundedHttp, transport: asyncio.Transport) -> None:
        begin(self, transport)
        self.timeout_keep_alive = 0.3  # type: ignore[assignment]
        made.append(self)

    monkeypatch.setattr(bounded_http.BoundedHttp, "connection_made", connection_made)
    stack.decode[0].model = stack.prefill[0].model = "m" * (8 << 20)  # which every answer repeats
    body = msgspec.json.encode(chat_body(model=stack.decode[0].model))
    extra = b"\r\nconnection: close" if close else b""
    async with client(stack) as deaf:
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await deaf.send(POST % (CHAT.encode(), b"content-length: %d" % len(body) + extra) + body)
        async with asyncio.timeout(10):
            while not (made and made[-1].parser is None):  # as connection_lost leaves it
                await asyncio.sleep(0.05)


async def test_what_a_client_calls_things_is_kept_up_to_a_bound(stack_of: StackOf) -> None:
    async with stack_of(union=1) as stack:
        name = "m" * 100_000
        for path in (CHAT, "/v1/responses", "/tokenize", "/v1/" + "x/" * 1000):
            await stack.post(path, {"model": name, "messages": [], "input": "", "user": name})
        for record in stack.app.services.journal._records:
            assert record.path
            assert len(msgspec.json.encode(record)) < 4096
        assert len(stack.app.services.journal._records) == 4
        assert len(stack.app.services.metrics.exposition()) < 100_000
