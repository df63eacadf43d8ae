"""What drives a ledger in a worker: one lock, one thread that keeps its deadlines, and a place for slow jobs.

A ledger is pure; whoever calls it holds `changed`, and has the actions that come back carried out before letting
go. Carrying out an action never blocks: what takes time (a fence) is queued with `later`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

Action = TypeVar("Action", covariant=True)
Job = Callable[[], None]
logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 1.0


class Ledger(Protocol[Action]):
    """The part of both ledgers that time drives."""

    def next_deadline(self) -> float: ...

    def tick(self, now: float) -> Sequence[Action]: ...


class LedgerDriver(Generic[Action]):
    """One per ledger.

    Args:
        perform: carries out one action; called with `changed` held.
        on_start: called first on the clock's thread.
    """

    def __init__(self, name: str, perform: Callable[[Action], None], on_start: Job) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._perform = perform
        self._on_start = on_start
        self._ledger: Ledger[Action] | None = None
        self._jobs: deque[Job] = deque()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def open(self, ledger: Ledger[Action]) -> None:
        """Begin to keep the ledger's time."""
        self._ledger = ledger
        self._thread.start()

    def perform(self, actions: Sequence[Action]) -> None:
        """Carry out what a ledger call returned; `changed` is held."""
        for action in actions:
            self._perform(action)

    def tell(self, event: Callable[[float], Sequence[Action]]) -> None:
        """Let `event(now)` happen to the ledger, from any thread."""
        with self.changed:
            self.perform(event(time.monotonic()))
            self.changed.notify_all()

    def later(self, job: Job) -> None:
        """Run `job` on the clock's thread, without the lock; `changed` is held."""
        self._jobs.append(job)
        self.changed.notify_all()

    def close(self) -> None:
        """Stop the clock. Safe to repeat."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)

    def _run(self) -> None:
        self._on_start()
        while (jobs := self._wait()) is not None:
            for job in jobs:
                try:
                    job()
                except Exception:
                    # The clock must outlive a bug in one job: the other transfers' deadlines depend on it.
                    logger.exception("%s: a job failed", self._thread.name)

    def _wait(self) -> list[Job] | None:
        with self.changed:
            if self._ledger is None or self._closed:
                return None
            self.perform(self._ledger.tick(time.monotonic()))
            wait_s = min(_LONGEST_WAIT_S, self._ledger.next_deadline() - time.monotonic())
            if not self._jobs and not self._closed and wait_s > 0:
                self.changed.wait(wait_s)
            jobs = list(self._jobs)
            self._jobs.clear()
        return jobs
