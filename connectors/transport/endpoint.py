"""One engine of a Mooncake-like library: who uses it, what is in flight per peer, and its certain end.

The library frees its sockets and buffers when the engine object dies, and only then is it sure that nothing more
lands. So the object is referenced from one attribute here and nowhere else (never from a local of a frame that an
exception may keep alive), and `destroy` checks that it is gone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ascend_pd.errors import LocalProtocolError
from connectors.transport.own_sockets import cut_connections, set_accept_timeout

MAX_IN_FLIGHT = 1024
"""Requests outstanding to one peer; the library wedges a peer's connections above ~2048."""

NO_OPERATION = (0, (1 << 64) - 1)
"""What the library returns instead of an operation when it submitted nothing."""
CONTACT_S = 3.0
"""Longest wait for the first answer of a peer."""


class Direction(Enum):
    """Which way the bytes go, seen from here."""

    READ = "read"
    WRITE = "write"


@dataclass(slots=True)
class PeerState:
    """What this endpoint has in flight towards one peer."""

    free: int = MAX_IN_FLIGHT
    failures_in_a_row: int = 0
    known: bool = False
    last_used: float = field(default_factory=time.monotonic)


class EndpointClosingError(Exception):
    """The endpoint is being destroyed under a transfer."""


class Endpoint:
    """Thread safe. Calls into the engine happen between `entered()`'s enter and exit."""

    MAX_PEERS = 1024

    def __init__(self, engine: Any, host: str, end_engine: Callable[[Any], None]) -> None:
        self._engine: Any = engine
        self._end_engine = end_engine
        self._host = host
        self._port: int = engine.get_rpc_port()
        self.session = f"{host}:{self._port}"
        self._changed = threading.Condition()
        self._users = 0
        self._closing = False
        self._peers: dict[str, PeerState] = {}
        self._contacting: list[str] = []

    @property
    def engine(self) -> Any:
        """Use as `endpoint.engine.call(...)`; do not keep it."""
        return self._engine

    @property
    def closing(self) -> bool:
        return self._closing

    @contextmanager
    def entered(self) -> Iterator[Endpoint]:
        """Count the caller as a user.

        Raises:
            EndpointClosingError: it is too late for that.
        """
        with self._changed:
            if self._closing:
                raise EndpointClosingError(self.session)
            self._users += 1
        try:
            yield self
        finally:
            with self._changed:
                self._users -= 1
                self._changed.notify_all()

    def contact(self, peer: str, deadline: float, *, open_segment: bool) -> bool:
        """Whether the peer's endpoint answers, asked at most until `deadline` and for CONTACT_S.

        With `open_segment` what the library must know of the peer is fetched too. The library itself would wait
        for a minute, see `own_sockets`.
        """
        patience_s = min(CONTACT_S, deadline - time.monotonic())
        if patience_s <= 0:
            return False
        timer = threading.Timer(patience_s, cut_connections, [_port(peer)])
        timer.name = f"contact-{peer}"
        timer.daemon = True
        with self._changed:
            self._contacting.append(peer)
        timer.start()
        try:
            if self._engine.send_probe(peer) != 0:
                return False
            if open_segment and not self.knows(peer) and not self._open_segment(peer):
                return False
            with self._changed:
                self._peer(peer).known = True
            return True
        finally:
            timer.cancel()
            with self._changed:
                self._contacting.remove(peer)

    def _open_segment(self, peer: str) -> bool:
        """An empty transfer, so that the first real one finds the peer's segment open and cannot hang on it."""
        operation = self._engine.batch_transfer_async_read(peer, [0], [0], [0])
        if operation in NO_OPERATION:
            return False
        return bool(self._engine.transfer_check_status(operation) == 1)

    def knows(self, peer: str) -> bool:
        """Whether the peer has answered on this endpoint."""
        with self._changed:
            return self._peer(peer).known

    def take(self, peer: str, wanted: int, deadline: float) -> int:
        """Up to `wanted` places in flight to `peer`, waiting until `deadline` for the first; 0 if none came."""
        with self._changed:
            state = self._peer(peer)
            while state.free == 0 and not self._closing:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            taken = min(wanted, state.free)
            state.free -= taken
            return taken

    def give(self, peer: str, count: int) -> None:
        """Return places. Those of operations that never ended are not returned: the library still counts them."""
        with self._changed:
            self._peer(peer).free += count
            self._changed.notify_all()

    def failed(self, peer: str) -> int:
        """Count a failure; returns how many there were in a row."""
        with self._changed:
            state = self._peer(peer)
            state.failures_in_a_row += 1
            return state.failures_in_a_row

    def succeeded(self, peer: str) -> None:
        with self._changed:
            self._peer(peer).failures_in_a_row = 0

    def destroy(self, spare_until: float, busy: Callable[[], bool], drain_s: float) -> None:
        """Wait until `spare_until` for users and for what `busy` stands for, make users leave, destroy the engine.

        Raises:
            LocalProtocolError: a call inside the library did not come back within `drain_s`, or something still
                refers to the engine. It may still land bytes; nothing was destroyed.
        """
        while (self._users > 0 or busy()) and (remaining := spare_until - time.monotonic()) > 0:
            time.sleep(min(0.005, remaining))
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            waiting = list(self._contacting)
        for peer in waiting:
            cut_connections(_port(peer))
        with self._changed:
            unused = self._changed.wait_for(lambda: self._users == 0, drain_s)
        if not unused:
            raise LocalProtocolError(f"a call on endpoint {self.session} did not return within {drain_s:g} s")
        if self._engine is None:
            return
        if set_accept_timeout(self._host, self._port, 0.001):
            time.sleep(0.02)  # for the thread to come round; without the interpreter's lock
        self._end_engine(self._engine)
        witness = weakref.ref(self._engine)
        self._engine = None
        if witness() is not None:
            raise LocalProtocolError(f"endpoint {self.session} is still referenced and was not destroyed")

    def _peer(self, peer: str) -> PeerState:
        state = self._peers.get(peer)
        if state is None:
            if len(self._peers) >= self.MAX_PEERS:
                idle = [k for k, v in self._peers.items() if v.free == MAX_IN_FLIGHT]
                for key in sorted(idle, key=lambda k: self._peers[k].last_used)[: self.MAX_PEERS // 2]:
                    del self._peers[key]
            state = self._peers[peer] = PeerState()
        state.last_used = time.monotonic()
        return state


def _port(peer: str) -> int:
    return int(peer.rsplit(":", 1)[1])
