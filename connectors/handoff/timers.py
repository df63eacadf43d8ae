"""Deadlines by transfer: set, moved, taken when they are due. Pure; `now` is an argument."""

from __future__ import annotations

import heapq
from math import inf


class Timers:
    """One deadline per key, on a monotonic clock in seconds.

    Moving a deadline later costs nothing until the old one comes up, so renewals do not grow the heap.
    """

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []
        self._queued: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._due)

    def is_set(self, key: str) -> bool:
        """Whether `key` has a deadline to come."""
        return key in self._due

    def set(self, key: str, deadline: float) -> None:
        """`inf` clears it."""
        if deadline == inf:
            self._due.pop(key, None)
            return
        self._due[key] = deadline
        if deadline < self._queued.get(key, inf):
            self._queued[key] = deadline
            heapq.heappush(self._heap, (deadline, key))

    def next(self) -> float:
        """The earliest deadline, `inf` when there is none."""
        self._settle()
        return self._heap[0][0] if self._heap else inf

    def take(self, now: float) -> list[str]:
        """The keys that are due, earliest first; their deadlines are gone afterwards."""
        due = []
        while self.next() <= now:
            _, key = heapq.heappop(self._heap)
            del self._queued[key]
            del self._due[key]
            due.append(key)
        return due

    def _settle(self) -> None:
        """Make the head of the heap a real deadline."""
        while self._heap:
            when, key = self._heap[0]
            actual = self._due.get(key, inf)
            if when == actual and when == self._queued.get(key):
                return
            heapq.heappop(self._heap)
            if when != self._queued.get(key):
                continue  # an older entry of a deadline that had moved earlier
            del self._queued[key]
            if actual != inf:
                self._queued[key] = actual
                heapq.heappush(self._heap, (actual, key))
