"""The connectors' road to the metaserver: D announces its reservations, P waits for them, both without blocking.

One thread with an event loop carries any number of posts and long polls. A metaserver that is down or restarts is
asked again, and told again, until the transfer's own deadline: it decides, not the metaserver.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ascend_pd.errors import AscendPdError, UnreachableError
from ascend_pd.metaserver_client import MetaserverClient
from ascend_pd.wire.params import Reservation
from ascend_pd.wire.registry import EngineEntry

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_WITHDRAW_S = 10.0


class RendezvousClient:
    """Thread-safe; its futures' done-callbacks run on its thread and must not block.

    Args:
        secret: shared secret, empty for none.
        name: in the thread's name.
        repost_s: a reservation is posted again this often until `settle`, in case the metaserver has forgotten it.
        max_pending: announcements, waits and withdrawals under way; beyond, they fail at once.
    """

    def __init__(self, secret: bytes, name: str, *, repost_s: float = 2.0, max_pending: int = 8192) -> None:
        self._client = MetaserverClient(secret)
        self._repost_s = repost_s
        self._max_pending = max_pending
        self._announcing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"rendezvous-{name}", daemon=True)
        self._thread.start()

    def announce(self, metaserver: str, reservation: Reservation) -> Future[None]:
        """Post a reservation until it is settled, withdrawn or past its deadline, which counts from now.

        The future ends at the first 202; with RemoteProtocolError when the metaserver refuses it, with
        UnreachableError at the deadline or when it is settled or withdrawn before.
        """
        deadline = time.monotonic() + reservation.deadline_seconds
        accepted: Future[None] = Future()

        async def run() -> None:
            try:
                await self._announce(metaserver, reservation, deadline, accepted)
            except AscendPdError as error:
                if not _fail(accepted, error):
                    logger.warning("reservation %s: %s", reservation.transfer_id, error)

        def start() -> None:
            self._stop_announcing(reservation.transfer_id)
            task = self._spawn(run, accepted)
            if task is not None:
                self._announcing[reservation.transfer_id] = task
                task.add_done_callback(lambda _: self._forget(reservation.transfer_id, task))

        self._soon(start, accepted)
        return accepted

    def settle(self, transfer_id: str) -> None:
        """P has claimed the reservation: post it no more. It stays at the metaserver, for P's other ranks."""
        self._soon(lambda: self._stop_announcing(transfer_id))

    def withdraw(self, metaserver: str, transfer_id: str, reason: str) -> Future[None]:
        """The reservation has ended: who waits for it is told. Tried for ten seconds."""
        done: Future[None] = Future()

        async def run() -> None:
            await self._client.withdraw(metaserver, transfer_id, reason, time.monotonic() + _WITHDRAW_S)

        def start() -> None:
            self._stop_announcing(transfer_id)
            self._spawn(lambda: _deliver(run, done), done)

        self._soon(start, done)
        return done

    def wait_for(self, metaserver: str, transfer_id: str, timeout_s: float) -> Future[Reservation]:
        """The reservation as soon as D has posted it; cancel the future to stop waiting.

        It ends with TransferError when the reservation has ended, with UnreachableError after `timeout_s` (or
        within a second from then), with RemoteProtocolError when the metaserver refuses the question.
        """
        found: Future[Reservation] = Future()
        deadline = time.monotonic() + timeout_s

        async def run() -> Reservation:
            return await self._client.wait_for(metaserver, transfer_id, deadline)

        def start() -> None:
            task = self._spawn(lambda: _deliver(run, found), found)
            if task is not None:
                found.add_done_callback(lambda _: self._soon(task.cancel))

        self._soon(start, found)
        return found

    def register(self, metaserver: str, entry: EngineEntry) -> None:
        """Tell the metaserver now and every third of the TTL that this engine lives, until `close`."""

        async def run() -> None:
            while True:
                deadline = time.monotonic() + entry.ttl_seconds / 3
                try:
                    await self._client.register(metaserver, entry, deadline)
                except AscendPdError as error:
                    logger.warning("cannot register engine %s: %s", entry.engine_id, error)
                await asyncio.sleep(max(0.0, deadline - time.monotonic()))

        self._soon(lambda: self._spawn(run, None))

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; what is under way fails with UnreachableError. Safe to repeat; not from a callback."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("%s: a callback still runs after %.1f s", self._thread.name, timeout_s)

    # Everything below runs on the client's thread.

    def _run(self) -> None:
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        await asyncio.sleep(0)  # let what was handed over before `close` begin, so that its futures end too
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _soon(self, callback: Callable[[], object], future: Future[Any] | None = None) -> None:
        """From any thread: run `callback` on the loop, or fail `future` when there is no loop any more."""
        with self._lock:
            if not self._closed:
                self._loop.call_soon_threadsafe(callback)
                return
        if future is not None:
            _fail(future, UnreachableError("the rendezvous client is closed"))

    def _spawn(
        self, work: Callable[[], Coroutine[Any, Any, None]], future: Future[Any] | None
    ) -> asyncio.Task[None] | None:
        if len(self._tasks) >= self._max_pending:
            if future is not None:
                _fail(future, UnreachableError(f"{self._max_pending} requests to the metaserver are under way"))
            return None
        task = self._loop.create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if future is not None:
            # A task that is cancelled before its first step runs none of its own clean-up.
            task.add_done_callback(
                lambda _: _fail(future, UnreachableError("withdrawn, or the client was closed"))
            )
        return task

    def _forget(self, transfer_id: str, task: asyncio.Task[None]) -> None:
        if self._announcing.get(transfer_id) is task:
            del self._announcing[transfer_id]

    def _stop_announcing(self, transfer_id: str) -> None:
        task = self._announcing.pop(transfer_id, None)
        if task is not None:
            task.cancel()

    async def _announce(
        self, metaserver: str, reservation: Reservation, deadline: float, accepted: Future[None]
    ) -> None:
        while time.monotonic() < deadline:
            await self._client.post(metaserver, reservation, deadline)
            _succeed(accepted, None)
            await asyncio.sleep(min(self._repost_s, max(0.0, deadline - time.monotonic())))


async def _deliver(work: Callable[[], Coroutine[Any, Any, Result]], future: Future[Result]) -> None:
    """Do `work` and put its outcome into `future`."""
    try:
        _succeed(future, await work())
    except AscendPdError as error:
        _fail(future, error)


def _succeed(future: Future[Result], result: Result) -> bool:
    """False when somebody was faster, e.g. by cancelling it."""
    if future.done() or not future.set_running_or_notify_cancel():
        return False
    future.set_result(result)
    return True


def _fail(future: Future[Any], error: AscendPdError) -> bool:
    """False when somebody was faster, e.g. by cancelling it."""
    if future.done() or not future.set_running_or_notify_cancel():
        return False
    future.set_exception(error)
    return True
