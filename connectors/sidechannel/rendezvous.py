"""The connectors' road to the metaserver: D announces its reservations, P waits for them, both without blocking.

One thread with an event loop carries any number of posts and long polls. A metaserver that is down or restarts is
asked again, and told again, until the transfer's own deadline: it decides, not the metaserver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec
from yarl import URL

from ascend_pd.errors import AscendPdError, RemoteProtocolError, TransferError, UnreachableError
from ascend_pd.wire.http_signature import SIGNATURE_HEADER, HttpSigner
from ascend_pd.wire.params import Reservation, parse_reservation
from ascend_pd.wire.registry import EngineEntry

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
_LONG_POLL_S = 20.0
_PAUSE_S = 0.2
_GRACE_S = 5.0
_WITHDRAW_S = 10.0
_MAX_REPLY_BYTES = 4 << 20


class RendezvousClient:
    """Thread-safe; its futures' done-callbacks run on its thread and must not block.

    Args:
        secret: shared secret, empty for none.
        name: in the thread's name.
        repost_s: a reservation is posted again this often until `settle`, in case the metaserver has forgotten it.
        max_pending: announcements, waits and withdrawals under way; beyond, they fail at once.
    """

    def __init__(self, secret: bytes, name: str, *, repost_s: float = 2.0, max_pending: int = 8192) -> None:
        self._signer = HttpSigner(secret)
        self._repost_s = repost_s
        self._max_pending = max_pending
        self._announcing: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session: aiohttp.ClientSession | None = None
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
        target = f"/v1/reservations/{quote(transfer_id, safe='')}?reason={quote(reason[:200], safe='')}"
        done: Future[None] = Future()

        async def run() -> None:
            await self._until_answered("DELETE", metaserver, target, b"", time.monotonic() + _WITHDRAW_S)

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
            return await self._wait_for(metaserver, transfer_id, deadline)

        def start() -> None:
            task = self._spawn(lambda: _deliver(run, found), found)
            if task is not None:
                found.add_done_callback(lambda _: self._soon(task.cancel))

        self._soon(start, found)
        return found

    def register(self, metaserver: str, entry: EngineEntry) -> None:
        """Tell the metaserver now and every third of the TTL that this engine lives, until `close`."""

        async def run() -> None:
            body = msgspec.json.encode(entry)
            while True:
                deadline = time.monotonic() + entry.ttl_seconds / 3
                try:
                    status, reply = await self._until_answered("POST", metaserver, "/v1/engines", body, deadline)
                    if status != 200:
                        raise RemoteProtocolError(_message_of(status, reply))
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
        if self._session is not None:
            await self._session.close()

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
        while (left_s := deadline - time.monotonic()) > 0:
            body = msgspec.json.encode(msgspec.structs.replace(reservation, deadline_seconds=left_s))
            status, reply = await self._until_answered("POST", metaserver, "/v1/metaserver", body, deadline)
            if status != 202:
                raise RemoteProtocolError(f"the metaserver refused the reservation: {_message_of(status, reply)}")
            _succeed(accepted, None)
            await asyncio.sleep(min(self._repost_s, max(0.0, deadline - time.monotonic())))

    async def _wait_for(self, metaserver: str, transfer_id: str, deadline: float) -> Reservation:
        while (left_s := deadline - time.monotonic()) > 0:
            begun, wait_s = time.monotonic(), min(_LONG_POLL_S, left_s)
            target = f"/v1/reservations/{quote(transfer_id, safe='')}?wait_s={wait_s:.3f}"
            status, reply = await self._until_answered("GET", metaserver, target, b"", deadline, wait_s)
            if status == 200:
                return parse_reservation(reply)
            if status == 410:
                raise TransferError(_message_of(status, reply), quiesced=True)
            if status != 404:
                raise RemoteProtocolError(f"the metaserver refused to wait: {_message_of(status, reply)}")
            if time.monotonic() - begun < wait_s / 2:  # it is stopping, or not a metaserver at all
                await asyncio.sleep(min(_PAUSE_S, wait_s))
        raise UnreachableError(f"no reservation for {transfer_id} by the deadline")

    async def _until_answered(
        self, method: str, metaserver: str, target: str, body: bytes, deadline: float, wait_s: float = 0.0
    ) -> tuple[int, bytes]:
        """The first answer below 500, asking again with growing pauses.

        Raises:
            UnreachableError: none by the deadline; says what was wrong last.
            RemoteProtocolError: the answer is not signed with our secret.
        """
        retry_s = _FIRST_RETRY_S
        while True:
            try:
                timeout_s = min(wait_s + _GRACE_S, max(0.0, deadline - time.monotonic()) + 1.0)
                status, reply = await self._exchange(method, metaserver, target, body, timeout_s)
                if status < 500:
                    return status, reply
                trouble = _message_of(status, reply)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                trouble = f"{type(error).__name__}: {error}"
            if time.monotonic() + retry_s >= deadline:
                raise UnreachableError(f"metaserver {metaserver}: {trouble}")
            await asyncio.sleep(retry_s)
            retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)

    async def _exchange(
        self, method: str, metaserver: str, target: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30))
        url = URL(metaserver.rstrip("/") + target, encoded=True)
        nonce = os.urandom(16).hex()
        headers = self._signer.request_headers(method, url.raw_path_qs, nonce, body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=2.0)
        async with self._session.request(
            method, url, data=body or None, headers=headers, timeout=timeout, allow_redirects=False
        ) as response:
            reply = await _read_bounded(response)
            signature = response.headers.get(SIGNATURE_HEADER, "")
            # A 5xx may come from something in between; it is no answer, so it needs no signature.
            if response.status < 500 and not self._signer.reply_is_genuine(
                response.status, nonce, signature, reply
            ):
                hint = _message_of(response.status, reply) if response.status == 401 else "not ours"
                raise RemoteProtocolError(
                    f"metaserver {metaserver}: the reply is not signed with our secret ({hint})"
                )
            return response.status, reply


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks = bytearray()
    async for chunk in response.content.iter_chunked(1 << 16):
        chunks += chunk
        if len(chunks) > _MAX_REPLY_BYTES:
            raise RemoteProtocolError(f"the metaserver's reply is longer than {_MAX_REPLY_BYTES} bytes")
    return bytes(chunks)


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


def _message_of(status: int, reply: bytes) -> str:
    try:
        message = msgspec.json.decode(reply)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        return f"HTTP {status}"
    return f"HTTP {status}: {str(message)[:512]}"
