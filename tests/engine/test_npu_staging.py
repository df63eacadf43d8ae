"""The staging pipeline on a fake NPU with late copies: no slot is used again, or sent, before its copy is done."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from connectors.transport.staging import SlotPool, StagingPipeline
from tests.fakes.loopback_transport import LoopbackTransport
from tests.fakes.torch_npu import FakeNpu, install
from tests.unit.test_staging import BATCH, NUM_BATCHES, PIECE, STAGING, Bench, soon

pytestmark = pytest.mark.engine


class NpuBench(Bench):
    """The same batches in the memory of an NPU."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.transport = LoopbackTransport()
        self.pool = SlotPool(device, self.transport, STAGING)
        self.pipeline = StagingPipeline(device, self.transport, self.pool, "test")
        self.source, self.sink = self._memory(), self._memory()
        self.bytes(self.source)[:] = np.random.default_rng(0).integers(1, 256, NUM_BATCHES * BATCH)
        self.bytes(self.sink)[:] = 0
        order = np.random.default_rng(1).permutation(NUM_BATCHES * BATCH // PIECE).astype(np.int64)
        self.places = order.reshape(NUM_BATCHES, -1) * PIECE

    @staticmethod
    def bytes(buffer: Any) -> np.ndarray:
        start = buffer.range.address - buffer.owner.data_ptr()
        return np.asarray(buffer.owner.numpy().view(np.uint8)[start : start + buffer.range.length])

    def run(self, direction: str) -> None:
        if direction == "read":
            self.pipeline.read("peer", self.read_batches(), soon())
        else:
            self.pipeline.write("peer", self.write_batches(), soon())

    def arrived(self, direction: str) -> bool:
        source, sink = (self.bytes(buffer).reshape(-1, PIECE) for buffer in (self.source, self.sink))
        rows = self.places.ravel() // PIECE
        return bool(
            np.array_equal(sink[rows], source) if direction == "read" else np.array_equal(sink, source[rows])
        )


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    install(monkeypatch, fake)
    fake.set_device(1)
    return fake


@pytest.fixture
def bench(npu: FakeNpu) -> Iterator[NpuBench]:
    bench = NpuBench(importlib.import_module("connectors.device.npu").NpuDevice())
    yield bench
    bench.pipeline.close()


@pytest.mark.parametrize("direction", ["read", "write"])
def test_every_batch_arrives_though_the_copies_are_late(npu: FakeNpu, bench: NpuBench, direction: str) -> None:
    with npu.running(seed=5):
        bench.run(direction)
    assert bench.arrived(direction)


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_pipeline_that_does_not_wait_for_its_copies_is_caught(
    npu: FakeNpu, bench: NpuBench, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    driver = importlib.import_module("connectors.device.npu")
    monkeypatch.setattr(driver.NpuEvent, "wait", lambda self, deadline: True)
    bench.run(direction)
    npu.drain()
    assert not bench.arrived(direction)
