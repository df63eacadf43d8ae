"""A process with one transport and one patterned buffer, driven by JSON lines: the other end of the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ascend_pd.errors import AscendPdError
from ascend_pd.layout.pieces import Pieces
from ascend_pd.wire.connector_config import ConnectorConfig
from ascend_pd.wire.environment import mooncake_environment

ROOT = Path(__file__).resolve().parents[2]


def pattern(size: int, seed: int) -> np.ndarray:
    """`size` bytes that no other seed or offset repeats."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def pieces(source: int, sink: int, offsets: list[int] | np.ndarray, length: int) -> Pieces:
    """Equal pieces at the same offsets of both buffers."""
    at = np.asarray(offsets, dtype=np.int64)
    return Pieces(source + at, sink + at, np.full(at.size, length, dtype=np.int64))


class Peer:
    """The parent's handle. `ask` waits for the answer; `tell` does not."""

    def __init__(self, config: dict[str, Any], size: int, seed: int) -> None:
        command = [sys.executable, "-m", "tests.engine.transport_peer", json.dumps(config), str(size), str(seed)]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **mooncake_environment("tcp")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        hello = self.answer()
        self.session: str = hello["session"]
        self.address: int = hello["address"]
        self.unregistered: int = hello["unregistered"]

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.answer()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the peer process ended with {self.process.wait()}")
        return json.loads(line)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def serve(config: dict[str, Any], size: int, seed: int) -> None:
    # Imported here: the transport's library must not be loaded into the test process by this module.
    from connectors.transport import create
    from connectors.transport.base import MemoryRange

    transport = create(ConnectorConfig(**config))
    buffer = pattern(size, seed)
    hidden = pattern(4096, seed)
    base = buffer.ctypes.data
    transport.register([MemoryRange(base, size)])

    def answer(**fields: Any) -> None:
        print(json.dumps(fields), flush=True)

    answer(session=transport.session, address=base, unregistered=hidden.ctypes.data)
    for line in sys.stdin:
        command = json.loads(line)
        match command.pop("do"):
            case "fill":
                buffer[:] = command["value"]
                answer()
            case "count":
                answer(value=int(np.count_nonzero(buffer == command["value"])))
            case "matches":
                answer(value=bool(np.array_equal(buffer, pattern(size, command["seed"]))))
            case "write":
                many = pieces(base, command["sink"], command["offsets"], command["length"])
                try:
                    transport.write(command["peer"], many, time.monotonic() + command["timeout_s"])
                    answer(ok=True)
                except AscendPdError as error:
                    answer(ok=False, error=str(error), quiesced=getattr(error, "quiesced", None))
            case "rotate":
                answer(session=transport.rotate())
    transport.close()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
