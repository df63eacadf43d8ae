"""The client's side of one exchange: an answer that starts late and at most once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from proxy.errors import ProxyError, error_body, error_event

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Downstream:
    """Writes the answer. `started` says whether the client has seen a status."""

    __slots__ = ("_send", "bytes_sent", "extra", "started", "status", "streaming")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.extra: Headers = []
        self.started = False
        self.streaming = False
        self.status = 0
        self.bytes_sent = 0

    async def whole(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """A complete answer."""
        headers = [
            (b"content-type", content_type.encode("latin-1")),
            (b"content-length", b"%d" % len(body)),
            *self.extra,
        ]
        self.started = True
        self.status = status
        self.bytes_sent = len(body)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        """Status 200 of an event stream; only called with the first event in hand."""
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *self.extra,
        ]
        self.started = True
        self.streaming = True
        self.status = 200
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, events: bytes) -> None:
        """Whole events of the stream."""
        self.bytes_sent += len(events)
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def end(self) -> None:
        """The stream's end."""
        await self._send({"type": "http.response.body", "body": b""})

    async def error(self, error: ProxyError) -> None:
        """The error as a whole answer, or as the last event of a stream that has begun."""
        if self.streaming:
            await self.events(error_event(error))
            await self.end()
            return
        if self.started:
            return
        if error.retry_after_s:
            self.extra.append((b"retry-after", b"%d" % error.retry_after_s))
        await self.whole(error.status, error_body(error))
