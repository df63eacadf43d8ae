"""Waiting for reservations on the event loop: no thread and no polling per wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ascend_pd.wire.params import Reservation
from metaserver.store import Ended, PostOutcome, ReservationStore


class TooManyWaitsError(Exception):
    """The bound on waits is reached, or the server is stopping."""


class Rendezvous:
    """A `ReservationStore` that wakes who waits. Belongs to one event loop."""

    def __init__(
        self, store: ReservationStore, max_waits: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.store = store
        self.num_waits = 0
        self._max_waits = max_waits
        self._clock = clock
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._closed = False

    def post(self, reservation: Reservation, num_bytes: int) -> PostOutcome:
        """Remember a reservation and wake who waits for it."""
        outcome = self.store.post(reservation, num_bytes, self._clock())
        if outcome is PostOutcome.ACCEPTED:
            self._wake(reservation.transfer_id)
        return outcome

    def release(self, transfer_id: str, reason: str) -> bool:
        """End a reservation and tell who waits for it; False when it had ended before."""
        released = self.store.release(transfer_id, reason, self._clock())
        self._wake(transfer_id)
        return released

    async def wait(self, transfer_id: str, wait_s: float) -> Reservation | Ended | None:
        """The reservation, or why it ended, as soon as either is known; None after `wait_s`.

        Raises:
            TooManyWaitsError: no room for another wait.
        """
        found = self.store.find(transfer_id, self._clock())
        if found is not None or wait_s <= 0:
            return found
        if self._closed or self.num_waits >= self._max_waits:
            raise TooManyWaitsError
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.setdefault(transfer_id, set()).add(future)
        self.num_waits += 1
        try:
            await asyncio.wait((future,), timeout=wait_s)
        finally:
            self.num_waits -= 1
            waiters = self._waiters.get(transfer_id, set())
            waiters.discard(future)
            if not waiters:
                self._waiters.pop(transfer_id, None)
        return self.store.find(transfer_id, self._clock())

    def close(self) -> None:
        """End all waits as if their time were up, so that a stopping server need not wait for them."""
        self._closed = True
        for transfer_id in list(self._waiters):
            self._wake(transfer_id)

    def _wake(self, transfer_id: str) -> None:
        for future in self._waiters.pop(transfer_id, ()):
            if not future.done():
                future.set_result(None)
