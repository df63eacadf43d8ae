"""Mooncake's transfer engine behind the transport port.

Facts it is built on (mooncake-transfer-engine 0.3.13.post1 over TCP, shown by `tests/engine/test_transport*.py`):
more than ~2048 requests outstanding to one peer wedge that peer's connections until the engine object is rebuilt
(kvcache-ai/Mooncake#4209); -1 is the only error and does not say that nothing more will land; the synchronous
calls spin on a core and know no deadline but the library's own. So over TCP every piece is one asynchronous
operation whose status is polled between sleeps: faster, a third of the CPU, and the caller's deadline holds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ascend_pd.errors import LocalProtocolError, OperatorError, TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.transport.base import MemoryRange, nobody
from connectors.transport.endpoint import MAX_IN_FLIGHT, NO_OPERATION, Direction, Endpoint, EndpointClosingError
from connectors.transport.ranges import first_outside, fresh

PROTOCOLS = ("tcp", "rdma", "ascend")
WEDGED_AFTER = 3
"""Failures in a row, while the peer answers a probe, after which the endpoint is rebuilt."""
DRAIN_S = 45.0
"""Bound on waiting for calls inside the library; above MC_TRANSFER_TIMEOUT."""
POLL_MIN_S = 50e-6
POLL_MAX_S = 500e-6
_DEBIAN = {"libibverbs": "libibverbs1", "libnl": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1"}


class MooncakeTransport:
    """One per process. `connectors.transport.base.Transport` has the contract of each method.

    Args:
        host: the address under which peers reach this process.
        protocol: `tcp`, `rdma` or `ascend`; with `ascend` the calling thread's device must be set before this
            and before every `read` and `write`.

    Raises:
        OperatorError: the library or a system library is missing, or no endpoint can be opened.
    """

    def __init__(self, host: str, protocol: str = "tcp") -> None:
        if protocol not in PROTOCOLS:
            raise OperatorError(f"mooncake has no protocol {protocol!r}", f"use one of {', '.join(PROTOCOLS)}")
        self._host = host
        self._protocol = protocol
        self._library = load_library()
        self._lock = threading.Lock()
        """Guards the four fields below. Never held during a transfer."""
        self._ranges: tuple[MemoryRange, ...] = ()
        self._retired: list[Endpoint] = []
        self._sessions: set[str] = set()
        self._closed = False
        self._rotation = threading.Lock()
        """Held for the whole of a rotation: one at a time."""
        self._current = self._open()

    @property
    def name(self) -> str:
        return f"mooncake/{self._protocol}"

    @property
    def session(self) -> str:
        return self._current.session

    @property
    def efficient_piece_bytes(self) -> int:
        return 128 << 10

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        with self._lock:
            new = fresh(self._ranges, ranges)
            self._register_with(self._current, new)
            self._ranges = tuple(sorted((*self._ranges, *new), key=lambda r: r.address))

    def read(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(Direction.READ, peer, pieces, deadline, via)

    def write(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(Direction.WRITE, peer, pieces, deadline, via)

    def probe(self, peer: str) -> bool:
        with self._current.entered() as endpoint:
            return endpoint.contact(peer, float("inf"))

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        with self._rotation:
            if self._protocol == "tcp":
                self._replace(self._current)
                self._destroy_retired(spare_s, busy)
            else:
                # NPU and RDMA memory belongs to one endpoint at a time, so there the old one goes first.
                with self._lock:
                    self._retired.append(self._current)
                self._destroy_retired(spare_s, busy)
                self._replace(None)
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
        """A new engine under a name that this process never had."""
        for _ in range(16):
            engine = self._library.TransferEngine()
            if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, "") != 0:
                raise OperatorError(
                    f"mooncake cannot open a {self._protocol} endpoint on {self._host}",
                    "check that the address belongs to this host and that the protocol's driver is there",
                )
            endpoint = Endpoint(engine, self._host)
            if endpoint.session not in self._sessions:
                self._sessions.add(endpoint.session)
                return endpoint
        raise OperatorError(f"mooncake gives {self._host} no endpoint name that is new", "restart the engine")

    def _register_with(self, endpoint: Endpoint, ranges: Sequence[MemoryRange]) -> None:
        if not ranges:
            return
        code = endpoint.engine.batch_register_memory([r.address for r in ranges], [r.length for r in ranges])
        if code != 0:
            size = sum(r.length for r in ranges)
            raise OperatorError(
                f"mooncake/{self._protocol} cannot register {size} bytes in {len(ranges)} ranges (code {code})",
                "check the locked-memory limit (ulimit -l) and that the memory lies on this rank's device",
            )

    def _replace(self, expected: Endpoint | None) -> None:
        """Make a new endpoint current; the old one, if it still is `expected`, becomes retired."""
        with self._lock:
            if self._closed:
                raise LocalProtocolError("the transport is closed")
            if expected is not None and self._current is not expected:
                return
            endpoint = self._open()
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
        transfer = _Transfer(direction, peer, local.tolist(), remote.tolist(), pieces.length.tolist(), deadline)
        endpoint = self._current
        if via and endpoint.session != via:
            raise TransferError(f"{direction.value} with {peer}: endpoint {via} was replaced", quiesced=True)
        try:
            with endpoint.entered():
                if not endpoint.knows(peer) and not endpoint.contact(peer, deadline):
                    raise transfer.error("the peer's endpoint does not answer")
                if self._protocol == "tcp":
                    transfer.run_polled(endpoint)
                else:
                    transfer.run_blocking(endpoint)
                endpoint.succeeded(peer)
        except EndpointClosingError as error:
            raise TransferError(
                f"{direction.value} with {peer} was cut off by a fence", quiesced=transfer.submitted == 0
            ) from error
        except TransferError:
            self._after_failure(endpoint, peer)
            raise

    def _after_failure(self, endpoint: Endpoint, peer: str) -> None:
        """A peer that answers probes and fails every transfer is wedged: go on with a new endpoint."""
        try:
            with endpoint.entered():
                wedged = endpoint.failed(peer) >= WEDGED_AFTER and endpoint.contact(peer, time.monotonic() + 0.5)
        except EndpointClosingError:
            return
        if wedged and self._protocol == "tcp" and not self._closed:
            self._replace(endpoint)


class _Transfer:
    """One read or write on its way. `submitted` counts the pieces the library has taken."""

    def __init__(
        self,
        direction: Direction,
        peer: str,
        local: list[int],
        remote: list[int],
        length: list[int],
        deadline: float,
    ) -> None:
        self._direction = direction
        self._peer = peer
        self._local = local
        self._remote = remote
        self._length = length
        self._deadline = deadline
        self.submitted = 0

    def run_polled(self, endpoint: Endpoint) -> None:
        """Keep up to MAX_IN_FLIGHT single-piece operations going until all are done."""
        total = len(self._length)
        flying: deque[int] = deque()
        pause_s = POLL_MIN_S
        try:
            while self.submitted < total or flying:
                if self.submitted < total:
                    self._submit_some(endpoint, flying)
                self._check(endpoint)
                if self._reap(endpoint, flying) == 0:
                    time.sleep(pause_s)
                    pause_s = min(POLL_MAX_S, pause_s * 2)
        except TransferError:
            self._settle(endpoint, flying)
            raise

    def run_blocking(self, endpoint: Endpoint) -> None:
        """Batches through the synchronous call, the one that the NPU and RDMA builds are used with."""
        total = len(self._length)
        while self.submitted < total:
            self._check(endpoint)
            first = self.submitted
            count = endpoint.take(self._peer, min(total - first, MAX_IN_FLIGHT), self._deadline)
            if count == 0:
                raise self.error("found no place in flight before its deadline")
            self.submitted += count
            batch = (
                self._local[first : first + count],
                self._remote[first : first + count],
                self._length[first : first + count],
            )
            if self._direction is Direction.READ:
                code = endpoint.engine.batch_transfer_sync_read(self._peer, *batch)
            else:
                code = endpoint.engine.batch_transfer_sync_write(self._peer, *batch)
            endpoint.give(self._peer, count)
            if code != 0:
                raise self.error(f"failed (code {code}) in a batch of {count} pieces")

    def _submit_some(self, endpoint: Endpoint, flying: deque[int]) -> None:
        first = self.submitted
        wait_until = self._deadline if not flying else 0.0
        count = endpoint.take(self._peer, len(self._length) - first, wait_until)
        if count == 0 and not flying:
            self._check(endpoint)
            raise self.error("found no place in flight before its deadline")
        for index in range(first, first + count):
            piece = [self._local[index]], [self._remote[index]], [self._length[index]]
            if self._direction is Direction.READ:
                operation = endpoint.engine.batch_transfer_async_read(self._peer, *piece)
            else:
                operation = endpoint.engine.batch_transfer_async_write(self._peer, *piece)
            if operation in NO_OPERATION:
                endpoint.give(self._peer, first + count - index)
                raise self.error("could not be submitted: the peer's endpoint does not answer")
            flying.append(operation)
            self.submitted += 1

    def _reap(self, endpoint: Endpoint, flying: deque[int]) -> int:
        """Take finished operations from the front; returns how many."""
        done = 0
        code = 1
        while flying and (code := endpoint.engine.transfer_check_status(flying[0])) != 0:
            flying.popleft()
            done += 1
            if code != 1:
                break
        if done:
            endpoint.give(self._peer, done)
        if code not in (0, 1):
            raise self.error(f"failed (code {code}) after {self.submitted - len(flying) - 1} pieces")
        return done

    def _settle(self, endpoint: Endpoint, flying: deque[int]) -> None:
        """After a failure: collect what has ended already. The rest keeps its places until the endpoint dies."""
        ended = [op for op in flying if endpoint.engine.transfer_check_status(op) in (1, -1)]
        endpoint.give(self._peer, len(ended))

    def _check(self, endpoint: Endpoint) -> None:
        if endpoint.closing:
            raise EndpointClosingError(endpoint.session)
        if time.monotonic() > self._deadline:
            raise self.error(f"reached its deadline with {self.submitted} of {len(self._length)} pieces submitted")

    def error(self, what: str) -> TransferError:
        size = sum(self._length)
        message = (
            f"mooncake {self._direction.value} of {size} bytes in {len(self._length)} pieces, peer {self._peer}"
        )
        return TransferError(f"{message}: {what}", quiesced=self.submitted == 0)


def load_library() -> Any:
    """`mooncake.engine`.

    Raises:
        OperatorError: it, or a system library it needs, is missing; names the package to install.
    """
    try:
        return import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise OperatorError(
            "the Python package mooncake is not installed",
            "pip install mooncake-transfer-engine-non-cuda (CPU) or mooncake-transfer-engine-npu (Ascend)",
        ) from error
    except ImportError as error:
        reason = str(error)
        library = reason.split(":", 1)[0]
        package = next((deb for prefix, deb in _DEBIAN.items() if library.startswith(prefix)), "")
        fix = f"apt-get install {package}" if package else "install the package that provides it"
        raise OperatorError(f"mooncake cannot be loaded: {reason}", fix) from error
