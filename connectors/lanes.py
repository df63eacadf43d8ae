"""One queue and one thread per peer: a slow or dead peer delays nobody else."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

Job = Callable[[], None]
logger = logging.getLogger(__name__)

IDLE_S = 60.0
"""A lane without work for this long ends its thread."""


class _Lane:
    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self.waiting = 0


class Lanes:
    """Threads are made on demand and end by themselves when idle; `close` ends all.

    Args:
        name: in the threads' names.
        on_start: called first in each thread.
        max_waiting: jobs that may wait in one lane.
    """

    def __init__(self, name: str, on_start: Job, max_waiting: int = 4096) -> None:
        self._name = name
        self._on_start = on_start
        self._max_waiting = max_waiting
        self._lanes: dict[object, _Lane] = {}
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, key: object, job: Job) -> bool:
        """Run `job` after those before it under the same key. False when the lane is full or all are closed."""
        with self._lock:
            if self._closed:
                return False
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._lanes[key] = _Lane()
                thread = threading.Thread(
                    target=self._run, args=(key, lane), name=f"{self._name}-{key}", daemon=True
                )
                self._threads.add(thread)
                thread.start()
            if lane.waiting >= self._max_waiting:
                return False
            lane.waiting += 1
            lane.jobs.put(job)
            return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Run nothing that has not begun, and wait for what has."""
        with self._lock:
            self._closed = True
            for lane in self._lanes.values():
                lane.jobs.put(None)
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout_s)

    def _run(self, key: object, lane: _Lane) -> None:
        try:
            self._on_start()
            while (job := self._next(key, lane)) is not None and not self._closed:
                try:
                    job()
                except Exception:
                    # A job reports its own failures; one that does not must not end the others in its lane.
                    logger.exception("%s: a job for %s failed", self._name, key)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())

    def _next(self, key: object, lane: _Lane) -> Job | None:
        while True:
            try:
                job = lane.jobs.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if lane.waiting:
                        continue
                    self._lanes.pop(key, None)
                    return None
            with self._lock:
                lane.waiting -= 1
            return job
