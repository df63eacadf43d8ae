"""The transport port: one-sided reads and writes between registered memory of two workers.

An implementation is the only file that imports its library and the only place that knows its error codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ascend_pd.layout.pieces import Pieces


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """`[address, address + length)` in this process."""

    address: int
    length: int


class Transport(Protocol):
    """One per process. Calls are safe from several threads.

    `read` and `write` return only when every piece is applied at its destination. They raise
    `ascend_pd.errors.TransferError` otherwise; its `quiesced` is True only if nothing was submitted, so that
    nothing can land later.
    """

    @property
    def name(self) -> str:
        """`mooncake/tcp` and the like: both ends of a transfer must be equal."""
        ...

    @property
    def session(self) -> str:
        """The name under which peers reach this endpoint now."""
        ...

    @property
    def efficient_piece_bytes(self) -> int:
        """Pieces below this size are better gathered into a staging buffer."""
        ...

    def register(self, ranges: Sequence[MemoryRange]) -> None:
        """Make memory reachable by peers. Raises OperatorError with the reason when it cannot."""
        ...

    def read(self, peer: str, pieces: Pieces, deadline: float) -> None:
        """Copy `pieces.source` addresses at `peer` to `pieces.sink` addresses here.

        `deadline` is on `time.monotonic()`.
        """
        ...

    def write(self, peer: str, pieces: Pieces, deadline: float) -> None:
        """Copy `pieces.source` addresses here to `pieces.sink` addresses at `peer`."""
        ...

    def probe(self, peer: str) -> bool:
        """Whether the peer's endpoint answers at all."""
        ...

    def rotate(self) -> str:
        """The fence: destroy this endpoint, so that nothing in flight can land any more, and open one under a
        new name with the same memory registered. Returns the new session."""
        ...

    def close(self) -> None:
        """Destroy the endpoint. Calling it again does nothing."""
        ...
