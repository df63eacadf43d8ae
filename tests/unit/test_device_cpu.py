"""Gather and scatter on the CPU against a byte-by-byte reference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.errors import LocalProtocolError
from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.device.cpu import CpuDevice

SIZE = 1 << 12


def reference(
    source: np.ndarray, sink: np.ndarray, froms: list[int], tos: list[int], lengths: list[int]
) -> np.ndarray:
    expected = sink.copy()
    for start, to, length in zip(froms, tos, lengths, strict=True):
        expected[to : to + length] = source[start : start + length]
    return expected


@settings(deadline=None)
@given(data=st.data(), length=st.sampled_from([1, 16, 48, 256]), uniform=st.booleans(), seed=st.integers(0, 99))
def test_copy_moves_exactly_the_pieces(data: st.DataObject, length: int, uniform: bool, seed: int) -> None:
    device = CpuDevice()
    one, other = device.allocate(SIZE), device.allocate(SIZE)
    memory = [
        np.frombuffer(b.owner, np.uint8)[b.range.address - b.owner.ctypes.data :][:SIZE] for b in (one, other)
    ]
    source, sink = memory
    source[:] = np.random.default_rng(seed).integers(1, 256, SIZE)
    slots = SIZE // length
    count = data.draw(st.integers(1, min(12, slots)))
    order = st.sampled_from([0, 1, 2])

    def offsets() -> list[int]:
        chosen = data.draw(st.lists(st.integers(0, slots - 1), min_size=count, max_size=count, unique=True))
        arranged = {0: chosen, 1: list(range(count)), 2: list(range(count))[::-1]}[data.draw(order)]
        return [slot * length for slot in arranged]

    froms, tos = offsets(), offsets()
    lengths = [length] * count if uniform else [max(1, length - i % 3) for i in range(count)]
    expected = reference(source, sink, froms, tos, lengths)
    event = device.copy(
        Pieces(
            one.range.address + np.array(froms, dtype=np.int64),
            other.range.address + np.array(tos, dtype=np.int64),
            np.array(lengths, dtype=np.int64),
        )
    )
    assert event.done()
    assert np.array_equal(sink, expected)


@settings(deadline=None)
@given(st.integers(1, 24), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9), st.permutations(range(6)))
def test_tiles_move_like_their_pieces(
    length: int, count: int, source_gap: int, sink_gap: int, order: list[int]
) -> None:
    device = CpuDevice()
    one, other = device.allocate(SIZE), device.allocate(SIZE)
    source, sink = (
        np.frombuffer(b.owner, np.uint8)[b.range.address - b.owner.ctypes.data :][:SIZE] for b in (one, other)
    )
    source[:] = np.random.default_rng(length).integers(1, 256, SIZE)
    steps = length + source_gap, length + sink_gap
    tiles = Tiles(
        one.range.address + np.array(order, np.int64) * (count * steps[0] + 3),
        other.range.address + np.arange(6, dtype=np.int64) * (count * steps[1]),
        length,
        count,
        *steps,
    )
    flat = tiles.pieces()
    origin = one.range.address, other.range.address
    expected = reference(
        source,
        sink,
        (flat.source - origin[0]).tolist(),
        (flat.sink - origin[1]).tolist(),
        flat.length.tolist(),
    )
    assert device.copy(tiles).done()
    assert np.array_equal(sink, expected) and flat.num_bytes == tiles.num_bytes


def test_tiles_that_reach_outside_of_known_memory_are_refused() -> None:
    device = CpuDevice()
    one, other = device.allocate(64), device.allocate(1 << 20)
    far = Tiles(np.array([one.range.address]), np.array([other.range.address]), 8, 2, 4096, 8)
    with pytest.raises(LocalProtocolError, match="outside"):
        device.copy(far)


def test_copy_outside_of_known_memory_is_refused() -> None:
    device = CpuDevice()
    buffer = device.allocate(64)
    foreign = np.zeros(64, dtype=np.uint8)
    with pytest.raises(LocalProtocolError, match="outside"):
        device.copy(
            Pieces(
                np.array([foreign.ctypes.data], dtype=np.int64),
                np.array([buffer.range.address], dtype=np.int64),
                np.array([64], dtype=np.int64),
            )
        )
    assert not foreign.any()


def test_no_pieces_is_a_copy_that_is_done() -> None:
    nothing = np.zeros(0, dtype=np.int64)
    assert CpuDevice().copy(Pieces(nothing, nothing, nothing)).done()


class Storage:
    def __init__(self, address: int, size: int) -> None:
        self.address, self.size = address, size

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class Tensor:
    def __init__(self, storage: Storage) -> None:
        self.storage = storage

    def untyped_storage(self) -> Storage:
        return self.storage


def test_views_of_one_storage_are_registered_once_and_whole() -> None:
    storage = Storage(0x1000, 4096)
    ranges = CpuDevice().adopt([Tensor(storage), Tensor(storage), Tensor(Storage(0x8000, 16))])
    assert [(r.address, r.length) for r in ranges] == [(0x1000, 4096), (0x8000, 16)]
