"""What the transports over one-sided libraries share: endpoints that come and go, the memory registered with each,
and transfers bound to the endpoint they began on.

A library is a subclass: how its engine is opened, registers, moves, and whether two endpoints may hold the same
memory at once.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from ascend_pd.errors import LocalProtocolError, OperatorError, TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.transport.base import MemoryRange, nobody
from connectors.transport.endpoint import Direction, Endpoint, EndpointClosingError
from connectors.transport.ranges import first_outside, fresh
from connectors.transport.transfer import Transfer

DRAIN_S = 45.0
"""Bound on waiting for calls inside a library; above MC_TRANSFER_TIMEOUT."""


class EngineTransport(ABC):
    """One per process. `connectors.transport.base.Transport` has the contract of each method.

    Args:
        host: the address under which peers reach this process.
        replaces_in_place: memory can belong to one endpoint at a time, so a fence destroys the old one first.

    Raises:
        OperatorError: no endpoint can be opened.
    """

    def __init__(self, host: str, *, replaces_in_place: bool) -> None:
        self._host = host
        self._replaces_in_place = replaces_in_place
        self._lock = threading.Lock()
        """Guards the four fields below. Never held during a transfer."""
        self._ranges: tuple[MemoryRange, ...] = ()
        self._retired: list[Endpoint] = []
        self._sessions: set[str] = set()
        self._closed = False
        self._rotation = threading.Lock()
        """Held for the whole of a rotation: one at a time."""
        self._current = self._open()

    # -- what a library is

    @property
    @abstractmethod
    def name(self) -> str:
        """As in `Transport`."""

    @abstractmethod
    def _open_engine(self) -> Any:
        """A new, initialised engine object. Raises OperatorError."""

    @abstractmethod
    def _register_with(self, endpoint: Endpoint, ranges: Sequence[MemoryRange]) -> None:
        """Register with one endpoint. Raises OperatorError."""

    @abstractmethod
    def _carry_out(self, transfer: Transfer, endpoint: Endpoint) -> None:
        """Move it. Raises TransferError or EndpointClosingError."""

    @abstractmethod
    def probe(self, peer: str) -> bool:
        """As in `Transport`."""

    @abstractmethod
    def _end_engine(self, engine: Any) -> None:
        """Called before the last reference to an engine goes."""

    @abstractmethod
    def _after_failure(self, endpoint: Endpoint, peer: str) -> None:
        """Called after a transfer failed."""

    # -- the port

    @property
    def session(self) -> str:
        return self._current.session

    @property
    def efficient_piece_bytes(self) -> int:
        return 64 << 10

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        with self._lock:
            new = fresh(self._ranges, ranges)
            self._register_with(self._current, new)
            self._ranges = tuple(sorted((*self._ranges, *new), key=lambda r: r.address))

    def read(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(Direction.READ, peer, pieces, deadline, via)

    def write(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(Direction.WRITE, peer, pieces, deadline, via)

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        with self._rotation:
            if self._replaces_in_place:
                with self._lock:
                    self._retired.append(self._current)
                self._destroy_retired(spare_s, busy)
                self._replace(None)
            else:
                self._replace(self._current)
                self._destroy_retired(spare_s, busy)
            return self.session

    def close(self) -> None:
        with self._rotation:
            with self._lock:
                if self._closed:
                    return
                self._closed = True
                self._retired.append(self._current)
            self._destroy_retired(0.0, nobody)

    # -- endpoints

    def _open(self) -> Endpoint:
        """An endpoint under a name that this process never had."""
        for _ in range(16):
            endpoint = Endpoint(self._open_engine(), self._host, self._end_engine)
            if endpoint.session not in self._sessions:
                self._sessions.add(endpoint.session)
                return endpoint
        raise OperatorError(f"{self.name} gives {self._host} no endpoint name that is new", "restart the engine")

    def _replace(self, expected: Endpoint | None) -> None:
        """Make a new endpoint current; the old one, if it still is `expected`, becomes retired."""
        with self._lock:
            if self._closed:
                raise LocalProtocolError("the transport is closed")
            if expected is not None and self._current is not expected:
                return
            endpoint = self._open()
            if self._ranges:
                self._register_with(endpoint, self._ranges)
            if expected is not None:
                self._retired.append(expected)
            self._current = endpoint

    def _destroy_retired(self, spare_s: float, busy: Callable[[], bool]) -> None:
        with self._lock:
            retired = list(self._retired)
        until = time.monotonic() + spare_s
        for endpoint in retired:
            endpoint.destroy(until, busy, DRAIN_S)
            with self._lock:
                self._retired.remove(endpoint)

    # -- transfers

    def _endpoint(self, via: str) -> Endpoint | None:
        """The current endpoint, or with `via` the one of that name while a rotation still spares it."""
        if not via:
            return self._current
        with self._lock:
            return next((e for e in (self._current, *self._retired) if e.session == via and not e.closing), None)

    def _move(self, direction: Direction, peer: str, pieces: Pieces, deadline: float, via: str) -> None:
        if len(pieces) == 0:
            return
        local, remote = pieces.sink, pieces.source
        if direction is Direction.WRITE:
            local, remote = remote, local
        # TCP accepts any local address and only NPUs and RDMA would object, so this is where a bug shows.
        outside = first_outside(self._ranges, local, pieces.length)
        if outside is not None:
            raise LocalProtocolError(
                f"piece {outside} at {int(local[outside]):#x} lies outside the registered memory"
            )
        transfer = Transfer(
            self.name, direction, peer, local.tolist(), remote.tolist(), pieces.length.tolist(), deadline
        )
        endpoint = self._endpoint(via)
        if endpoint is None:
            raise TransferError(f"{direction.value} with {peer}: endpoint {via} was replaced", quiesced=True)
        try:
            with endpoint.entered():
                self._carry_out(transfer, endpoint)
                endpoint.succeeded(peer)
        except EndpointClosingError as error:
            raise TransferError(
                f"{direction.value} with {peer} was cut off by a fence", quiesced=transfer.submitted == 0
            ) from error
        except TransferError:
            self._after_failure(endpoint, peer)
            raise
