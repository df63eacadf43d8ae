"""A transport with faults on purpose, around a real one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.handoff.faults import FaultInjector, TransferFault
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
        fault = self._begin()
        self._inner.read(peer, pieces, deadline, via)
        if fault.corrupt:
            _flip(pieces.sink)
        _end(fault)

    def write(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        fault = self._begin()
        if not fault.corrupt:
            self._inner.write(peer, pieces, deadline, via)
        else:
            # Wrong on the wire alone: this engine's own cache is right before and after.
            _flip(pieces.source)
            try:
                self._inner.write(peer, pieces, deadline, via)
            finally:
                _flip(pieces.source)
        _end(fault)

    def probe(self, peer: str) -> bool:
        return self._inner.probe(peer)

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        return self._inner.rotate(spare_s, busy)

    def close(self) -> None:
        self._inner.close()

    def _begin(self) -> TransferFault:
        fault = self._faults.on_transfer()
        if fault.stall_s:
            time.sleep(fault.stall_s)
        return fault


def _flip(here: NDArray[np.int64]) -> None:
    if here.size:
        ctypes.c_ubyte.from_address(int(here[here.size // 2])).value ^= 0xFF


def _end(fault: TransferFault) -> None:
    if fault.fail:
        raise TransferError("a fault was injected", quiesced=False)
