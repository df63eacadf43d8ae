"""A process that is all of P's workers and its side channel: TP 8, one head each, every block held for ever."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ascend_pd.wire.environment import mooncake_environment
from ascend_pd.wire.identity import EngineRef, Fingerprint
from ascend_pd.wire.messages import Answer, Done, Hello, HelloReply, Reply, Request, Verdict
from connectors.sidechannel.server import SideChannelServer
from tests.engine.staged_peer import BLOCK_SIZE, KV_HEADS, SECRET, StagedWorker, pattern

ROOT = Path(__file__).resolve().parents[2]
ENGINE = EngineRef("prefill-0", "life-1")
FINGERPRINT = Fingerprint(
    architecture="Test",
    model_config_hash="0",
    num_layers=4,
    num_kv_heads=KV_HEADS,
    head_size=16,
    kv_cache_dtype="bfloat16",
    hardware="cpu",
    tokenizer_hash="0",
    chat_template_hash="0",
)


class PrefillWorkers:
    """The parent's handle."""

    def __init__(self, staging_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.prefill_workers", str(staging_bytes)],
            cwd=ROOT,
            env={**os.environ, **mooncake_environment("tcp")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port: int = json.loads(self.process.stdout.readline())["port"]

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve(staging_bytes: int) -> None:
    workers = [StagedWorker(KV_HEADS, staging_bytes, rank) for rank in range(KV_HEADS)]
    for rank, worker in enumerate(workers):
        worker.cache[:] = pattern(KV_HEADS, 100 + rank)

    def answer(request: Request) -> Reply:
        if isinstance(request, Hello):
            return HelloReply(
                engine=ENGINE,
                role="prefill",
                fingerprint=FINGERPRINT,
                block_size=BLOCK_SIZE,
                tp_size=KV_HEADS,
                pp_size=1,
                workers=tuple(worker.info for worker in workers),
            )
        vouched = isinstance(request, Done) and request.source_epoch == ENGINE.epoch
        return Answer(verdict=Verdict.OK if vouched else Verdict.GONE)

    server = SideChannelServer("127.0.0.1", 0, SECRET, answer, "prefill-workers")
    server.start()
    print(json.dumps({"port": server.port}), flush=True)
    sys.stdin.read()
    server.close()
    for worker in workers:
        worker.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
