"""A process with one worker's cache and its staging service: the passive end of the staged-transfer tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ascend_pd.layout.description import KVLayout, Part, Region
from ascend_pd.wire.environment import mooncake_environment
from ascend_pd.wire.messages import WorkerInfo
from connectors.device.cpu import CpuDevice
from connectors.transport.mooncake import MooncakeTransport
from connectors.transport.worker_service import WorkerService

ROOT = Path(__file__).resolve().parents[2]
LAYERS, BLOCKS, BLOCK_SIZE, TOKEN_BYTES, KV_HEADS = 4, 24, 16, 64, 8
SLAB = BLOCK_SIZE * TOKEN_BYTES
SECRET = b"between tests"


def layout(base: int, tp_size: int, tp_rank: int = 0) -> KVLayout:
    """One rank of `tp_size`; heads of a block one after another, K and V joined."""
    heads = KV_HEADS // tp_size
    return KVLayout(
        regions=tuple(
            Region(
                layer=layer,
                part=Part.KV,
                base=base + layer * BLOCKS * heads * SLAB,
                block_stride=heads * SLAB,
                head_stride=SLAB,
                token_stride=TOKEN_BYTES,
                token_bytes=TOKEN_BYTES,
            )
            for layer in range(LAYERS)
        ),
        dtype="bfloat16",
        num_blocks=BLOCKS,
        block_size=BLOCK_SIZE,
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_kv_heads=KV_HEADS,
        heads=tuple(range(tp_rank * heads, (tp_rank + 1) * heads)),
    )


class StagedWorker:
    """A cache as `[layers, blocks, heads, slab bytes]`, reachable, with a staging service."""

    def __init__(self, tp_size: int, staging_bytes: int, tp_rank: int = 0) -> None:
        heads = KV_HEADS // tp_size
        self.device = CpuDevice()
        self.transport = MooncakeTransport("127.0.0.1")
        cache = self.device.allocate(LAYERS * BLOCKS * heads * SLAB)
        start = cache.range.address - cache.owner.ctypes.data
        self.cache = cache.owner[start : start + cache.range.length].reshape(LAYERS, BLOCKS, heads, SLAB)
        self.transport.register([cache.range])
        self.layout = layout(cache.range.address, tp_size, tp_rank)
        self.service = WorkerService(
            self.device,
            self.transport,
            self.layout,
            host="127.0.0.1",
            secret=SECRET,
            staging_bytes=staging_bytes,
            idle_s=600,
        )

    @property
    def info(self) -> WorkerInfo:
        return WorkerInfo(
            tp_rank=self.layout.tp_rank,
            pp_rank=0,
            transport=self.transport.name,
            session=self.transport.session,
            service_host="127.0.0.1",
            service_port=self.service.port,
            service_life=self.service.life,
            stages=self.service.stages,
            layout=self.layout,
        )

    def close(self) -> None:
        self.service.close()
        self.transport.close()


def pattern(tp_size: int, seed: int) -> np.ndarray:
    """What a worker's cache is filled with."""
    shape = (LAYERS, BLOCKS, KV_HEADS // tp_size, SLAB)
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


class StagedPeer:
    """The parent's handle."""

    def __init__(self, tp_size: int, seed: int, staging_bytes: int) -> None:
        arguments = [str(tp_size), str(seed), str(staging_bytes)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.staged_peer", *arguments],
            cwd=ROOT,
            env={**os.environ, **mooncake_environment("tcp")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seed = seed
        self.info = msgspec.json.decode(self._answer()["info"], type=WorkerInfo)

    def ask(self, **command: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def cache(self, tp_size: int) -> np.ndarray:
        """A copy of its cache."""
        path = self.ask(do="dump")["path"]
        shape = (LAYERS, BLOCKS, KV_HEADS // tp_size, SLAB)
        return np.fromfile(path, dtype=np.uint8).reshape(shape)

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended with {self.process.wait()}")
        return json.loads(line)


def serve(tp_size: int, seed: int, staging_bytes: int) -> None:
    worker = StagedWorker(tp_size, staging_bytes)
    worker.cache[:] = pattern(tp_size, seed)
    print(json.dumps({"info": msgspec.json.encode(worker.info).decode()}), flush=True)
    dump = Path("/dev/shm") / f"staged-peer-{os.getpid()}"
    try:
        for line in sys.stdin:
            match json.loads(line)["do"]:
                case "dump":
                    worker.cache.tofile(dump)
                    print(json.dumps({"path": str(dump)}), flush=True)
                case "fence":
                    worker.transport.rotate()
                    worker.service.fenced()
                    print(json.dumps({"info": msgspec.json.encode(worker.info).decode()}), flush=True)
    finally:
        dump.unlink(missing_ok=True)
        worker.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
