"""The CPU as a device: no streams, so every event is done when it is made, and copies happen at once."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import LocalProtocolError, OperatorError
from ascend_pd.layout.pieces import Pieces
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

    def record(self) -> Event:
        return DONE

    def copy(self, pieces: Pieces, after: Event | None = None) -> Event:
        for side in (pieces.source, pieces.sink):
            outside = first_outside(self._memory, side, pieces.length)
            if outside is not None:
                raise LocalProtocolError(f"copy at {int(side[outside]):#x} is outside the memory of this worker")
        if len(pieces) > 1 and not _copy_grid(pieces):
            move = ctypes.memmove
            for sink, source, length in zip(
                pieces.sink.tolist(), pieces.source.tolist(), pieces.length.tolist(), strict=True
            ):
                move(sink, source, length)
        elif len(pieces) == 1:
            ctypes.memmove(int(pieces.sink[0]), int(pieces.source[0]), int(pieces.length[0]))
        return DONE


def _copy_grid(pieces: Pieces) -> bool:
    """Equal pieces whose addresses lie on a grid of their own length: numpy copies them without a Python loop."""
    length = int(pieces.length[0])
    if not bool((pieces.length == length).all()):
        return False
    source, sink = _grid(pieces.source, length), _grid(pieces.sink, length)
    if source is None or sink is None:
        return False
    (from_rows, from_index), (to_rows, to_index) = source, sink
    if _is_run(to_index):
        np.take(from_rows, from_index, axis=0, out=to_rows, mode="clip")
    elif _is_run(from_index):
        to_rows[to_index] = from_rows
    else:
        to_rows[to_index] = from_rows[from_index]
    return True


def _grid(address: NDArray[np.int64], length: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """Rows of `length` bytes from the lowest address to the highest, and which of them `address` names."""
    base = int(address.min())
    index, rest = np.divmod(address - base, length)
    if bool(rest.any()):
        return None
    rows = int(index.max()) + 1
    return np.asarray(_Rows(base, rows, length)), index


class _Rows:
    """Memory at an address, as numpy takes it (a ctypes array would leave one cached type per size behind)."""

    def __init__(self, base: int, rows: int, length: int) -> None:
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "data": (base, False), "shape": (rows, length)}


def _is_run(index: NDArray[np.int64]) -> bool:
    return bool((np.diff(index) == 1).all())
