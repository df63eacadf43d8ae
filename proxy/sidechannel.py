"""The proxy's end of the engines' side channels: who are you, keep the hold, let go, why did it fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import OrderedDict
from typing import TypeVar

import zmq
import zmq.asyncio

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError, UnreachableError
from ascend_pd.wire.frames import MAX_REPLY_BYTES, REQUEST_ID_BYTES, FrameCodec, FrameError, NoticeError
from ascend_pd.wire.messages import Answer, Ask, Hello, HelloReply, Release, Renew, Reply, Request, Story

T = TypeVar("T", HelloReply, Answer, Story)
MAX_PEERS = 1024
FIRST_REPEAT_S = 0.25
LONGEST_REPEAT_S = 2.0


class _Peer:
    """One DEALER socket, its reader, and the requests that wait for an answer."""

    def __init__(self, context: zmq.asyncio.Context, address: str, codec: FrameCodec) -> None:
        self.waiting: dict[bytes, asyncio.Future[Reply]] = {}
        self._codec = codec
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 256),
            (zmq.RCVHWM, 256),
            (zmq.IMMEDIATE, 1),
            (zmq.MAXMSGSIZE, MAX_REPLY_BYTES),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.IPV6, int(address.startswith("["))),
        ):
            self._socket.setsockopt(option, value)
        try:
            self._socket.connect(f"tcp://{address}")
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise UnreachableError(f"{address} is no address of a side channel: {error}") from error
        self._reader = asyncio.create_task(self._read(), name=f"sidechannel-{address}")

    async def send(self, frame: bytes) -> None:
        """Hand one frame to ZMQ; waits while the peer is not connected."""
        await self._socket.send(frame)

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                envelope = self._codec.decode_reply(frames[0])
            except (FrameError, NoticeError) as error:
                self._fail_all(error)
                continue
            future = self.waiting.pop(envelope.id, None)
            if future is not None and not future.done():
                future.set_result(envelope.body)

    def _fail_all(self, error: RemoteProtocolError) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)
        self.waiting.clear()

    async def close(self) -> None:
        self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._socket.close(linger=0)


class SideChannel:
    """Asks engines. Addresses are `host:port`; each call repeats its frame until an answer or its deadline.

    All methods raise UnreachableError (no answer in time; the peer may have acted) and RemoteProtocolError
    (another version, another secret, or an answer of the wrong kind).
    """

    def __init__(self, secret: bytes) -> None:
        self._codec = FrameCodec(secret)
        self._context = zmq.asyncio.Context()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()

    async def hello(self, address: str, timeout_s: float) -> HelloReply:
        """Who serves there."""
        return expect(HelloReply, await self.request(address, Hello(role="proxy"), timeout_s))

    async def ask(self, address: str, transfer_id: str, timeout_s: float) -> Story:
        """What became of a transfer."""
        return expect(Story, await self.request(address, Ask(transfer_id=transfer_id), timeout_s))

    async def renew(self, address: str, transfer_id: str, epoch: str, timeout_s: float) -> Answer:
        """Keep P's hold for another lease."""
        message = Renew(transfer_id=transfer_id, source_epoch=epoch)
        return expect(Answer, await self.request(address, message, timeout_s))

    async def release(
        self, address: str, transfer_id: str, reason: str, timeout_s: float, epoch: str = ""
    ) -> Answer:
        """Nobody will come: let go of the transfer's blocks."""
        message = Release(transfer_id=transfer_id, epoch=epoch, reason=reason)
        return expect(Answer, await self.request(address, message, timeout_s))

    async def request(self, address: str, message: Request, timeout_s: float) -> Reply:
        """One request and its answer."""
        peer = self._peer(address)
        request_id = os.urandom(REQUEST_ID_BYTES)
        frame = self._codec.encode_request(request_id, "proxy", message)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        peer.waiting[request_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                return await self._repeat(peer, frame, future)
        except TimeoutError as error:
            raise UnreachableError(f"no answer from the side channel {address} within {timeout_s:g} s") from error
        finally:
            peer.waiting.pop(request_id, None)

    @staticmethod
    async def _repeat(peer: _Peer, frame: bytes, future: asyncio.Future[Reply]) -> Reply:
        pause_s = FIRST_REPEAT_S
        while True:
            await peer.send(frame)
            done, _ = await asyncio.wait([future], timeout=pause_s)
            if done:
                return future.result()
            pause_s = min(LONGEST_REPEAT_S, 2 * pause_s)

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            self._evict()
            peer = self._peers[address] = _Peer(self._context, address, self._codec)
        self._peers.move_to_end(address)
        return peer

    def _evict(self) -> None:
        while len(self._peers) >= MAX_PEERS:
            idle = next((a for a, p in self._peers.items() if not p.waiting), None)
            if idle is None:
                raise UnreachableError(f"{MAX_PEERS} side channels have unanswered requests")
            closing = asyncio.create_task(self._peers.pop(idle).close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close every socket; what is in flight ends with its deadline."""
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
        self._context.destroy(linger=0)


def expect(kind: type[T], reply: Reply) -> T:
    """The reply, if it is of the expected kind.

    Raises:
        RemoteProtocolError: it is not; a REFUSED answer's reason is in the message.
    """
    if isinstance(reply, kind):
        return reply
    if isinstance(reply, Answer):
        raise RemoteProtocolError(f"the engine refused: {reply.reason or reply.verdict}")
    raise LocalProtocolError(f"expected {kind.__name__}, got {type(reply).__name__}")
