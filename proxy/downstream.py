"""The client's side of one exchange: an answer that starts late and at most once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Protocol

from proxy.errors import ProxyError, error_body, error_event

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]


class Downstream(Protocol):
    """Where an answer goes: a client, or one member's place in a joint answer."""

    @property
    def started(self) -> bool:
        """A byte of this answer has gone out; no other attempt may answer any more."""

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """A complete answer."""

    async def start_stream(self) -> None:
        """Status 200 of an event stream; only called with the first event in hand."""

    def write_now(self, events: bytes, on_writable: Callable[[], None]) -> bool:
        """Whole events, without waiting. False: the client is slow, hold back until `on_writable`."""

    async def end(self) -> None:
        """The stream's end."""


class AsgiDownstream:
    """An ASGI client."""

    __slots__ = ("_pending", "_send", "base", "bytes_sent", "extra", "finished", "started", "status", "streaming")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: asyncio.Future[None] | None = None
        self.base: Headers = []
        """Headers of every answer to this request."""
        self.extra: Headers = []
        """Headers of the current attempt."""
        self.started = False
        self.finished = False
        self.streaming = False
        self.status = 0
        self.bytes_sent = 0

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        headers = [
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(body)),
            *self.base,
            *self.extra,
        ]
        self.started = True
        self.status = status
        self.bytes_sent = len(body)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self.finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.base,
            *self.extra,
        ]
        self.started = True
        self.streaming = True
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    def write_now(self, events: bytes, on_writable: Callable[[], None]) -> bool:
        # The server's `send` only waits when the client's socket is full. So it is stepped by hand once, which
        # saves a task switch per token, and becomes a task of its own only when it does wait.
        self.bytes_sent += len(events)
        sending = self._send({"type": "http.response.body", "body": events, "more_body": True})
        if self._pending is not None and not self._pending.done():
            self._pending = asyncio.ensure_future(_after(self._pending, sending))
        else:
            try:
                waited_for = sending.send(None)
            except StopIteration:
                return True
            self._pending = asyncio.ensure_future(_resume(sending, waited_for))
        self._pending.add_done_callback(lambda _: on_writable())
        return False

    async def end(self) -> None:
        if self._pending is not None and not self._pending.done():
            await self._pending
        self.finished = True
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: ProxyError) -> None:
        """The error as a whole answer, or as the last event of a stream that has begun."""
        if self.streaming:
            self.write_now(error_event(error), lambda: None)
            await self.end()
            return
        if self.started:
            return
        if error.retry_after_s:
            self.extra.append((b"retry-after", b"%d" % error.retry_after_s))
        await self.whole(error.status, error_body(error))


async def _resume(sending: Coroutine[Any, Any, None], waited_for: Any) -> None:
    """Run a coroutine on that was already stepped to its first wait, on an asyncio future."""
    while True:
        if waited_for is None:
            await asyncio.sleep(0)
        else:
            waited_for._asyncio_future_blocking = False
            await asyncio.wait([waited_for])
        try:
            waited_for = sending.send(None)
        except StopIteration:
            return


async def _after(earlier: asyncio.Future[None], sending: Coroutine[Any, Any, None]) -> None:
    await asyncio.wait([earlier])
    await sending
