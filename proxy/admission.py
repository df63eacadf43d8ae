"""How many requests are let in: a bound on those under way, a bounded queue before it, and limits per API key."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from proxy.errors import ProxyError
from proxy.settings import AdmissionSettings, KeyLimits

RETRY_AFTER_S = 1
WINDOW_S = 60.0


class Overloaded(ProxyError):
    """Too much is under way (503) or this key has used its share (429)."""

    def __init__(self, message: str, status: int, retry_after_s: int = RETRY_AFTER_S) -> None:
        super().__init__(message, status, kind="overloaded", retry_after_s=retry_after_s)


class _KeyUse:
    """What one key has under way, and when its requests of the last minute began."""

    __slots__ = ("recent", "running")

    def __init__(self) -> None:
        self.running = 0
        self.recent: deque[float] = deque()


class Place:
    """One request's right to run."""

    __slots__ = ("_admission", "_use")

    def __init__(self, admission: Admission, use: _KeyUse | None) -> None:
        self._admission = admission
        self._use = use

    def leave(self) -> None:
        """Called once, at the end of the request."""
        if self._use is not None:
            self._use.running -= 1
        self._admission.free()


class Admission:
    """First come, first served."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self._settings = settings
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._keys: dict[str, _KeyUse] = {}
        self.running = 0
        self.draining = False

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    async def enter(self, key: str, limits: KeyLimits | None) -> Place:
        """Get a place, to be given back by its `leave`.

        Raises:
            Overloaded: refused at once, or no place within the queue's time.
        """
        if self.draining:
            raise Overloaded("this proxy is shutting down", 503, 5)
        use = self._enter(key, limits) if limits is not None else None
        if self.running < self._settings.max_running:
            self.running += 1
            return Place(self, use)
        try:
            await self._wait()
        except BaseException:
            if use is not None:
                use.running -= 1
            raise
        return Place(self, use)

    def _enter(self, key: str, limits: KeyLimits) -> _KeyUse:
        now = asyncio.get_running_loop().time()
        use = self._keys.setdefault(key, _KeyUse())
        while use.recent and now - use.recent[0] >= WINDOW_S:
            use.recent.popleft()
        if limits.max_running and use.running >= limits.max_running:
            raise Overloaded(f"this key may have {limits.max_running} requests under way", 429)
        if limits.requests_per_minute:
            if len(use.recent) >= limits.requests_per_minute:
                wait_s = int(WINDOW_S - (now - use.recent[0])) + 1
                raise Overloaded(f"this key may send {limits.requests_per_minute} requests a minute", 429, wait_s)
            use.recent.append(now)
        use.running += 1
        return use

    async def _wait(self) -> None:
        if len(self._waiting) >= self._settings.max_queued:
            raise Overloaded("too many requests are waiting", 429 if self._settings.max_queued else 503)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            async with asyncio.timeout(self._settings.queue_s):
                await turn
        except TimeoutError as error:
            if not turn.done() or turn.cancelled():
                raise Overloaded(f"no place became free within {self._settings.queue_s:g} s", 503) from error
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.free()
            raise
        finally:
            self._waiting.pop(turn, None)

    def free(self) -> None:
        """Give the place to the first in the queue, or free it."""
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
