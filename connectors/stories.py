"""What became of each transfer, kept for whoever asks by transfer id (the proxy, for its clients)."""

from __future__ import annotations

import threading
from collections import OrderedDict

from ascend_pd.wire.messages import Story

_UNKNOWN = Story(known=False)


class StoryBook:
    """The last `capacity` transfers. Thread-safe.

    The first reason of a transfer stays: what comes after it is a consequence.
    """

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._stories: OrderedDict[str, Story] = OrderedDict()
        self._lock = threading.Lock()

    def record(
        self,
        transfer_id: str,
        state: str,
        *,
        reason: str = "",
        timings_ms: dict[str, float] | None = None,
        bytes_moved: int = 0,
    ) -> None:
        """Note where the transfer stands now; timings and bytes of several ranks add up to the slowest and the
        sum."""
        with self._lock:
            old = self._stories.pop(transfer_id, _UNKNOWN)
            timings = dict(old.timings_ms)
            for name, value in (timings_ms or {}).items():
                timings[name] = max(value, timings.get(name, 0.0))
            self._stories[transfer_id] = Story(
                known=True,
                state=state,
                reason=old.reason or reason,
                timings_ms=timings,
                bytes_moved=old.bytes_moved + bytes_moved,
            )
            while len(self._stories) > self._capacity:
                self._stories.popitem(last=False)

    def tell(self, transfer_id: str) -> Story:
        """The story, with `known=False` for a transfer that nobody recorded or that is forgotten."""
        with self._lock:
            return self._stories.get(transfer_id, _UNKNOWN)
