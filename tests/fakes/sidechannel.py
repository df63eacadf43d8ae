"""A stand-in for an engine core's side channel: answers as the connector would."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import zmq
import zmq.asyncio

from ascend_pd.wire.frames import FrameCodec, FrameError
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import Answer, Ask, Hello, HelloReply, Release, Renew, Reply, Request, Story, Verdict

FINGERPRINT = Fingerprint(
    architecture="Fake",
    model_config_hash="0",
    num_layers=2,
    num_kv_heads=1,
    head_size=8,
    kv_cache_dtype="float32",
    hardware="cpu",
    tokenizer_hash="t",
    chat_template_hash="c",
)


class FakeSide:
    """One ROUTER socket on a loopback port."""

    def __init__(self, cluster: Any, role: str, secret: bytes = b"") -> None:
        self.cluster = cluster
        self.role = role
        self.epoch = "epoch-1"
        self.fingerprint = FINGERPRINT
        self.received: list[Request] = []
        self.silent = False
        self.unsound = ""
        self._codec = FrameCodec(secret)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.address = f"127.0.0.1:{self.port}"
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            peer, frame = await self._socket.recv_multipart()
            try:
                request = self._codec.decode_request(frame)
            except FrameError:
                continue
            self.received.append(request.body)
            if not self.silent:
                reply = self._codec.encode_reply(request.id, self.role, self._answer(request.body))
                await self._socket.send_multipart([peer, reply])

    def _answer(self, message: Request) -> Reply:
        match message:
            case Hello():
                return HelloReply(
                    engine=EngineRef(f"{self.role}-{self.port}", self.epoch),
                    role=self.role,
                    fingerprint=self.fingerprint,
                    block_size=128,
                    tp_size=1,
                    pp_size=1,
                    workers=(),
                    unsound=self.unsound,
                )
            case Renew(transfer_id=transfer_id):
                alive = transfer_id in self.cluster.holds and transfer_id not in self.cluster.consumed
                return Answer(verdict=Verdict.OK if alive else Verdict.GONE, lease_seconds=30.0)
            case Release(transfer_id=transfer_id):
                self.cluster.released.append(transfer_id)
                return Answer(verdict=Verdict.OK)
            case Ask(transfer_id=transfer_id):
                return self._story(transfer_id)
        return Answer(verdict=Verdict.REFUSED, reason="not asked by proxies")

    def _story(self, transfer_id: str) -> Story:
        if self.role == "prefill":
            timings, moved = {"prefill_queue": 0.2, "prefill": 0.1}, 0
        else:
            timings, moved = {"decode_queue": 0.05, "transfer": 0.15}, 4096
        return Story(
            known=True,
            state="released",
            reason=self.cluster.reasons.get(self.role, ""),
            timings_ms=timings,
            bytes_moved=moved,
        )

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._socket.close(linger=0)
        self._context.term()
