"""The passive end of the side channel: one thread that answers requests and keeps the timers.

The thread never waits for the engine: a lease ends on time in an idle engine, and a DONE is answered while a long
step runs. Handler and tick run on this thread alone, so that what they own needs no lock.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from ascend_pd.errors import AscendPdError, OperatorError
from ascend_pd.wire.frames import (
    MAX_REQUEST_BYTES,
    Flaw,
    FrameCodec,
    FrameError,
    RequestEnvelope,
    encode_notice,
    message_tag,
)
from ascend_pd.wire.messages import Answer, Reply, Request, Verdict
from connectors.sidechannel.link import (
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    QUEUED_FRAMES,
    FaultHook,
    NoFaults,
    Schedule,
    Waker,
    poll_timeout_ms,
    zmq_address,
)

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Reply]
Tick = Callable[[float], float | None]

_BATCH = 64
"""Requests answered between two looks at the timers: a flood cannot hold them up."""
_MAX_CALLS = 65536
_EXPLAINED = frozenset({Flaw.BAD_MAC, Flaw.VERSION})


def _no_tick(now: float) -> float | None:
    return None


class SideChannelServer:
    """A ROUTER socket, bound when the constructor returns; `start` begins to answer.

    Args:
        host, port: where to listen; port 0 takes a free one (see `port`).
        secret: shared secret, empty for none.
        handler: answers one request; runs on the server's thread. An `AscendPdError` becomes a REFUSED answer, any
            other exception is logged and the request left unanswered (the peer repeats it, or gives up).
        name: in thread name, logs and replies; the engine's id and epoch.
        tick: called with the monotonic time after every batch of requests, after every `wake` and when the instant
            it last returned has come; returns the next such instant, or None.

    Raises:
        OperatorError: the address cannot be bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: bytes,
        handler: Handler,
        name: str,
        *,
        tick: Tick = _no_tick,
        faults: FaultHook | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._codec = FrameCodec(secret)
        self._handler = handler
        self._tick = tick
        self._faults = faults or NoFaults()
        self._clock = clock
        self._counters: dict[str, int] = {}
        self._schedule = Schedule()
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._waker = Waker()
        try:
            self.port = _bind(self._socket, host, port)
        except OperatorError:
            self._free()
            raise
        self._thread = threading.Thread(target=self._run, name=f"sidechannel-{name}", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False before `start`, after `close`, and if the thread has died, which it logs."""
        return self._thread.is_alive()

    def counters(self) -> dict[str, int]:
        """Since the start: `received.<tag>`, `handler_failed`, `refused`, `tick_failed`, `reply_lost`, and per
        flaw of a dropped frame `foreign`, `foreign_version`, `bad_mac`, `malformed`. A frame over the bound is
        cut off by ZMQ, with its connection, before it can be counted.
        """
        return dict(self._counters)

    def wake(self) -> None:
        """Have `tick` run now; from any thread."""
        self._waker.wake()

    def call_at(self, instant: float, callback: Callable[[], None]) -> None:
        """Run `callback` on the server's thread at the monotonic `instant` (0 for now); from any thread.

        Raises:
            OverflowError: more than 65536 are waiting.
        """
        if len(self._calls) + len(self._schedule) >= _MAX_CALLS:
            raise OverflowError(f"side channel {self.name}: {_MAX_CALLS} calls are waiting")
        self._calls.append((instant, callback))
        self._waker.wake()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """`call_at` now."""
        self.call_at(0.0, callback)

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread and free socket and port. Safe to repeat; not from the server's own thread."""
        self._stopping.set()
        self._waker.wake()
        if self._thread.ident is None:
            self._free()
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error(
                "side channel %s: a handler still runs after %.1f s, its port stays bound", self.name, timeout_s
            )

    def _free(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._waker.close()

    def _count(self, what: str) -> None:
        self._counters[what] = self._counters.get(what, 0) + 1

    def _run(self) -> None:
        try:
            self._serve()
        except zmq.ZMQError:
            logger.exception("side channel %s: the thread died", self.name)
        finally:
            self._free()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        tick_at: float | None = 0.0
        while not self._stopping.is_set():
            now = self._clock()
            instants = [i for i in (tick_at, self._schedule.next_instant()) if i is not None]
            ready = dict(poller.poll(poll_timeout_ms(now, min(instants, default=None))))
            if self._waker.fd in ready:
                self._waker.drain()
            while self._calls:
                self._schedule.add(*self._calls.popleft())
            if self._socket in ready:
                self._answer_batch()
            now = self._clock()
            for callback in self._schedule.pop_due(now):
                self._guarded(callback)
            if ready or (tick_at is not None and tick_at <= now):
                tick_at = self._next_tick(now)

    def _next_tick(self, now: float) -> float | None:
        try:
            return self._tick(now)
        except Exception:  # top loop: one bad tick must not end every transfer's timers
            self._count("tick_failed")
            logger.exception("side channel %s: tick failed", self.name)
            return now + 1.0

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception:  # top loop, as above
            self._count("tick_failed")
            logger.exception("side channel %s: a timer failed", self.name)

    def _answer_batch(self) -> None:
        for _ in range(_BATCH):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._answer(parts)

    def _answer(self, parts: list[bytes]) -> None:
        peer = parts[0]
        try:
            if len(parts) != 2:
                raise FrameError(Flaw.FOREIGN, f"{len(parts)} parts, expected 2")
            envelope = self._codec.decode_request(parts[1])
        except FrameError as error:
            self._drop(peer, error)
            return
        tag = message_tag(envelope.body)
        self._count(f"received.{tag}")
        frame = self._reply_frame(envelope)
        if frame is None:
            return
        for delay_s in self._faults.on_send(f"{tag}.reply"):
            if delay_s <= 0:
                self._send(peer, frame)
            else:
                self._schedule.add(self._clock() + delay_s, lambda: self._send(peer, frame))

    def _reply_frame(self, request: RequestEnvelope) -> bytes | None:
        try:
            return self._codec.encode_reply(request.id, self.name, self._handle(request.body))
        except Exception:  # top loop: a request that breaks us must not take the others with it
            self._count("handler_failed")
            logger.exception(
                "side channel %s: %s from %r failed", self.name, message_tag(request.body), request.sender
            )
            return None

    def _handle(self, body: Request) -> Reply:
        try:
            return self._handler(body)
        except AscendPdError as error:
            self._count("refused")
            return Answer(verdict=Verdict.REFUSED, reason=str(error))

    def _drop(self, peer: bytes, error: FrameError) -> None:
        self._count(error.flaw)
        seen = self._counters[error.flaw]
        if seen & (seen - 1) == 0:  # 1, 2, 4, 8 …: a flood does not fill the log
            logger.warning("side channel %s: dropped frame no. %d (%s): %s", self.name, seen, error.flaw, error)
        if error.flaw in _EXPLAINED:
            self._send(peer, encode_notice(str(error)))

    def _send(self, peer: bytes, frame: bytes) -> None:
        try:
            self._socket.send_multipart((peer, frame), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            self._count("reply_lost")


def _bind(sock: zmq.Socket[bytes], host: str, port: int) -> int:
    sock.set(zmq.RCVHWM, QUEUED_FRAMES)
    sock.set(zmq.SNDHWM, QUEUED_FRAMES)
    sock.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    sock.set(zmq.ROUTER_MANDATORY, 1)
    sock.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    sock.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    where = f"side channel address {host}:{port}"
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        sock.set(zmq.IPV6, int(family == socket.AF_INET6))
        sock.bind(zmq_address(str(address[0]), port))
    except socket.gaierror as error:
        raise OperatorError(f"{where}: {error.strerror}", "set `host` to an address of this machine") from error
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise OperatorError(
                f"{where} is in use", "stop what listens there, or change connector.kvPort"
            ) from error
        raise OperatorError(f"{where}: {error.strerror}", "set `host` to an address of this machine") from error
    return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
