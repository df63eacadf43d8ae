"""A circuit breaker per instance. Pure: the instant is an argument.

closed --failures--> open --pause over--> half-open --success--> closed
                       ^------------failure (longer pause)--'

In half-open one request at a time is let through as the trial.
"""

from __future__ import annotations

from enum import StrEnum


class BreakerState(StrEnum):
    """Whether requests may go through."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Counts failures in a row. Only what is the instance's own fault is reported here; a 4xx never is."""

    __slots__ = (
        "_failures",
        "_first_pause_s",
        "_longest_pause_s",
        "_open_until",
        "_pause_s",
        "_threshold",
        "_trial",
    )

    def __init__(self, threshold: int = 5, first_pause_s: float = 5.0, longest_pause_s: float = 60.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._failures = 0
        self._pause_s = first_pause_s
        self._open_until = 0.0
        self._trial = False

    def state(self, now: float) -> BreakerState:
        """The state at this instant."""
        if self._failures < self._threshold:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """May a request go through? Asking changes nothing."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._trial)

    def begin(self, now: float) -> None:
        """A request goes through; in half-open it is the trial."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._trial = True

    def abandoned(self) -> None:
        """A request ended without a verdict (the client left): the next one may be the trial."""
        self._trial = False

    def succeeded(self) -> None:
        """The instance did its part."""
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._trial = False

    def failed(self, now: float) -> None:
        """The instance failed by its own fault."""
        half_open = self.state(now) is BreakerState.HALF_OPEN
        self._trial = False
        self._failures += 1
        if half_open:
            self._pause_s = min(self._longest_pause_s, 2 * self._pause_s)
        if self._failures >= self._threshold:
            self._open_until = now + self._pause_s
