"""The active end of the side channel: many requests in flight to many engines, on one thread.

A request is one frame, sent again and again (requests are idempotent) until its answer or its deadline comes.
Nothing is queued for a peer that is not connected, so a peer that comes back is not met by a backlog of the past.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import zmq

from ascend_pd.errors import AscendPdError, RemoteProtocolError, UnreachableError
from ascend_pd.wire.frames import (
    MAX_REPLY_BYTES,
    REQUEST_ID_BYTES,
    Flaw,
    FrameCodec,
    FrameError,
    NoticeError,
    message_tag,
)
from ascend_pd.wire.messages import Reply, Request, may_answer
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

Address = tuple[str, int]

_FIRST_REPEAT_S = 0.25
_LONGEST_REPEAT_S = 2.0


@dataclass(slots=True, eq=False)
class _Call:
    request_id: bytes
    address: Address
    message: Request
    frame: bytes
    deadline: float
    future: Future[Reply]
    repeat_s: float = _FIRST_REPEAT_S
    times_sent: int = 0
    copies_unsent: int = 0

    @property
    def kind(self) -> str:
        return message_tag(self.message)


@dataclass(slots=True, eq=False)
class _Peer:
    socket: zmq.Socket[bytes]
    calls: dict[bytes, _Call] = field(default_factory=dict)
    unsent: dict[bytes, _Call] = field(default_factory=dict)
    """Those of `calls` that wait for the connection, oldest first."""


class SideChannelClient:
    """Asks other engines. Thread-safe; one I/O thread, started here and stopped by `close`.

    Give addresses rather than names: ZeroMQ looks a name up on the thread that serves all peers.

    Args:
        secret: shared secret, empty for none.
        identity: who asks, for the other side's logs (engine id and epoch, or `proxy`).
        max_peers: open connections; the one idle longest is closed for a new one.
        max_calls_per_peer: requests in flight to one peer, so that a dead one cannot fill the memory.
    """

    def __init__(
        self,
        secret: bytes,
        identity: str,
        *,
        faults: FaultHook | None = None,
        max_peers: int = 256,
        max_calls_per_peer: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._codec = FrameCodec(secret)
        self._identity = identity
        self._faults = faults or NoFaults()
        self._max_peers = max_peers
        self._max_calls_per_peer = max_calls_per_peer
        self._clock = clock
        self._lock = threading.Lock()
        self._submitted: deque[_Call] = deque()
        self._in_flight: dict[Address, int] = {}
        self._closed = False
        self._counters: dict[str, int] = {}
        self._peers: OrderedDict[Address, _Peer] = OrderedDict()
        self._schedule = Schedule()
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, max_peers + 16)
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name=f"sidechannel-client-{identity}", daemon=True)
        self._thread.start()

    def request(self, address: Address, message: Request, timeout_s: float) -> Reply:
        """Ask and wait for the answer.

        Raises:
            UnreachableError: no answer within `timeout_s`, too much in flight, or closed. The peer may have acted.
            RemoteProtocolError: the peer has another wire version or secret, or answers something else.
            LocalProtocolError: the message is too long to send.
        """
        return self.submit(address, message, timeout_s).result()

    def submit(self, address: Address, message: Request, timeout_s: float) -> Future[Reply]:
        """Ask without waiting. By `timeout_s` at the latest the future has a reply or an error of `request`.

        Cancelling it stops the repeats. Its done-callbacks run on the I/O thread: they must not block, nor call
        `request` or `close`.

        Raises:
            LocalProtocolError: the message is too long to send.
        """
        request_id = os.urandom(REQUEST_ID_BYTES)
        frame = self._codec.encode_request(request_id, self._identity, message)
        call = _Call(request_id, address, message, frame, self._clock() + timeout_s, Future())
        with self._lock:
            refusal = self._refusal(address)
            if refusal is None:
                self._in_flight[address] = self._in_flight.get(address, 0) + 1
                self._submitted.append(call)
        if refusal is not None:
            call.future.set_exception(UnreachableError(f"{call.kind} to {_text(address)}: {refusal}"))
        else:
            self._waker.wake()
        return call.future

    def counters(self) -> dict[str, int]:
        """Since the start: `sent`, `repeated`, `answered`, `timed_out`, `late` (answers nobody waits for),
        `evicted`, `notice`, and per flaw of a dropped frame its name.
        """
        return dict(self._counters)

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread; whatever is in flight fails with UnreachableError. Safe to repeat."""
        with self._lock:
            self._closed = True
        self._waker.wake()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("side channel client %s: a callback still runs after %.1f s", self._identity, timeout_s)

    def _refusal(self, address: Address) -> str | None:
        if self._closed:
            return "the side channel client is closed"
        if self._in_flight.get(address, 0) >= self._max_calls_per_peer:
            return f"{self._max_calls_per_peer} requests to this peer are unanswered"
        if address not in self._in_flight and len(self._in_flight) >= self._max_peers:
            return f"{self._max_peers} peers have unanswered requests"
        return None

    # Everything below runs on the I/O thread.

    def _run(self) -> None:
        self._poller.register(self._waker.fd, zmq.POLLIN)
        try:
            while not self._closed:
                self._turn()
        except zmq.ZMQError:
            logger.exception("side channel client %s: the thread died", self._identity)
        finally:
            self._free()

    def _free(self) -> None:
        with self._lock:
            self._closed = True
            calls = [*self._submitted]
            self._submitted.clear()
        for peer in self._peers.values():
            calls.extend(peer.calls.values())
            peer.socket.close(linger=0)
        self._peers.clear()
        for call in calls:
            _fail(
                call, UnreachableError(f"{call.kind} to {_text(call.address)}: the side channel client was closed")
            )
        self._context.term()
        self._waker.close()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(poll_timeout_ms(self._clock(), self._schedule.next_instant())))
        if self._waker.fd in ready:
            self._waker.drain()
        while True:
            with self._lock:
                call = self._submitted.popleft() if self._submitted else None
            if call is None:
                break
            self._begin(call)
        for peer in [p for p in self._peers.values() if p.socket in ready]:
            events = ready[peer.socket]
            if events & zmq.POLLIN:
                self._receive(peer)
            if events & zmq.POLLOUT:
                self._flush(peer)
        for callback in self._schedule.pop_due(self._clock()):
            callback()

    def _begin(self, call: _Call) -> None:
        peer = self._peers.get(call.address)
        if peer is None:
            try:
                peer = self._connect(call.address)
            except zmq.ZMQError as error:
                self._forget(call)
                _fail(call, UnreachableError(f"{call.kind} to {_text(call.address)}: {error.strerror}"))
                return
        self._peers.move_to_end(call.address)
        peer.calls[call.request_id] = call
        self._transmit(peer, call)

    def _connect(self, address: Address) -> _Peer:
        if len(self._peers) >= self._max_peers:
            self._evict()
        sock = self._context.socket(zmq.DEALER)
        try:
            sock.set(zmq.LINGER, 0)
            sock.set(zmq.IMMEDIATE, 1)
            sock.set(zmq.SNDHWM, QUEUED_FRAMES)
            sock.set(zmq.RCVHWM, QUEUED_FRAMES)
            sock.set(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            sock.set(zmq.RECONNECT_IVL, 50)
            sock.set(zmq.RECONNECT_IVL_MAX, 500)
            sock.set(zmq.CONNECT_TIMEOUT, 2000)
            sock.set(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
            sock.set(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            sock.set(zmq.IPV6, int(":" in address[0]))
            sock.connect(zmq_address(*address))
        except zmq.ZMQError:
            sock.close(linger=0)
            raise
        peer = _Peer(sock)
        self._peers[address] = peer
        self._poller.register(sock, zmq.POLLIN)
        return peer

    def _evict(self) -> None:
        # `submit` keeps the number of peers with calls below the bound, but for one that is just ending.
        for address, peer in self._peers.items():
            if not peer.calls:
                self._poller.unregister(peer.socket)
                peer.socket.close(linger=0)
                del self._peers[address]
                self._count("evicted")
                return

    def _transmit(self, peer: _Peer, call: _Call) -> None:
        """One sending of a call, with its faults, and the plan for what comes next: one entry per call."""
        now = self._clock()
        if call.request_id not in peer.unsent:
            for delay_s in self._faults.on_send(call.kind):
                if delay_s <= 0:
                    self._put(peer, call)
                else:
                    self._schedule.add(now + delay_s, lambda: self._put_late(call))
        self._schedule.add(min(call.deadline, now + call.repeat_s), lambda: self._look_after(call))
        call.repeat_s = min(_LONGEST_REPEAT_S, 2 * call.repeat_s)

    def _look_after(self, call: _Call) -> None:
        peer = self._peers.get(call.address)
        if peer is None or call.request_id not in peer.calls:
            return
        if call.future.cancelled():
            self._finish(peer, call)
        elif self._clock() < call.deadline:
            self._transmit(peer, call)
        else:
            self._expire(peer, call)

    def _put(self, peer: _Peer, call: _Call) -> None:
        if peer.unsent or not self._send(peer, call):
            peer.unsent[call.request_id] = call
            call.copies_unsent += 1
            self._poller.register(peer.socket, zmq.POLLIN | zmq.POLLOUT)

    def _put_late(self, call: _Call) -> None:
        # A delayed copy goes out even when the call has ended meanwhile: that is the fault it stands for.
        peer = self._peers.get(call.address)
        if peer is not None:
            self._send(peer, call)

    def _send(self, peer: _Peer, call: _Call) -> bool:
        try:
            peer.socket.send(call.frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._count("repeated" if call.times_sent else "sent")
        call.times_sent += 1
        return True

    def _flush(self, peer: _Peer) -> None:
        while peer.unsent:
            call = next(iter(peer.unsent.values()))
            while call.copies_unsent:
                if not self._send(peer, call):
                    return
                call.copies_unsent -= 1
            del peer.unsent[call.request_id]
        self._poller.register(peer.socket, zmq.POLLIN)

    def _receive(self, peer: _Peer) -> None:
        while True:
            try:
                parts = peer.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                envelope = self._codec.decode_reply(parts[0] if len(parts) == 1 else b"")
            except NoticeError as error:
                self._count("notice")
                self._fail_all(peer, error)
                continue
            except FrameError as error:
                self._count(error.flaw)
                if error.flaw in (Flaw.VERSION, Flaw.BAD_MAC):
                    self._fail_all(peer, error)
                continue
            call = peer.calls.get(envelope.id)
            if call is None:
                self._count("late")
                continue
            self._finish(peer, call)
            self._deliver(call, envelope.body)

    def _deliver(self, call: _Call, reply: Reply) -> None:
        if not may_answer(call.message, reply):
            answered = f"{call.kind} to {_text(call.address)} was answered with a {message_tag(reply)}"
            _fail(call, RemoteProtocolError(answered))
        elif call.future.set_running_or_notify_cancel():
            self._count("answered")
            call.future.set_result(reply)

    def _fail_all(self, peer: _Peer, error: RemoteProtocolError) -> None:
        for call in list(peer.calls.values()):
            self._finish(peer, call)
            _fail(call, RemoteProtocolError(f"{call.kind} to {_text(call.address)}: {error}"))

    def _expire(self, peer: _Peer, call: _Call) -> None:
        self._finish(peer, call)
        self._count("timed_out")
        sent = f"sent {call.times_sent} times" if call.times_sent else "never connected"
        _fail(call, UnreachableError(f"{call.kind} to {_text(call.address)}: no answer in time, {sent}"))

    def _finish(self, peer: _Peer, call: _Call) -> None:
        del peer.calls[call.request_id]
        peer.unsent.pop(call.request_id, None)
        self._forget(call)

    def _forget(self, call: _Call) -> None:
        with self._lock:
            left = self._in_flight[call.address] - 1
            if left:
                self._in_flight[call.address] = left
            else:
                del self._in_flight[call.address]

    def _count(self, what: str) -> None:
        self._counters[what] = self._counters.get(what, 0) + 1


def _fail(call: _Call, error: AscendPdError) -> None:
    if call.future.set_running_or_notify_cancel():
        call.future.set_exception(error)


def _text(address: Address) -> str:
    return zmq_address(*address).removeprefix("tcp://")
