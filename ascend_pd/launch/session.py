"""A command that supervises roles: signals become one orderly stop, and whatever is left at the end is ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ascend_pd.launch import guardian

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def supervising() -> Iterator[None]:
    """Within it Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, once; on leaving, no descendant is left.

    Orphans come to this process: when a guardian is killed, its role's other processes are ended from here.
    """
    guardian.adopt_orphans()
    before = {number: signal.signal(number, _interrupt) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if guardian.descendants(os.getpid()):
            guardian.end_all(guardian.ORPHAN_GRACE_S)
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    # The stop that follows is bounded; a second Ctrl-C must not cut it short and leave processes behind.
    for other in _STOP_SIGNALS:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt
