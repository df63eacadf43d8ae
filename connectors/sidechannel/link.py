"""What both ends of the side channel share: the wake-up pipe, the schedule of a thread, the fault hook."""

from __future__ import annotations

import heapq
import itertools
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

HEARTBEAT_INTERVAL_MS = 2000
HEARTBEAT_TIMEOUT_MS = 6000
"""A connection whose peer has gone silently is closed, and opened anew, after this long."""
QUEUED_FRAMES = 256
"""ZMQ's own bound per connection and direction."""


class FaultHook(Protocol):
    """Decides what happens to a message that is about to be sent; only tests install one."""

    def on_send(self, kind: str) -> Sequence[float]:
        """One delay in seconds per copy: `[0.0]` as usual, `[]` lose it, `[0.0, 0.2]` repeat it, `[1.5]` delay it.

        `kind` is the request's tag (`done`), or for its answer the tag and `.reply` (`done.reply`). Called once
        for every sending, so also when a request is repeated; from the thread of the server or client in question.
        """
        ...


class NoFaults:
    """Every message goes out once and at once."""

    def on_send(self, kind: str) -> Sequence[float]:
        return (0.0,)


class Waker:
    """Interrupts a thread that polls `fd`. `wake` may be called from any thread, also after `close`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._pending = False
        self._closed = False

    @property
    def fd(self) -> int:
        """Readable once woken."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Make `fd` readable."""
        with self._lock:
            if self._pending or self._closed:
                return
            self._pending = True
            self._writer.send(b"w")

    def drain(self) -> None:
        """Called by the woken thread before it looks at what it was woken for."""
        with self._lock:
            if self._pending:
                self._reader.recv(1)
                self._pending = False

    def close(self) -> None:
        """Free both descriptors."""
        with self._lock:
            self._closed = True
            self._reader.close()
            self._writer.close()


class Schedule:
    """Callbacks by monotonic instant. Not thread-safe: one thread owns it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, instant: float, callback: Callable[[], None]) -> None:
        """Run `callback` at the first `pop_due` at or after `instant`."""
        heapq.heappush(self._heap, (instant, next(self._order), callback))

    def next_instant(self) -> float | None:
        """When the earliest callback is due."""
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> list[Callable[[], None]]:
        """Remove and return what is due, earliest first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due


def zmq_address(host: str, port: int) -> str:
    """`tcp://host:port`, with brackets around an IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def poll_timeout_ms(now: float, instant: float | None, longest_s: float = 1.0) -> int:
    """How long to poll until `instant`, rounded up, at most `longest_s`."""
    wait_s = longest_s if instant is None else min(longest_s, max(0.0, instant - now))
    return int(wait_s * 1000) + (1 if wait_s > 0 else 0)
