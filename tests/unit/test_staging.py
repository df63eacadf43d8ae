"""The staging pipeline: bounded slots, the right bytes, and slots that a failed transfer may still touch."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ascend_pd.errors import LocalProtocolError, TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.device.base import Buffer
from connectors.device.cpu import CpuDevice
from connectors.transport.staging import Batch, SlotPool, StagingPipeline, slot_sizes
from tests.fakes.loopback_transport import LoopbackTransport

PIECE = 1024
BATCH = 64 << 10
NUM_BATCHES = 7
STAGING = 2 * BATCH


class Bench:
    """Two memories of the same process, 7 batches of 64 pieces each at shuffled places."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        self.transport = LoopbackTransport()
        self.pool = SlotPool(self.device, self.transport, STAGING)
        self.pipeline = StagingPipeline(self.device, self.transport, self.pool, "test")
        self.source = self._memory()
        self.sink = self._memory()
        self.bytes(self.source)[:] = np.random.default_rng(0).integers(0, 256, NUM_BATCHES * BATCH)
        order = np.random.default_rng(1).permutation(NUM_BATCHES * BATCH // PIECE).astype(np.int64)
        self.places = order.reshape(NUM_BATCHES, -1) * PIECE

    def _memory(self) -> Buffer:
        return self.device.allocate(NUM_BATCHES * BATCH)

    @staticmethod
    def bytes(buffer: Buffer) -> np.ndarray:
        start = buffer.range.address - buffer.owner.ctypes.data
        return buffer.owner[start : start + buffer.range.length]

    def read_batches(self) -> Iterator[Batch]:
        """Wire: from a packed source; local: scatter."""
        for index, places in enumerate(self.places):
            first = self.source.range.address + index * BATCH
            yield Batch(wire=self._whole(first, True), local=self._pieces(places, scatter=True))

    def write_batches(self) -> Iterator[Batch]:
        for index, places in enumerate(self.places):
            first = self.sink.range.address + index * BATCH
            yield Batch(wire=self._whole(first, False), local=self._pieces(places, scatter=False))

    def _whole(self, remote: int, read: bool):
        def wire(slot: int) -> Pieces:
            ends = (remote, slot) if read else (slot, remote)
            return Pieces(*(np.array([x], dtype=np.int64) for x in (*ends, BATCH)))

        return wire

    def _pieces(self, places: np.ndarray, *, scatter: bool):
        def local(slot: int) -> tuple[Pieces, ...]:
            packed = slot + np.arange(places.size, dtype=np.int64) * PIECE
            length = np.full(places.size, PIECE, dtype=np.int64)
            if scatter:
                return (Pieces(packed, self.sink.range.address + places, length),)
            return (Pieces(self.source.range.address + places, packed, length),)

        return local


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.pipeline.close()


def soon() -> float:
    return time.monotonic() + 10


def test_a_read_scatters_every_batch(bench: Bench) -> None:
    bench.pipeline.read("peer", bench.read_batches(), soon())
    source, sink = bench.bytes(bench.source), bench.bytes(bench.sink)
    expected = np.zeros_like(sink)
    packed = source.reshape(-1, PIECE)
    expected.reshape(-1, PIECE)[bench.places.ravel() // PIECE] = packed
    assert np.array_equal(sink, expected)


def test_a_write_gathers_every_batch(bench: Bench) -> None:
    bench.pipeline.write("peer", bench.write_batches(), soon())
    source, sink = bench.bytes(bench.source), bench.bytes(bench.sink)
    assert np.array_equal(sink.reshape(-1, PIECE), source.reshape(-1, PIECE)[bench.places.ravel() // PIECE])


def test_more_batches_than_slots_cost_no_more_memory(bench: Bench) -> None:
    bench.pipeline.read("peer", bench.read_batches(), soon())
    bench.pipeline.write("peer", bench.write_batches(), soon())
    assert sum(r.length for r in bench.transport.registered) == STAGING
    assert {bench.pool.take(soon()) for _ in range(2)} and bench.pool.take_free() is None


def test_a_reader_waits_for_a_slot_that_another_holds(bench: Bench) -> None:
    held = [bench.pool.take(soon()) for _ in range(2)]
    reader = threading.Thread(target=bench.pipeline.read, args=("peer", bench.read_batches(), soon()))
    reader.start()
    time.sleep(0.05)
    assert not bench.transport.moves
    for slot in held:
        bench.pool.give(slot)
    reader.join(10)
    assert len(bench.transport.moves) == NUM_BATCHES


def test_without_a_slot_before_the_deadline_nothing_is_submitted(bench: Bench) -> None:
    for _ in range(2):
        bench.pool.take(soon())
    with pytest.raises(TransferError) as caught:
        bench.pipeline.read("peer", bench.read_batches(), time.monotonic() + 0.05)
    assert caught.value.quiesced and not bench.transport.moves


def fail_on(bench: Bench, number: int, *, quiesced: bool) -> None:
    def on_move() -> None:
        if len(bench.transport.moves) == number:
            raise TransferError("injected", quiesced=quiesced)

    bench.transport.on_move = on_move


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_slot_of_a_failed_transfer_is_not_used_before_the_fence(bench: Bench, direction: str) -> None:
    fail_on(bench, 3, quiesced=False)
    batches = bench.read_batches() if direction == "read" else bench.write_batches()
    with pytest.raises(TransferError, match="injected"):
        getattr(bench.pipeline, direction)("peer", batches, soon())
    assert bench.pool.take_free() is not None
    assert bench.pool.take_free() is None
    bench.pool.fenced()
    assert bench.pool.take_free() is None, "no rotation has ended yet"
    bench.transport.rotate()
    bench.pool.fenced()
    assert bench.pool.take_free() is not None


@pytest.mark.parametrize("error", [TransferError("injected", quiesced=True), LocalProtocolError("injected")])
@pytest.mark.parametrize(("asks", "quiesced"), [(True, False), (False, True)])
def test_a_write_fails_unquiesced_once_the_peer_was_asked_to_scatter(
    bench: Bench, error: Exception, asks: bool, quiesced: bool
) -> None:
    """However little of the failing batch was submitted: the peer may still carry out what it was asked before."""

    def on_move() -> None:
        if len(bench.transport.moves) == 3:
            raise error

    bench.transport.on_move = on_move
    batches = bench.write_batches()
    if asks:
        batches = (dataclasses.replace(batch, settle=lambda deadline: None) for batch in batches)
    with pytest.raises((TransferError, LocalProtocolError), match="injected") as caught:
        bench.pipeline.write("peer", batches, soon())
    assert getattr(caught.value, "quiesced", True) is quiesced


def test_a_slot_cut_off_by_a_fence_is_free_when_that_fence_is_over(bench: Bench) -> None:
    """The new endpoint is current before the transfers on the old one are cut."""
    former = bench.transport.session

    def cut() -> None:
        bench.transport.rotate()
        raise TransferError("cut off by a fence", quiesced=False)

    bench.transport.on_move = cut
    with pytest.raises(TransferError, match="cut off"):
        bench.pipeline.read("peer", bench.read_batches(), soon(), former)
    bench.pool.fenced()
    assert {bench.pool.take_free() for _ in range(2)}.isdisjoint({None})


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_failure_with_nothing_submitted_costs_no_slot(bench: Bench, direction: str) -> None:
    fail_on(bench, 3, quiesced=True)
    batches = bench.read_batches() if direction == "read" else bench.write_batches()
    with pytest.raises(TransferError, match="injected"):
        getattr(bench.pipeline, direction)("peer", batches, soon())
    assert bench.pool.take_free() is not None
    assert bench.pool.take_free() is not None


def test_a_batch_that_copies_outside_of_memory_fails_alone(bench: Bench) -> None:
    foreign = np.zeros(64, dtype=np.uint8)

    def local(slot: int) -> tuple[Pieces, ...]:
        return (Pieces(*(np.array([x], dtype=np.int64) for x in (slot, foreign.ctypes.data, 64))),)

    batch = next(bench.read_batches())
    with pytest.raises(LocalProtocolError):
        bench.pipeline.read("peer", [Batch(wire=batch.wire, local=local)], soon())
    bench.pipeline.read("peer", bench.read_batches(), soon())


def test_the_other_end_is_asked_in_order(bench: Bench) -> None:
    calls: list[str] = []
    many = [
        Batch(
            wire=batch.wire,
            local=batch.local,
            before=lambda deadline, i=i: calls.append(f"before {i}"),
            after=lambda deadline, i=i: calls.append(f"after {i}"),
            settle=lambda deadline, i=i: calls.append(f"settle {i}"),
        )
        for i, batch in enumerate([*bench.write_batches()][:3])
    ]
    bench.pipeline.write("peer", many, soon())
    each = [f"{when} {i}" for i in range(3) for when in ("before", "after")]
    assert calls == [*each, "settle 0", "settle 1", "settle 2"]


@pytest.mark.parametrize(
    ("staging", "slots"),
    [
        (64 << 20, (4, 8 << 20)),
        (1 << 20, (2, 512 << 10)),
        (24 << 20, (3, 8 << 20)),
        (100_000, (0, 0)),
        (0, (0, 0)),
    ],
)
def test_slots_fit_the_memory_that_is_allowed(staging: int, slots: tuple[int, int]) -> None:
    assert slot_sizes(staging) == slots


def test_without_memory_for_two_slots_staging_is_off() -> None:
    device, transport = CpuDevice(), LoopbackTransport()
    with pytest.raises(LocalProtocolError, match="staging is off"):
        SlotPool(device, transport, 1000).take(soon())
