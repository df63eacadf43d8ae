"""Ended requests: counts them, keeps the last ones with their phases, writes the access log."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from typing import BinaryIO

import msgspec

from proxy.holds import Holds
from proxy.metrics import Metrics
from proxy.record import Record
from proxy.settings import ObservabilitySettings

FLUSH_S = 0.2
MAX_UNWRITTEN = 65536
STORY_DELAY_S = 0.05
"""After the end of a request, for the connectors to close their books on it."""


class AccessLog:
    """JSON lines, written together a few times a second so that a request does not wait for a disk or a pipe."""

    def __init__(self, out: BinaryIO | None = None) -> None:
        self._out = out or sys.stdout.buffer
        self._lines: list[bytes] = []
        self._handle: asyncio.TimerHandle | None = None
        self.dropped = 0

    def write(self, record: Record) -> None:
        """One line."""
        if len(self._lines) >= MAX_UNWRITTEN:
            self.dropped += 1
            return
        self._lines.append(msgspec.json.encode(_line(record)))
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)

    def flush(self) -> None:
        """Write what has gathered."""
        self._handle = None
        lines, self._lines = self._lines, []
        if lines:
            self._out.write(b"\n".join(lines) + b"\n")
            self._out.flush()


def _line(record: Record) -> dict[str, object]:
    ended_at = time.time()
    return {
        "event": "request",
        "at": round(ended_at, 3),
        "request_id": record.request_id,
        "transfer_id": record.transfer_id,
        "path": record.path,
        "model": record.model,
        "key": record.key,
        "stream": record.stream,
        "route": record.route,
        "status": record.status,
        "error": record.error,
        "attempts": record.attempts,
        "prefill": record.prefill,
        "decode": record.decode,
        "events": record.events,
        "ttft_ms": round(1e3 * (record.first_event_at - record.received_at), 1) if record.first_event_at else None,
        "e2e_ms": round(record.e2e_ms(), 1),
    }


class Journal:
    """Takes every ended request."""

    def __init__(self, settings: ObservabilitySettings, metrics: Metrics, holds: Holds) -> None:
        self._settings = settings
        self._metrics = metrics
        self._holds = holds
        self._records: deque[Record] = deque(maxlen=max(1, settings.records))
        self._log = AccessLog() if settings.access_log else None
        self._allowance = settings.stories_per_second
        self._allowed_at = time.monotonic()

    def add(self, record: Record) -> None:
        """A request has ended."""
        self._metrics.count(record)
        self._records.append(record)
        if self._log is not None:
            self._log.write(record)
        if record.transfer_id and (record.prefill_side or record.decode_side) and self._may_ask():
            self._holds.background(self._complete(record))

    def _may_ask(self) -> bool:
        now = time.monotonic()
        rate = self._settings.stories_per_second
        self._allowance = min(max(rate, 1.0), self._allowance + (now - self._allowed_at) * rate)
        self._allowed_at = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True

    async def _complete(self, record: Record) -> None:
        await asyncio.sleep(STORY_DELAY_S)
        await self.fetch_stories(record)
        self._metrics.count_phases(record)

    async def fetch_stories(self, record: Record) -> None:
        """Ask both connectors what they measured."""
        sides = (record.prefill_side, record.decode_side)
        record.prefill_story, record.decode_story = await self._holds.stories(sides, record.transfer_id)

    async def views(self, transfer_id: str = "", limit: int = 100) -> list[dict[str, object]]:
        """The last records, newest first, their phases completed where that is possible."""
        chosen = [r for r in reversed(self._records) if not transfer_id or r.transfer_id == transfer_id][:limit]
        missing = [r for r in chosen if r.transfer_id and not r.bytes_moved()][:50]
        await asyncio.gather(*(self.fetch_stories(record) for record in missing))
        return [record.view() for record in chosen]

    def close(self) -> None:
        """Write the last lines."""
        if self._log is not None:
            self._log.flush()
