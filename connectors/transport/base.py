"""The transport port: one-sided reads and writes between registered memory of two workers.

An implementation is the only file that imports its library and the only place that knows its error codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ascend_pd.layout.pieces import Pieces


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """`[address, address + length)` in this process."""

    address: int
    length: int


def nobody() -> bool:
    """For `rotate`: no peer's transfer is worth waiting for."""
    return False


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

    def read(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        """Copy `pieces.source` addresses at `peer` to `pieces.sink` addresses here.

        `deadline` is on `time.monotonic()`. With `via`, only through the endpoint of that name, which a rotation
        spares for a while: once it is gone the call fails with nothing submitted, so that bytes counted to the old
        endpoint cannot come in through the new one.
        """
        ...

    def write(self, peer: str, pieces: Pieces, deadline: float, via: str = "") -> None:
        """Copy `pieces.source` addresses here to `pieces.sink` addresses at `peer`; otherwise as `read`."""
        ...

    def probe(self, peer: str) -> bool:
        """Whether the peer's endpoint answers at all."""
        ...

    def rotate(self, spare_s: float = 0.0, busy: Callable[[], bool] = nobody) -> str:
        """The fence: when it returns, nothing that was in flight on the old endpoint can land in this process's
        memory any more, and a new endpoint with the same memory is open under a name never used before.

        Transfers that start meanwhile use the new endpoint. Those of this process on the old one, and those of
        peers into it for as long as `busy()` says so, may go on for up to `spare_s`; then they are cut off.
        Returns the new session. Raises LocalProtocolError when the old endpoint could not be destroyed: the memory
        must then stay in quarantine.
        """
        ...

    def close(self) -> None:
        """Destroy the endpoint. Calling it again does nothing."""
        ...
