"""HTTP/1.1 to an engine: an asyncio protocol over httptools, made for relaying token streams.

A connection carries one reception (one answer being received) after another. A reception is read piece by piece
or piped: then each read from the socket goes to a callback inside the event loop's own read callback, with no task
switch between engine and client. Deadlines are plain numbers that the pool's sweeper looks at, so that a token
costs no timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

HIGH_WATER_BYTES = 1 << 20
Sink = Callable[[bytes], None]
NEVER = float("inf")


class ConnectionLost(Exception):
    """The peer closed, or broke HTTP."""


class DeadlinePassed(Exception):
    """Nothing came in time."""


class Reception:
    """One answer being received. The parser calls the `on_…` methods.

    Attributes:
        head: ends when status and headers are here.
        deadline: monotonic instant after which the sweeper gives the answer up.
        got_bytes: whether any byte of the answer has come.
        fed, patience_s: when bytes have come since the sweeper looked, it puts the deadline off by so much.
        complete: the whole answer has been received (not necessarily taken).
    """

    __slots__ = (
        "_buffered",
        "_connection",
        "_error",
        "_fresh",
        "_pieces",
        "_piped",
        "_sink",
        "_waiter",
        "complete",
        "content_type",
        "deadline",
        "fed",
        "got_bytes",
        "head",
        "keep_alive",
        "parser",
        "patience_s",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self._connection: Connection | None = connection
        self.parser = httptools.HttpResponseParser(self)
        self.head: asyncio.Future[None] = connection.loop.create_future()
        self.status = 0
        self.content_type = ""
        self.deadline = NEVER
        self.got_bytes = False
        self.fed = False
        self.patience_s = 0.0
        self.complete = False
        self.keep_alive = False
        self._fresh: list[bytes] = []
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._waiter: asyncio.Future[None] | None = None
        self._piped: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._error: Exception | None = None

    async def piece(self) -> bytes:
        """The next bytes of the body, empty at its end.

        Raises:
            ConnectionLost, DeadlinePassed
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        piece = b"".join(self._pieces) if len(self._pieces) > 1 else self._pieces[0]
        self._pieces.clear()
        self._buffered = 0
        self.resume()
        return piece

    def pipe(self, sink: Sink) -> asyncio.Future[None]:
        """Hand every further piece to `sink`, at once; the future ends with the body, or with its error."""
        self._piped = asyncio.get_running_loop().create_future()
        self._sink = sink
        self.resume()  # before the sink may pause it for its own reasons
        while self._pieces:
            sink(self._pieces.popleft())
        self._buffered = 0
        if self._error is not None:
            self._piped.set_exception(self._error)
        elif self.complete:
            self._piped.set_result(None)
        return self._piped

    def pause(self) -> None:
        """Read no further: the client is slower than the engine."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        if self._connection is not None:
            self._connection.resume()

    def drop(self) -> None:
        """Close at once, unless the answer is complete; what was under way at the engine is aborted there."""
        if self._connection is not None:
            self._connection.drop()

    def feed(self, data: bytes) -> None:
        """Bytes from the socket.

        Raises:
            httptools.HttpParserError: broken HTTP.
        """
        self.got_bytes = self.fed = True
        self.parser.feed_data(data)
        fresh = self._fresh
        if fresh:
            piece = fresh[0] if len(fresh) == 1 else b"".join(fresh)
            fresh.clear()
            self._deliver(piece)
        if self.complete:
            self._end(None)

    def fail(self, error: Exception) -> None:
        """No more will come."""
        if not self.complete and self._error is None:
            self._end(error)

    def _deliver(self, piece: bytes) -> None:
        if self._sink is not None:
            self._sink(piece)
            return
        self._pieces.append(piece)
        self._buffered += len(piece)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        elif self._buffered > HIGH_WATER_BYTES:
            self.pause()

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._connection = None
        for future in (self.head, self._piped):
            if future is None or future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self.content_type = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self.parser.get_status_code()
        if status >= 200:
            self.status = status
            if not self.head.done():
                self.head.set_result(None)

    def on_body(self, body: bytes) -> None:
        self._fresh.append(body)

    def on_message_complete(self) -> None:
        if self.status >= 200:
            self.complete = True
            self.keep_alive = self.parser.should_keep_alive()


class Connection(asyncio.Protocol):
    """One socket; tells its pool after each answer that it may be reused or is dead."""

    __slots__ = ("_done", "_paused", "_transport", "current", "idle_since", "loop", "open", "uses")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.open = False
        self.uses = 0
        self.idle_since = 0.0
        self.current: Reception | None = None
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._done: Callable[[Connection], None] | None = None

    def send(self, head: bytes, body: bytes, done: Callable[[Connection], None]) -> Reception:
        """Write a request and begin to receive its answer."""
        self.uses += 1
        self._done = done
        reception = self.current = Reception(self)
        if self._transport is None or not self.open:
            reception.fail(ConnectionLost("closed before the request was sent"))
            self._release()
        elif len(body) < 1 << 16:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return reception

    def pause(self) -> None:
        if not self._paused and self._transport is not None and self.open:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None and self.open:
            self._paused = False
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.open = True

    def data_received(self, data: bytes) -> None:
        reception = self.current
        if reception is None:
            self.drop()
            return
        try:
            reception.feed(data)
        except httptools.HttpParserError as error:
            reception.fail(ConnectionLost(f"broke HTTP: {error}"))
            self.drop()
            return
        if reception.complete:
            if not reception.keep_alive:
                self.open = False
            self._release()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self.current is not None:
            self.current.fail(ConnectionLost("closed by the engine" if exc is None else str(exc)))
        self._release()

    def _release(self) -> None:
        self.current = None
        self.resume()
        done, self._done = self._done, None
        if done is not None:
            done(self)
