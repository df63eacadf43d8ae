"""A transport with faults on purpose, around a real one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.handoff.faults import FaultInjector
from connectors.transport.base import MemoryRange, Transport, nobody


class FaultyTransport:
    """See `connectors.transport.base.Transport`; which faults happen is the injector's matter."""

    def __init__(self, inner: Transport, faults: FaultInjector) -> None:
        self._inner = inner
        self._faults = faults

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def session(self) -> str:
        return self._inner.session

    @property
    def efficient_piece_bytes(self) -> int:
        return self._inner.efficient_piece_bytes

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self._inner.register(ranges)

    def read(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(lambda: self._inner.read(peer, pieces, deadline, via), pieces.sink)

    def write(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        self._move(lambda: self._inner.write(peer, pieces, deadline, via), pieces.source)

    def probe(self, peer: str) -> bool:
        return self._inner.probe(peer)

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        return self._inner.rotate(spare_s, busy)

    def close(self) -> None:
        self._inner.close()

    def _move(self, move: Callable[[], None], here: NDArray[np.int64]) -> None:
        fault = self._faults.on_transfer()
        if fault.stall_s:
            time.sleep(fault.stall_s)
        move()
        if fault.corrupt and here.size:
            byte = ctypes.c_ubyte.from_address(int(here[here.size // 2]))
            byte.value ^= 0xFF
        if fault.fail:
            raise TransferError("a fault was injected", quiesced=False)
