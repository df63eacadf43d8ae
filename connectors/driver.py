"""What drives a ledger in a worker: one lock, one thread that keeps its deadlines, and one for slow jobs.

A ledger is pure; whoever calls it holds `changed`, and has the actions that come back carried out before letting
go. Carrying out an action never blocks: what takes time (a fence) is queued with `later`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
        on_start: called first on the thread of the slow jobs.
    """

    def __init__(self, name: str, perform: Callable[[Action], None], on_start: Job) -> None:
        self.changed = threading.Condition(threading.RLock())
        self._perform = perform
        self._ledger: Ledger[Action] | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._jobs = ThreadPoolExecutor(1, f"{name}-jobs", initializer=on_start)

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

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def later(self, job: Job) -> None:
        """Run `job` after those before it, without the lock and without holding the clock up."""
        if not self._closed:
            self._jobs.submit(self._guarded, job)

    def close(self) -> None:
        """Stop the clock, and wait for the job that runs. Safe to repeat."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._jobs.shutdown(wait=True, cancel_futures=True)

    def _run(self) -> None:
        with self.changed:
            while self._ledger is not None and not self._closed:
                try:
                    self.perform(self._ledger.tick(time.monotonic()))
                except Exception:
                    # The clock must outlive a bug: the other transfers' deadlines depend on it.
                    logger.exception("%s: a deadline's actions failed", self._thread.name)
                wait_s = min(_LONGEST_WAIT_S, self._ledger.next_deadline() - time.monotonic())
                if wait_s > 0:
                    self.changed.wait(wait_s)

    def _guarded(self, job: Job) -> None:
        try:
            job()
        except Exception:
            # Nobody looks at the result; a bug in one job must be seen and must not end the others.
            logger.exception("%s: a job failed", self._thread.name)
