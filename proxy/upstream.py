"""HTTP to engines: pooled connections, deadlines, and errors translated into `LegFailed`."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict, deque
from collections.abc import Mapping
from urllib.parse import urlsplit

from proxy.errors import LegFailed
from proxy.http1 import NEVER, Connection, ConnectionLost, DeadlinePassed, Reception, Sink
from proxy.settings import TimeoutSettings

SWEEP_S = 0.25
"""How late a deadline may be noticed."""
IDLE_S = 4.0
"""Idle connections are given up sooner than uvicorn's default of 5 s closes them on the other side."""
MAX_IDLE_PER_HOST = 256

Origin = tuple[str, str, int]


class Answer:
    """An answer whose head has arrived. Closing it before its end makes the engine abort."""

    __slots__ = ("_loop", "_reception", "_who", "content_type", "status", "streaming")

    def __init__(self, reception: Reception, loop: asyncio.AbstractEventLoop, who: str) -> None:
        self._reception = reception
        self._loop = loop
        self._who = who
        self.status = reception.status
        self.content_type = reception.content_type or "application/json"
        self.streaming = self.content_type.startswith("text/event-stream")

    async def piece(self, timeout_s: float) -> bytes:
        """The next bytes, empty at the end.

        Raises:
            LegFailed: the connection broke or nothing came in time.
        """
        reception = self._reception
        reception.deadline = self._loop.time() + timeout_s
        try:
            return await reception.piece()
        except (ConnectionLost, DeadlinePassed) as error:
            raise translated(error, self._who) from error
        finally:
            reception.deadline = NEVER

    async def read(self, timeout_s: float) -> bytes:
        """The whole body; `timeout_s` bounds each wait for more.

        Raises:
            LegFailed: as `piece`.
        """
        pieces = []
        while piece := await self.piece(timeout_s):
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def pipe(self, sink: Sink, timeout_s: float) -> None:
        """Hand all further pieces to `sink`, inside the read callback: it must neither raise nor block.

        `timeout_s` bounds the time between two pieces.

        Raises:
            LegFailed: as `piece`.
        """
        self._expect(timeout_s)
        try:
            await self._reception.pipe(sink)
        except (ConnectionLost, DeadlinePassed) as error:
            raise translated(error, self._who) from error

    def _expect(self, timeout_s: float) -> None:
        self._reception.patience_s = timeout_s
        self._reception.deadline = self._loop.time() + timeout_s

    def pause(self) -> None:
        """Take no more pieces for now; no deadline runs meanwhile."""
        self._reception.deadline = NEVER
        self._reception.patience_s = 0.0
        self._reception.pause()

    def resume(self, timeout_s: float) -> None:
        """Take pieces again."""
        self._expect(timeout_s)
        self._reception.resume()

    def close(self) -> None:
        """Let go; an answer received to its end has given its connection back already."""
        self._reception.drop()


def translated(error: Exception, who: str) -> LegFailed:
    """The leg's error for a connection's error."""
    if isinstance(error, DeadlinePassed):
        return LegFailed(f"{who} did not answer in time", 504, kind="timeout")
    return LegFailed(f"{who} broke the connection: {error}", kind="connection_lost")


class Upstream:
    """Connections to all engines. Owned by one event loop."""

    def __init__(self, timeouts: TimeoutSettings, tls: ssl.SSLContext | None = None) -> None:
        self._timeouts = timeouts
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._idle: defaultdict[Origin, deque[Connection]] = defaultdict(deque)
        self._busy: set[Connection] = set()
        self._origins: dict[str, tuple[Origin, str]] = {}
        self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)
        self._closed = False

    async def post(
        self, base: str, path: str, body: bytes, headers: Mapping[str, str], who: str, timeout_s: float
    ) -> Answer:
        """Send and wait for the head of the answer.

        Raises:
            LegFailed: no connection, or no head within `timeout_s`.
        """
        return await self._exchange("POST", base, path, body, headers, who, timeout_s)

    async def get(
        self, base: str, path: str, who: str, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """As `post`."""
        return await self._exchange("GET", base, path, b"", headers or {}, who, timeout_s)

    async def _exchange(
        self,
        method: str,
        base: str,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        who: str,
        timeout_s: float,
    ) -> Answer:
        origin, host = self._origin(base, who)
        connection = self._take_idle(origin) or await self._connect(origin, who)
        reused = connection.uses > 0
        head = request_head(method, path, host, headers, len(body))
        self._busy.add(connection)
        reception = connection.send(head, body, lambda c: self._give_back(origin, c))
        reception.deadline = self._loop.time() + timeout_s
        try:
            await reception.head
        except (ConnectionLost, DeadlinePassed) as error:
            failed = translated(error, who)
            if reused and not reception.got_bytes and isinstance(error, ConnectionLost):
                failed.blame = False  # the engine closed an idle connection just as it was taken
            raise failed from error
        except asyncio.CancelledError:
            reception.drop()
            raise
        return Answer(reception, self._loop, who)

    def _origin(self, base: str, who: str) -> tuple[Origin, str]:
        known = self._origins.get(base)
        if known is None:
            try:
                parts = urlsplit(base)
                port = parts.port or (443 if parts.scheme == "https" else 80)
                known = (parts.scheme, parts.hostname or "", port), parts.netloc.rpartition("@")[2]
            except ValueError as error:
                raise LegFailed(f"{who} cannot be reached", kind="connect_failed") from error
            self._origins[base] = known
        return known

    def _take_idle(self, origin: Origin) -> Connection | None:
        idle = self._idle[origin]
        while idle:
            connection = idle.pop()
            if connection.open and self._loop.time() - connection.idle_since < IDLE_S:
                return connection
            connection.drop()
        return None

    async def _connect(self, origin: Origin, who: str) -> Connection:
        scheme, host, port = origin
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                _, connection = await self._loop.create_connection(
                    lambda: Connection(self._loop),
                    host,
                    port,
                    ssl=(self._tls or ssl.create_default_context()) if scheme == "https" else None,
                )
        except (TimeoutError, OSError, ValueError, OverflowError) as error:
            # The resolver says UnicodeError (a ValueError) to a name and OverflowError to a port that cannot be.
            raise LegFailed(f"{who} cannot be reached", kind="connect_failed") from error
        return connection

    def _give_back(self, origin: Origin, connection: Connection) -> None:
        self._busy.discard(connection)
        idle = self._idle[origin]
        if connection.open and len(idle) < MAX_IDLE_PER_HOST and not self._closed:
            connection.idle_since = self._loop.time()
            idle.append(connection)
        else:
            connection.drop()

    def _sweep(self) -> None:
        now = self._loop.time()
        for connection in list(self._busy):
            reception = connection.current
            if reception is None:
                continue
            if reception.fed and reception.patience_s:
                reception.fed = False
                reception.deadline = now + reception.patience_s
            elif reception.deadline < now:
                reception.fail(DeadlinePassed())
                connection.drop()
        for idle in self._idle.values():
            while idle and (not idle[0].open or now - idle[0].idle_since > IDLE_S):
                idle.popleft().drop()
        if not self._closed:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._sweeper.cancel()
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.drop()
        await asyncio.sleep(0)


def request_head(method: str, path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """The request up to its body.

    Raises:
        ValueError: a header value would end the line.
    """
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):
        raise ValueError("a header contains a line break")
    length_line = f"content-length: {length}\r\n" if length or method == "POST" else ""
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{text}{length_line}\r\n"
    return head.encode("latin-1")
