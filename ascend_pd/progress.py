"""Progress of a long step on standard error: one moving line on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

QUIET_S = 2.0
"""Without a terminal, at least this long between two lines about the same step."""


class Progress:
    """Reports on the steps of one task.

    Use as a context manager, so that a moving line is ended whatever happens.
    """

    def __init__(self, task: str, stream: TextIO | None = None) -> None:
        self._task = task
        self._stream = sys.stderr if stream is None else stream
        self._moving = self._stream.isatty()
        self._line_open = False
        self._last_at = float("-inf")

    def note(self, text: str) -> None:
        """A line that stays."""
        self._end_line()
        print(f"{self._task}: {text}", file=self._stream, flush=True)

    def step(self, text: str, done: int, total: int) -> None:
        """How far a step is; may be called as often as one likes."""
        now = time.monotonic()
        last = done >= total
        if not last and now - self._last_at < (0.1 if self._moving else QUIET_S):
            return
        self._last_at = now
        line = f"{self._task}: {text} {100 * done // max(total, 1):3d} %"
        if self._moving:
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
            self._line_open = True
            if last:
                self._end_line()
        else:
            print(line, file=self._stream, flush=True)

    def _end_line(self) -> None:
        if self._line_open:
            print(file=self._stream, flush=True)
            self._line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_line()
