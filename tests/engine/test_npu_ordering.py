"""The fake NPU catches the two ordering bugs of a layer-wise sender: each wait is left out once, and missed."""

from __future__ import annotations

import ctypes
import importlib
import time
from typing import Any

import numpy as np
import pytest
import torch

from ascend_pd.layout.pieces import Pieces
from connectors.device.base import Buffer, Event
from tests.fakes.torch_npu import FakeNpu, ascend_tensor, install

pytestmark = pytest.mark.engine
LAYERS, SHAPE = 4, (6, 16, 2, 32)
BLOCK_BYTES = 16 * 2 * 32 * 2
SENT_BLOCKS = (4, 1, 5)


class Sink:
    """A peer whose memory a write reaches at once, with whatever bytes are there at that moment."""

    def __init__(self) -> None:
        self.memory = np.zeros((LAYERS, len(SENT_BLOCKS) * BLOCK_BYTES), dtype=np.uint8)

    def write(self, layer: int, address: int) -> None:
        ctypes.memmove(self.memory[layer].ctypes.data, address, self.memory.shape[1])


class Sender:
    """Gathers each layer's blocks into one staging buffer and writes them, as soon as it dares."""

    def __init__(self, device: Any, caches: list[torch.Tensor], sink: Sink) -> None:
        self.device, self.caches, self.sink = device, caches, sink
        device.adopt(caches)
        self.buffers: list[Buffer] = [device.allocate(self.sink.memory.shape[1])]
        self.deadline = time.monotonic() + 5

    def gather(self, layer: int, after: Event | None, buffer: Buffer) -> Event:
        source = np.array([self.caches[layer].data_ptr() + block * BLOCK_BYTES for block in SENT_BLOCKS])
        into = buffer.range.address + BLOCK_BYTES * np.arange(len(SENT_BLOCKS))
        copied: Event = self.device.copy(Pieces(source, into, np.full(len(SENT_BLOCKS), BLOCK_BYTES)), after=after)
        return copied


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    install(monkeypatch, fake)
    return fake


@pytest.fixture
def sender(npu: FakeNpu) -> Sender:
    device = importlib.import_module("connectors.device.npu").NpuDevice()
    return Sender(device, [ascend_tensor(SHAPE) for _ in range(LAYERS)], Sink())


def attention(npu: FakeNpu, cache: torch.Tensor, layer: int) -> None:
    """One layer's forward: other work, then its KV is written."""
    npu.compute(lambda: None)
    npu.compute(lambda: cache.fill_(layer + 1))


def arrived(sink: Sink) -> list[bool]:
    """Per layer: the sink has what the layer's forward wrote."""
    expected = [
        torch.full((1,), layer + 1, dtype=torch.bfloat16).view(torch.uint8).numpy() for layer in range(LAYERS)
    ]
    return [bool((row.reshape(-1, 2) == value).all()) for row, value in zip(sink.memory, expected, strict=True)]


@pytest.mark.parametrize("seed", range(5))
def test_a_layer_pushed_after_its_event_arrives_whole(npu: FakeNpu, sender: Sender, seed: int) -> None:
    with npu.running(seed):
        for layer, cache in enumerate(sender.caches):
            attention(npu, cache, layer)
            copied = sender.gather(layer, sender.device.record(), sender.buffers[0])
            assert copied.wait(sender.deadline)
            sender.sink.write(layer, sender.buffers[0].range.address)
    assert arrived(sender.sink) == [True] * LAYERS


def test_a_layer_pushed_before_its_event_is_caught(npu: FakeNpu, sender: Sender) -> None:
    for layer, cache in enumerate(sender.caches):
        attention(npu, cache, layer)
        copied = sender.gather(layer, None, sender.buffers[0])
        while not copied.done():
            assert any(npu.step(stream) for stream in npu.streams if stream is not npu.current_stream())
        sender.sink.write(layer, sender.buffers[0].range.address)
    npu.drain()
    assert arrived(sender.sink) == [False] * LAYERS


@pytest.mark.parametrize("waits_for_copy", [True, False])
def test_a_staging_buffer_reused_too_early_is_caught(npu: FakeNpu, sender: Sender, waits_for_copy: bool) -> None:
    pending: list[Event] = []
    for layer, cache in enumerate(sender.caches):
        attention(npu, cache, layer)
        copied = sender.gather(layer, sender.device.record(), sender.buffers[0])
        if waits_for_copy:
            npu.drain(layer)
            assert copied.done()
            sender.sink.write(layer, sender.buffers[0].range.address)
        pending.append(copied)
    npu.drain()
    if not waits_for_copy:
        for layer, copied in enumerate(pending):
            assert copied.done()
            sender.sink.write(layer, sender.buffers[0].range.address)
    assert arrived(sender.sink) == ([True] * LAYERS if waits_for_copy else [False] * (LAYERS - 1) + [True])
