"""What the metaserver remembers: reservations, the ends of former ones, live engines. Pure; time is an argument.

    post ──→ live ──(release, or the deadline)──→ ended ──(`ended_seconds`)──→ forgotten

An ended transfer stays ended: a late copy of its post does not bring it back, and who asks for it learns why.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from ascend_pd.wire.params import Reservation
from ascend_pd.wire.registry import EngineEntry


class PostOutcome(StrEnum):
    """What became of a posted reservation."""

    ACCEPTED = "accepted"
    KNOWN = "known"
    """The same had been posted before; its deadline is that of the newest copy."""
    CONFLICT = "conflict"
    """Another reservation has this transfer id."""
    ENDED = "ended"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Ended:
    """A reservation that is no more."""

    reason: str


@dataclass(slots=True)
class _Live:
    reservation: Reservation
    num_bytes: int
    expires: float


@dataclass(slots=True)
class _Grave:
    ended: Ended
    forget: float


class ReservationStore:
    """Reservations by transfer id. Every method first lets go of what is due at `now` (monotonic seconds).

    Args:
        max_reservations, max_bytes: beyond either, posts are refused as FULL; bytes as they were posted.
        max_ended: ended ones remembered; the oldest is forgotten first.
        ended_seconds: how long they are remembered.
    """

    def __init__(
        self, max_reservations: int, max_bytes: int, max_ended: int = 65536, ended_seconds: float = 300.0
    ) -> None:
        self._max_reservations = max_reservations
        self._max_bytes = max_bytes
        self._max_ended = max_ended
        self._ended_seconds = ended_seconds
        self._live: dict[str, _Live] = {}
        self._ended: OrderedDict[str, _Grave] = OrderedDict()
        self._expiries: list[tuple[float, str]] = []
        self.num_bytes = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._live)

    def post(self, reservation: Reservation, num_bytes: int, now: float) -> PostOutcome:
        """Remember a reservation until its deadline."""
        self.expire(now)
        transfer_id = reservation.transfer_id
        if transfer_id in self._ended:
            return PostOutcome.ENDED
        live = self._live.get(transfer_id)
        if live is None:
            if len(self._live) >= self._max_reservations or self.num_bytes + num_bytes > self._max_bytes:
                return PostOutcome.FULL
            live = self._live[transfer_id] = _Live(reservation, num_bytes, 0.0)
            self.num_bytes += num_bytes
            outcome = PostOutcome.ACCEPTED
        elif _without_deadline(live.reservation) == _without_deadline(reservation):
            outcome = PostOutcome.KNOWN
        else:
            return PostOutcome.CONFLICT
        live.expires = now + reservation.deadline_seconds
        self._note_expiry(transfer_id, live)
        return outcome

    def find(self, transfer_id: str, now: float) -> Reservation | Ended | None:
        """The reservation with what is left of its deadline, or why it ended, or None when it is not known."""
        self.expire(now)
        live = self._live.get(transfer_id)
        if live is not None:
            return msgspec.structs.replace(live.reservation, deadline_seconds=live.expires - now)
        grave = self._ended.get(transfer_id)
        return grave.ended if grave else None

    def release(self, transfer_id: str, reason: str, now: float) -> bool:
        """End a reservation, also one whose post has yet to arrive; False when it had ended before."""
        self.expire(now)
        if transfer_id in self._ended:
            return False
        self._end(transfer_id, reason, now)
        return True

    def expire(self, now: float) -> None:
        """End what is past its deadline, forget what ended long ago."""
        while self._expiries and self._expiries[0][0] <= now:
            _, transfer_id = heapq.heappop(self._expiries)
            live = self._live.get(transfer_id)
            if live is not None and live.expires <= now:
                self._end(transfer_id, "its deadline passed", now)
                self.num_expired += 1
        while self._ended and next(iter(self._ended.values())).forget <= now:
            self._ended.popitem(last=False)

    def _end(self, transfer_id: str, reason: str, now: float) -> None:
        live = self._live.pop(transfer_id, None)
        if live is not None:
            self.num_bytes -= live.num_bytes
        self._ended[transfer_id] = _Grave(Ended(reason), now + self._ended_seconds)
        if len(self._ended) > self._max_ended:
            self._ended.popitem(last=False)

    def _note_expiry(self, transfer_id: str, live: _Live) -> None:
        heapq.heappush(self._expiries, (live.expires, transfer_id))
        # Copies of a post leave stale entries behind: rebuild before they are more than a few per reservation.
        if len(self._expiries) > 64 + 4 * len(self._live):
            self._expiries = [(entry.expires, key) for key, entry in self._live.items()]
            heapq.heapify(self._expiries)


class EngineStore:
    """Engines that have been heard of within their TTL."""

    def __init__(self, max_engines: int) -> None:
        self._max_engines = max_engines
        self._engines: dict[str, tuple[EngineEntry, float]] = {}

    def post(self, entry: EngineEntry, now: float) -> PostOutcome:
        """Remember an engine for its TTL; the newest entry of an id counts."""
        self._expire(now)
        known = self._engines.get(entry.engine_id)
        if known is None and len(self._engines) >= self._max_engines:
            return PostOutcome.FULL
        self._engines[entry.engine_id] = (entry, now + entry.ttl_seconds)
        return PostOutcome.KNOWN if known and known[0].epoch == entry.epoch else PostOutcome.ACCEPTED

    def remove(self, engine_id: str, epoch: str) -> bool:
        """Forget this life of an engine; a newer one stays."""
        known = self._engines.get(engine_id)
        if known is None or known[0].epoch != epoch:
            return False
        del self._engines[engine_id]
        return True

    def live(self, now: float, role: str = "") -> list[EngineEntry]:
        """Engines alive at `now`, of one role or all, by id, with what is left of their TTL."""
        self._expire(now)
        return [
            msgspec.structs.replace(entry, ttl_seconds=expires - now)
            for _, (entry, expires) in sorted(self._engines.items())
            if not role or entry.role == role
        ]

    def _expire(self, now: float) -> None:
        for engine_id in [key for key, (_, expires) in self._engines.items() if expires <= now]:
            del self._engines[engine_id]


def _without_deadline(reservation: Reservation) -> Reservation:
    # A copy sent later has less time left; everything else must be the same.
    return msgspec.structs.replace(reservation, deadline_seconds=1.0)
