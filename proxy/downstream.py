"""The client's side of one exchange: an answer that starts late and at most once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

from proxy.errors import ProxyError, error_body, error_event
from proxy.stepped import Stepped

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]
ABORT = "ascend_pd.abort"
"""Of a scope's extensions: closes the client's connection at once, whatever has not been sent."""
LAST_S = 5.0
"""How long a client may take to make room for an error when its time is over."""


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

    __slots__ = (
        "_abort",
        "_emptied",
        "_held",
        "_paused",
        "_send",
        "base",
        "bytes_sent",
        "extra",
        "finished",
        "names_events",
        "started",
        "status",
        "streaming",
    )

    def __init__(self, send: Send, abort: Callable[[], None] | None = None) -> None:
        self._send = send
        self._abort = abort or _nothing
        self._held: deque[Message] = deque()
        """Written, but not yet taken by the server; the first of them is on its way."""
        self._emptied: asyncio.Future[None] | None = None
        self._paused: dict[Callable[[], None], None] = {}
        """Who has been told to hold back, each once: a joint answer has several writers."""
        self.base: Headers = []
        """Headers of every answer to this request."""
        self.extra: Headers = []
        """Headers of the current attempt."""
        self.names_events = False
        """The stream's events have names: `/v1/responses`, `/v1/messages`."""
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
        await self._send({"type": "http.response.body", "body": body})
        self.finished = True

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
        self.bytes_sent += len(events)
        message = {"type": "http.response.body", "body": events, "more_body": True}
        if self._held:
            self._held.append(message)
            self._paused[on_writable] = None
            return False
        sending = Stepped(self._send(message), self._written)
        if sending.done:
            return True
        self._held.append(message)
        self._paused[on_writable] = None
        return False

    def _written(self, _: Stepped) -> None:
        """The oldest held message is out: send those that gathered behind it, then let the engines go on."""
        self._held.popleft()
        while self._held:
            if not Stepped(self._send(self._held[0]), self._written).done:
                return
            self._held.popleft()
        if self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)
        paused, self._paused = self._paused, {}
        for on_writable in paused:
            on_writable()

    async def end(self) -> None:
        if self._held:
            self._emptied = asyncio.get_running_loop().create_future()
            await self._emptied
        await self._send({"type": "http.response.body", "body": b""})
        self.finished = True

    async def error(self, error: ProxyError) -> None:
        """The error as a whole answer, or as the last event of a stream that has begun.

        A client that does not take it in time, or has part of another whole answer, loses its connection.
        """
        try:
            async with asyncio.timeout(LAST_S):
                await self._tell(error)
            stuck = self.started and not self.finished
        except TimeoutError:
            stuck = True
        if stuck:
            self._abort()

    async def _tell(self, error: ProxyError) -> None:
        if self.streaming:
            self.write_now(error_event(error, self.names_events), _nothing)
            await self.end()
            return
        if self.started:
            return
        if error.retry_after_s:
            self.extra.append((b"retry-after", b"%d" % error.retry_after_s))
        if error.status == HTTPStatus.REQUEST_TIMEOUT:
            self.extra.append((b"connection", b"close"))  # the rest of the request is not waited for
        await self.whole(error.status, error_body(error))


def _nothing() -> None:
    pass
