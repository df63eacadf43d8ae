#!/usr/bin/env python
"""Effective speed of moving a KV cache between two processes, against one large write of the same bytes.

Three shapes of 64 MiB (rounded down to whole blocks), block ids shuffled on both sides as in a used pool:

* small heads: TP 8 to TP 2, one head of 32 tokens of 512 bytes in each of 4096 pieces of 16 KiB;
* SmolLM2-135M: equal TP, whole (block, layer) slabs of 192 KiB;
* Qwen3-32B: TP 8 to TP 2, one head of 128 tokens in each piece of 64 KiB.

Compared in turn, round by round, in the same run: one write and one read of as many bytes (a single call of the
library), our mover in both directions, the same pieces unstaged, the library's own batch call with the same ones,
and a plain socket. Speeds are medians over the rounds; the ratio is to the one write.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402
import numpy as np  # noqa: E402

from ascend_pd.layout.description import KVLayout, Part, Region  # noqa: E402
from ascend_pd.layout.pieces import Pieces  # noqa: E402
from ascend_pd.layout.plan import pair  # noqa: E402
from ascend_pd.wire.environment import mooncake_environment  # noqa: E402
from ascend_pd.wire.messages import WorkerInfo  # noqa: E402
from connectors.device.cpu import CpuDevice  # noqa: E402
from connectors.sidechannel.client import SideChannelClient  # noqa: E402
from connectors.transport.mooncake import MooncakeTransport  # noqa: E402
from connectors.transport.mover import Mover  # noqa: E402
from connectors.transport.stage_peer import StagedRequest  # noqa: E402
from connectors.transport.worker_service import WorkerService  # noqa: E402

TOTAL = 64 << 20
MAX_BATCH = 1024
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Shape:
    """One model's cache as two workers hold it; `heads` on each side, of `kv_heads` of the model."""

    name: str
    layers: int
    kv_heads: int
    source_tp: int
    sink_tp: int
    block_size: int
    token_bytes: int

    @property
    def piece_bytes(self) -> int:
        """One head, or all heads where both sides have the same ones, of one block and layer."""
        shared = self.kv_heads // self.source_tp
        return shared * self.block_size * self.token_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks of the request."""
        return TOTAL // (self.piece_bytes * self.layers)

    @property
    def total(self) -> int:
        """Bytes on the wire."""
        return self.num_blocks * self.piece_bytes * self.layers

    def layout(self, base: int, tp_size: int) -> KVLayout:
        """The cache of rank 0 of `tp_size` at `base`: head-major, layer after layer, as on vLLM's CPU backend."""
        heads = self.kv_heads // tp_size
        slab = self.block_size * self.token_bytes
        return KVLayout(
            regions=tuple(
                Region(
                    layer=layer,
                    part=Part.KV,
                    base=base + layer * self.num_blocks * heads * slab,
                    block_stride=heads * slab,
                    head_stride=slab,
                    token_stride=self.token_bytes,
                    token_bytes=self.token_bytes,
                )
                for layer in range(self.layers)
            ),
            dtype="bfloat16",
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            tp_rank=0,
            tp_size=tp_size,
            num_kv_heads=self.kv_heads,
            heads=tuple(range(heads)),
        )

    def size(self, tp_size: int) -> int:
        """Bytes of rank 0's cache."""
        return self.layers * self.num_blocks * (self.kv_heads // tp_size) * self.block_size * self.token_bytes


SHAPES = {
    "small-heads": Shape("small heads, TP 8 to 2", 16, 8, 8, 2, 32, 512),
    "smollm2": Shape("SmolLM2-135M, TP 1 to 1", 30, 3, 1, 1, 128, 512),
    "qwen3-32b": Shape("Qwen3-32B, TP 8 to 2", 64, 8, 8, 2, 128, 512),
}


class Worker:
    """One process's cache, endpoint and staging. The one with `serve` is the passive end."""

    def __init__(self, shape: Shape, role: str, staging_bytes: int) -> None:
        self.tp = shape.source_tp if role == "prefill" else shape.sink_tp
        self.device = CpuDevice()
        self.transport = MooncakeTransport(HOST)
        cache = self.device.allocate(shape.size(self.tp))
        self.memory = cache.owner
        self.base = cache.range.address
        self.transport.register([cache.range])
        self.layout = shape.layout(self.base, self.tp)
        self.service = WorkerService(
            self.device,
            self.transport,
            self.layout,
            host=HOST,
            secret=b"",
            staging_bytes=staging_bytes,
            idle_s=600,
        )

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            tp_rank=0,
            pp_rank=0,
            transport=self.transport.name,
            session=self.transport.session,
            service_host=HOST,
            service_port=self.service.port,
            service_life=self.service.life,
            stages=self.service.stages,
            layout=self.layout,
        )

    def close(self) -> None:
        self.service.close()
        self.transport.close()


def serve(shape: Shape, role: str, staging_bytes: int) -> None:
    """The passive process: says who it is, sends its memory to whoever connects, ends with its input."""
    worker = Worker(shape, role, staging_bytes)
    worker.memory[:] = np.random.default_rng(0).integers(0, 256, worker.memory.size, dtype=np.uint8)
    listener = socket.create_server((HOST, 0))
    threading.Thread(
        target=send_memory, args=(listener, worker.memory, shape.total), name="plain-socket", daemon=True
    ).start()
    print(
        json.dumps({"port": listener.getsockname()[1], "info": msgspec.json.encode(worker.info).decode()}),
        flush=True,
    )
    sys.stdin.read()
    worker.close()


def send_memory(listener: socket.socket, memory: np.ndarray, total: int) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(memoryview(memory)[:total])


class Peer:
    """The parent's handle on a passive process."""

    def __init__(self, shape: str, role: str, staging_bytes: int) -> None:
        command = [sys.executable, __file__, "--serve", shape, role, "--staging-bytes", str(staging_bytes)]
        environ = {**os.environ, **mooncake_environment("tcp")}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environ,
        )
        assert self.process.stdout is not None
        hello = json.loads(self.process.stdout.readline())
        self.info = msgspec.json.decode(hello["info"], type=WorkerInfo)
        self.socket = socket.create_connection((HOST, hello["port"]))

    @property
    def base(self) -> int:
        """Address of its cache."""
        return min(region.base for region in self.info.layout.regions)

    def stop(self) -> None:
        self.socket.close()
        self.process.communicate()


def deadline() -> float:
    return time.monotonic() + 60


class Run:
    """All designs for one shape."""

    def __init__(self, key: str, staging_bytes: int) -> None:
        self.shape = SHAPES[key]
        self.source, self.sink = Peer(key, "prefill", staging_bytes), Peer(key, "decode", staging_bytes)
        self.puller = Worker(self.shape, "decode", staging_bytes)
        self.pusher = Worker(self.shape, "prefill", staging_bytes)
        self.client = SideChannelClient(b"", "bench")
        rng = np.random.default_rng(1)
        blocks = self.shape.num_blocks
        self.source_ids = (rng.permutation(blocks).tolist(),)
        self.sink_ids = (rng.permutation(blocks).tolist(),)
        self.tokens = (0, blocks * self.shape.block_size)
        heads = tuple(range(self.shape.kv_heads // self.shape.source_tp))
        self.pull = StagedRequest(
            pair(self.source.info.layout, self.puller.layout, heads), 0, self.source_ids, self.sink_ids
        )
        self.push = StagedRequest(
            pair(self.pusher.layout, self.sink.info.layout, heads), 0, self.source_ids, self.sink_ids
        )
        self.reader = self.mover(self.puller, "puller", push=False, staging_bytes=staging_bytes)
        self.writer = self.mover(self.pusher, "pusher", push=True, staging_bytes=staging_bytes)
        self.pieces = self.pull.pair.pieces(self.source_ids, self.sink_ids, *self.tokens)
        if self.pieces.num_bytes != self.shape.total:
            raise SystemExit(
                f"{self.shape.name}: the plan moves {self.pieces.num_bytes} bytes, not {self.shape.total}"
            )

    def mover(self, worker: Worker, me: str, *, push: bool, staging_bytes: int) -> Mover:
        return Mover(
            worker.device,
            worker.transport,
            self.client,
            me,
            worker.layout,
            push=push,
            staging_bytes=staging_bytes,
        )

    def designs(self) -> dict[str, Callable[[], None]]:
        return {
            "one write (library)": self.one_write,
            "one read (library)": self.one_read,
            "one write (our transport)": self.one_piece,
            "ours, pull": lambda: self.moved(self.reader, self.source, self.pull),
            "ours, push": lambda: self.moved(self.writer, self.sink, self.push),
            "same pieces unstaged": lambda: self.puller.transport.read(
                self.source.info.session, self.pieces, deadline()
            ),
            "same pieces, library batches": self.library_batches,
            "plain socket": self.plain_socket,
        }

    def moved(self, mover: Mover, at: Peer, request: StagedRequest) -> None:
        if mover.move(at.info, request, self.tokens, deadline()) != self.shape.total:
            raise SystemExit("bytes are missing")

    def one_write(self) -> None:
        self.check(
            self.library(self.pusher).transfer_sync_write(
                self.sink.info.session, self.pusher.base, self.sink.base, self.shape.total
            )
        )

    def one_piece(self) -> None:
        piece = Pieces(*(np.array([x], np.int64) for x in (self.pusher.base, self.sink.base, self.shape.total)))
        self.pusher.transport.write(self.sink.info.session, piece, deadline())

    def one_read(self) -> None:
        self.check(
            self.library(self.puller).transfer_sync_read(
                self.source.info.session, self.puller.base, self.source.base, self.shape.total
            )
        )

    def library_batches(self) -> None:
        local, remote, length = self.pieces.sink.tolist(), self.pieces.source.tolist(), self.pieces.length.tolist()
        for first in range(0, len(length), MAX_BATCH):
            part = slice(first, first + MAX_BATCH)
            self.check(
                self.library(self.puller).batch_transfer_sync_read(
                    self.source.info.session, local[part], remote[part], length[part]
                )
            )

    def plain_socket(self) -> None:
        view = memoryview(self.puller.memory)[: self.shape.total]
        self.source.socket.sendall(b"g")
        received = 0
        while received < self.shape.total:
            received += self.source.socket.recv_into(view[received:])

    def library(self, worker: Worker) -> Any:
        """The engine object itself: what our transport is compared with."""
        return worker.transport._current.engine

    def check(self, code: int) -> None:
        if code != 0:
            raise SystemExit(f"the library failed with {code}")

    def verify(self) -> None:
        """Once, before the clock runs: the right bytes at the right places."""
        self.moved(self.reader, self.source, self.pull)
        got = gathered(self.puller, self.pieces.sink, self.pieces.length)
        self.puller.transport.read(
            self.source.info.session, Pieces(self.pieces.source, self.pieces.sink, self.pieces.length), deadline()
        )
        if not np.array_equal(got, gathered(self.puller, self.pieces.sink, self.pieces.length)):
            raise SystemExit("the staged bytes differ from the unstaged ones")

    def close(self) -> None:
        self.reader.close()
        self.writer.close()
        self.client.close()
        self.puller.close()
        self.pusher.close()
        self.source.stop()
        self.sink.stop()


def gathered(worker: Worker, address: np.ndarray, length: np.ndarray) -> np.ndarray:
    start = worker.memory.ctypes.data
    return np.concatenate(
        [worker.memory[a - start : a - start + n] for a, n in zip(address.tolist(), length.tolist(), strict=True)]
    )


@dataclass(frozen=True)
class Sample:
    """One transfer: how long it took, and this (the active) process's CPU time in it."""

    wall_s: float
    cpu_s: float


def measure(key: str, rounds: int, staging_bytes: int) -> dict[str, list[Sample]]:
    run = Run(key, staging_bytes)
    try:
        run.verify()
        designs = run.designs()
        for move in designs.values():
            move()
        samples: dict[str, list[Sample]] = {name: [] for name in designs}
        for _ in range(rounds):
            for name, move in designs.items():
                started, busy = time.perf_counter(), time.process_time()
                move()
                samples[name].append(Sample(time.perf_counter() - started, time.process_time() - busy))
        return samples
    finally:
        run.close()


def table(shape: Shape, samples: dict[str, list[Sample]]) -> str:
    base = statistics.median(sample.wall_s for sample in samples["one write (library)"])
    lines = [
        f"{shape.name}: {shape.layers * shape.num_blocks} pieces of {shape.piece_bytes >> 10} KiB",
        "",
        "| design | ms | best ms | CPU ms | GB/s | of the one write |",
        "|---|---|---|---|---|---|",
    ]
    for name, values in samples.items():
        median = statistics.median(sample.wall_s for sample in values)
        best = min(sample.wall_s for sample in values)
        cpu = statistics.median(sample.cpu_s for sample in values)
        lines.append(
            f"| {name} | {median * 1e3:.1f} | {best * 1e3:.1f} | {cpu * 1e3:.1f} "
            f"| {shape.total / median / 1e9:.2f} | {base / median:.0%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", nargs=2, metavar=("SHAPE", "ROLE"), help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=SHAPES, help="only this one")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--staging-bytes", type=int, default=64 << 20, help="staging memory per peer")
    options = parser.parse_args()
    if options.serve:
        serve(SHAPES[options.serve[0]], options.serve[1], options.staging_bytes)
        return 0
    for key in [options.shape] if options.shape else SHAPES:
        print(table(SHAPES[key], measure(key, options.rounds, options.staging_bytes)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
