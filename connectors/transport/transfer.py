"""One read or write through an engine of a Mooncake-like library: pieces submitted within bounds and awaited."""

from __future__ import annotations

import time
from collections import deque

from ascend_pd.errors import TransferError
from connectors.transport.endpoint import MAX_IN_FLIGHT, NO_OPERATION, Direction, Endpoint, EndpointClosingError

POLL_MIN_S = 50e-6
POLL_MAX_S = 500e-6


class Transfer:
    """One read or write on its way. `submitted` counts the pieces the library has taken."""

    def __init__(
        self,
        library: str,
        direction: Direction,
        peer: str,
        local: list[int],
        remote: list[int],
        length: list[int],
        deadline: float,
    ) -> None:
        self._library = library
        self.direction = direction
        self.peer = peer
        self._local = local
        self._remote = remote
        self._length = length
        self.deadline = deadline
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
            count = endpoint.take(self.peer, min(total - first, MAX_IN_FLIGHT), self.deadline)
            if count == 0:
                raise self.error("found no place in flight before its deadline")
            self.submitted += count
            batch = (
                self._local[first : first + count],
                self._remote[first : first + count],
                self._length[first : first + count],
            )
            if self.direction is Direction.READ:
                code = endpoint.engine.batch_transfer_sync_read(self.peer, *batch)
            else:
                code = endpoint.engine.batch_transfer_sync_write(self.peer, *batch)
            endpoint.give(self.peer, count)
            if code != 0:
                raise self.error(f"failed (code {code}) in a batch of {count} pieces")

    def _submit_some(self, endpoint: Endpoint, flying: deque[int]) -> None:
        first = self.submitted
        wait_until = self.deadline if not flying else 0.0
        count = endpoint.take(self.peer, len(self._length) - first, wait_until)
        if count == 0 and not flying:
            self._check(endpoint)
            raise self.error("found no place in flight before its deadline")
        for index in range(first, first + count):
            piece = [self._local[index]], [self._remote[index]], [self._length[index]]
            if self.direction is Direction.READ:
                operation = endpoint.engine.batch_transfer_async_read(self.peer, *piece)
            else:
                operation = endpoint.engine.batch_transfer_async_write(self.peer, *piece)
            if operation in NO_OPERATION:
                endpoint.give(self.peer, first + count - index)
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
            endpoint.give(self.peer, done)
        if code not in (0, 1):
            raise self.error(f"failed (code {code}) after {self.submitted - len(flying) - 1} pieces")
        return done

    def _settle(self, endpoint: Endpoint, flying: deque[int]) -> None:
        """After a failure: collect what has ended already. The rest keeps its places until the endpoint dies."""
        ended = [op for op in flying if endpoint.engine.transfer_check_status(op) in (1, -1)]
        endpoint.give(self.peer, len(ended))

    def _check(self, endpoint: Endpoint) -> None:
        if endpoint.closing:
            raise EndpointClosingError(endpoint.session)
        if time.monotonic() > self.deadline:
            raise self.error(f"reached its deadline with {self.submitted} of {len(self._length)} pieces submitted")

    def error(self, what: str) -> TransferError:
        size = sum(self._length)
        message = f"{self._library} {self.direction.value} of {size} bytes in {len(self._length)} pieces"
        return TransferError(f"{message}, peer {self.peer}: {what}", quiesced=self.submitted == 0)
