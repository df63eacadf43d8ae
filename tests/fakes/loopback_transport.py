"""A transport whose peers live in the same process: one-sided copies by memmove, failures on demand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from ascend_pd.errors import TransferError
from ascend_pd.layout.pieces import Pieces
from connectors.transport.base import MemoryRange, nobody


class LoopbackTransport:
    """`on_move` is called before each transfer; what it raises is what the transfer raises."""

    def __init__(self, on_move: Callable[[], None] = lambda: None) -> None:
        self.name = "loopback"
        self.efficient_piece_bytes = 128 << 10
        self.on_move = on_move
        self.moves: list[int] = []
        """Number of pieces of each transfer."""
        self.registered: list[MemoryRange] = []
        self._generation = 0

    @property
    def session(self) -> str:
        return f"loopback:{self._generation}"

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        self.registered += ranges

    def read(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        if via and via != self.session:
            raise TransferError("endpoint was replaced", quiesced=True)
        self.on_move()
        self.moves.append(len(pieces))
        for source, sink, length in zip(pieces.source, pieces.sink, pieces.length, strict=True):
            ctypes.memmove(int(sink), int(source), int(length))

    write = read

    def probe(self, peer: str) -> bool:
        return True

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        self._generation += 1
        return self.session

    def close(self) -> None:
        pass
