"""The CPU as a device: no streams, so every event is done when it is made, and copies happen at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import LocalProtocolError, OperatorError
from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.device.base import Buffer, Event
from connectors.transport.base import MemoryRange
from connectors.transport.ranges import first_outside, merge

ALIGNMENT = 4096


class Done:
    """The event of something that has already happened."""

    def done(self) -> bool:
        return True

    def wait(self, deadline: float) -> bool:
        return True


DONE = Done()


class CpuDevice:
    """See `connectors.device.base.Device`."""

    def __init__(self) -> None:
        self._memory: tuple[MemoryRange, ...] = ()

    @property
    def name(self) -> str:
        return "cpu"

    @property
    def index(self) -> int:
        return 0

    def bind_thread(self) -> None:
        """Threads need nothing here."""

    def adopt(self, tensors: Iterable[Any]) -> tuple[MemoryRange, ...]:
        storages = [tensor.untyped_storage() for tensor in tensors]
        ranges = merge(MemoryRange(storage.data_ptr(), storage.nbytes()) for storage in storages)
        self._memory = merge([*self._memory, *ranges])
        return ranges

    def allocate(self, size: int) -> Buffer:
        try:
            owner = np.zeros(size + ALIGNMENT, dtype=np.uint8)
        except MemoryError as error:
            raise OperatorError(f"no memory for a staging buffer of {size} bytes", "lower stagingBytes") from error
        start = -(-owner.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._memory = merge([*self._memory, MemoryRange(start, size)])
        return Buffer(MemoryRange(start, size), owner)

    def fetch(self, memory: MemoryRange) -> memoryview:
        return np.asarray(_Memory(memory.address, (memory.length,), (1,), 1)).data.cast("B")

    def record(self) -> Event:
        return DONE

    def copy(self, pieces: Pieces | Tiles, after: Event | None = None) -> Event:
        for tiles in [pieces] if isinstance(pieces, Tiles) else pieces.tiles():
            for address, step in ((tiles.source, tiles.source_step), (tiles.sink, tiles.sink_step)):
                extent = np.full(len(tiles), (tiles.count - 1) * step + tiles.length, np.int64)
                outside = first_outside(self._memory, address, extent)
                if outside is not None:
                    raise LocalProtocolError(f"copy at {int(address[outside]):#x} is outside this worker's memory")
            if len(tiles):
                _copy(tiles)
        return DONE


def _copy(tiles: Tiles) -> None:
    """All at once, by numpy, without a Python loop. A run of tiles on one side spares a copy in between."""
    source, sink = _rows(tiles, tiles.source, tiles.source_step), _rows(tiles, tiles.sink, tiles.sink_step)
    sink[0][sink[1]] = source[0][source[1]]


def _rows(
    tiles: Tiles, address: NDArray[np.int64], step: int
) -> tuple[NDArray[np.void], NDArray[np.int64] | slice]:
    """One side's memory as (row, repetition) of `length` opaque bytes, and which rows the tiles are. Rows begin at
    every common divisor of the distances, so they may overlap each other; the tiles do not."""
    base = int(address.min())
    distance = int(np.gcd.reduce(address - base)) or tiles.count * tiles.length
    index = (address - base) // distance
    shape = (int(index.max()) + 1, tiles.count)
    rows = np.asarray(_Memory(base, shape, (distance, step), tiles.length))
    return rows, slice(0, shape[0]) if bool((np.diff(index) == 1).all()) else index


class _Memory:
    """Memory at an address, as numpy takes it (a ctypes array would leave one cached type per size behind)."""

    def __init__(self, base: int, shape: tuple[int, ...], strides: tuple[int, ...], length: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{length}",
            "data": (base, False),
            "shape": shape,
            "strides": strides,
        }
