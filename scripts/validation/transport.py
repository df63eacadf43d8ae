"""Two processes, two dies, one transport: bytes compared, a peer that dies, the fence."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ascend_pd.errors import LocalProtocolError, TransferError
from ascend_pd.layout.pieces import Pieces
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.device import create_device
from connectors.transport import Placement, create
from scripts.validation.report import Part

ROOT = Path(__file__).resolve().parents[2]
SIZE = 64 << 20
SHAPES = ((256, 512), (4096, 3000), (65536, 128), (1 << 20, 32))
"""(bytes per piece, pieces); 3000 is more than Mooncake lets be outstanding to one peer."""
PATIENCE_S = 60.0
ANSWER_S = 120.0
SOURCE, SINK = 0, SIZE // 2


class Memory:
    """`size` bytes on a device, registered with its transport, and seen from the host."""

    def __init__(self, hardware: str, die: int, config: ConnectorConfig, size: int) -> None:
        if hardware != "cpu":
            import torch
            import torch_npu  # noqa: F401

            torch.npu.set_device(die)
        self.device = create_device(hardware)
        self.device.bind_thread()
        self.transport = create(config, Placement("union", die))
        self.buffer = self.device.allocate(size)
        self.size = size
        self.transport.register([self.buffer.range])

    @property
    def address(self) -> int:
        return self.buffer.range.address

    def write(self, data: np.ndarray, offset: int = 0) -> None:
        if self.device.name == "cpu":
            ctypes.memmove(self.address + offset, data.ctypes.data, data.nbytes)
        else:
            self._flat()[offset : offset + data.nbytes].copy_(_tensor(data))

    def read(self) -> np.ndarray:
        if self.device.name == "cpu":
            return np.frombuffer(ctypes.string_at(self.address, self.size), dtype=np.uint8)
        return np.asarray(self._flat().cpu().numpy().view(np.uint8))

    def _flat(self) -> Any:
        owner = self.buffer.owner
        skip = self.address - owner.data_ptr()
        return owner[skip : skip + self.size]


def _tensor(data: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(data.view(np.int8))


def pattern(seed: int, size: int = SIZE) -> np.ndarray:
    """Bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Peer:
    """The other process."""

    def __init__(self, hardware: str, die: int, config: dict[str, Any], seed: int) -> None:
        line = [sys.executable, "-m", "scripts.validation.transport", hardware, str(die), str(seed)]
        self.process = subprocess.Popen(
            [*line, json.dumps(config)], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        hello = self.answer()
        self.session, self.address = str(hello["session"]), int(hello["address"])

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next line that is an answer; libraries print to standard output, too."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer "):
                found: dict[str, Any] = json.loads(line.removeprefix("answer "))
                return found
        raise RuntimeError(f"the other process ended with {self.process.wait()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(hardware: str, die: int, seed: int, config: dict[str, Any]) -> None:
    """The other process: holds a pattern, writes when told."""
    memory = Memory(hardware, die, ConnectorConfig(**config), SIZE)
    memory.write(pattern(seed))

    def answer(**fields: Any) -> None:
        print("answer " + json.dumps(fields), flush=True)

    answer(session=memory.transport.session, address=memory.address)
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "digest":
            answer(sum=int(memory.read().astype(np.uint64).sum()))
        else:
            whole = _pieces(memory.address, command["sink"], 1 << 20, SIZE >> 20)
            try:
                memory.transport.write(command["peer"], whole, time.monotonic() + PATIENCE_S)
                answer(ok=True)
            except TransferError as error:
                answer(ok=False, error=str(error))
    memory.transport.close()


def _pieces(source: int, sink: int, length: int, count: int) -> Pieces:
    at = np.arange(count, dtype=np.int64) * length
    return Pieces(source + at, sink + at, np.full(count, length, dtype=np.int64))


@contextmanager
def other_process(hardware: str, die: int, config: dict[str, Any], seed: int) -> Iterator[Peer]:
    peer = Peer(hardware, die, config, seed)
    try:
        yield peer
    finally:
        peer.stop()


def run(part: Part, hardware: str, config: dict[str, Any], dies: tuple[int, int]) -> None:
    """All checks between this process on `dies[0]` and others on `dies[1]`."""
    here = Memory(hardware, dies[0], ConnectorConfig(**config), SIZE)
    part.facts = {"transport": here.transport.name, "device": here.device.name, "bytes": SIZE}
    try:
        with other_process(hardware, dies[1], config, seed=1) as peer:
            _reads(part, here, peer)
            _writes(part, here, peer)
            _outside(part, here, peer)
            _staged(part, here)
        _dead_peer(part, here, peer)
        with other_process(hardware, dies[1], config, seed=2) as peer:
            _fence(part, here, peer)
    finally:
        here.transport.close()


def _reads(part: Part, here: Memory, peer: Peer) -> None:
    theirs = pattern(1)
    for length, count in SHAPES:
        with part.check(f"read {count} pieces of {length} bytes") as check:
            here.write(np.zeros(SIZE, dtype=np.uint8))
            started = time.monotonic()
            pieces = _pieces(peer.address, here.address, length, count)
            here.transport.read(peer.session, pieces, started + PATIENCE_S)
            check.figures = _rate(pieces, started)
            _same(here.read()[: length * count], theirs[: length * count])


def _writes(part: Part, here: Memory, peer: Peer) -> None:
    ours = pattern(3)
    here.write(ours)
    for length, count in SHAPES:
        with part.check(f"write {count} pieces of {length} bytes") as check:
            started = time.monotonic()
            pieces = _pieces(here.address, peer.address, length, count)
            here.transport.write(peer.session, pieces, started + PATIENCE_S)
            check.figures = _rate(pieces, started)
    with part.check("what was written is there"):
        peer.tell(do="digest")
        written = max(length * count for length, count in SHAPES)
        expected = np.concatenate([ours[:written], pattern(1)[written:]])
        found, wanted = peer.answer()["sum"], int(expected.astype(np.uint64).sum())
        if found != wanted:
            raise ValueError(f"the other side's bytes add up to {found}, not {wanted}")


def _rate(pieces: Pieces, started: float) -> dict[str, float]:
    seconds = time.monotonic() - started
    return {
        "ms": round(seconds * 1e3, 2),
        "MB/s": round(pieces.num_bytes / seconds / 1e6, 1),
        "us/piece": round(seconds / len(pieces) * 1e6, 1),
    }


def _same(found: np.ndarray, wanted: np.ndarray) -> None:
    if not np.array_equal(found, wanted):
        wrong = np.flatnonzero(found != wanted)
        raise ValueError(f"{wrong.size} bytes differ, the first at {int(wrong[0])}")


def _outside(part: Part, here: Memory, peer: Peer) -> None:
    with part.check("memory that is not registered is refused before anything moves"):
        stray = _pieces(peer.address, here.address + SIZE, 4096, 1)
        try:
            here.transport.read(peer.session, stray, time.monotonic() + PATIENCE_S)
        except LocalProtocolError:
            return
        raise ValueError("it was not refused")


def _staged(part: Part, here: Memory) -> None:
    for name, length, stride in (("rows on a grid", 8192, 16384), ("rows off the grid", 5000, 12345)):
        with part.check(f"gather and scatter {name} on the device") as check:
            ours = pattern(4)
            here.write(ours)
            count = 1000
            at = np.arange(count, dtype=np.int64)
            source, sink = here.address + SOURCE + at[::-1] * stride, here.address + SINK + at * length
            started = time.monotonic()
            event = here.device.copy(Pieces(source, sink, np.full(count, length, dtype=np.int64)), None)
            if not event.wait(started + PATIENCE_S):
                raise TimeoutError("the copy is not done")
            check.figures = {"us/piece": round((time.monotonic() - started) / count * 1e6, 2)}
            rows = [ours[SOURCE + i * stride : SOURCE + i * stride + length] for i in reversed(range(count))]
            _same(here.read()[SINK : SINK + count * length], np.concatenate(rows))


def _dead_peer(part: Part, here: Memory, peer: Peer) -> None:
    with part.check("a transfer with a process that has died is an error in time") as check:
        started = time.monotonic()
        try:
            here.transport.read(peer.session, _pieces(peer.address, here.address, 4096, 1), started + PATIENCE_S)
        except TransferError:
            check.figures = {"s": round(time.monotonic() - started, 2)}
            return
        raise ValueError("the read succeeded")


def _fence(part: Part, here: Memory, peer: Peer) -> None:
    with part.check("after the fence nothing of a stopped peer's write lands") as check:
        here.write(np.zeros(SIZE, dtype=np.uint8))
        before = here.transport.session
        peer.tell(do="write", peer=before, sink=here.address)
        time.sleep(0.01)
        os.kill(peer.process.pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            after = here.transport.rotate()
            check.figures = {"fence ms": round((time.monotonic() - started) * 1e3, 1)}
            landed = here.read().copy()
        finally:
            os.kill(peer.process.pid, signal.SIGCONT)
        peer.answer()
        _same(here.read(), landed)
        if after == before:
            raise ValueError(f"the endpoint is still {before}")
        check.figures["share landed before"] = round(float(np.count_nonzero(landed)) / SIZE, 3)
    with part.check("the new endpoint works"):
        here.transport.read(
            peer.session, _pieces(peer.address, here.address, 1 << 20, 8), time.monotonic() + PATIENCE_S
        )
        _same(here.read()[: 8 << 20], pattern(2)[: 8 << 20])


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
