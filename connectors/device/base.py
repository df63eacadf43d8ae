"""The device port: what a worker needs of its hardware besides moving bytes to other machines.

Compute runs on the engine's own thread and stream; everything here that takes time runs on a side stream, so that
a transfer never waits for, nor delays, a later layer. `npu.py` is the only file that imports torch_npu.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.transport.base import MemoryRange


class Event(Protocol):
    """A point in a stream."""

    def done(self) -> bool:
        """Whether everything before the point has been carried out. Never blocks."""
        ...

    def wait(self, deadline: float) -> bool:
        """Wait until `done`, or until `deadline` on `time.monotonic()`; says which."""
        ...


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory on the device for staging; freed with the last reference to `owner`."""

    range: MemoryRange
    owner: Any


class Device(Protocol):
    """One per worker process. Methods may be called from any thread that has called `bind_thread`."""

    @property
    def name(self) -> str:
        """`cpu` or `npu:<index>`."""
        ...

    @property
    def index(self) -> int:
        """The number of this rank's device, 0 on CPU."""
        ...

    def bind_thread(self) -> None:
        """Make this rank's device current for the calling thread. Every thread of ours calls it first: a thread
        without a device would use device 0, or fail inside the transport."""
        ...

    def adopt(self, tensors: Iterable[Any]) -> tuple[MemoryRange, ...]:
        """The memory to register with the transport for these KV cache tensors: their whole storages, merged, as
        the hardware wants them aligned. The device remembers it; `copy` works there and in its own buffers.

        Raises OperatorError when the hardware cannot register it (alignment, too many regions).
        """
        ...

    def allocate(self, size: int) -> Buffer:
        """Staging memory of `size` bytes, aligned for registration. Raises OperatorError when there is none."""
        ...

    def fetch(self, memory: MemoryRange) -> memoryview:
        """The bytes of a part of an own buffer, in the host's memory; on CPU a view of it, elsewhere a copy. What
        was copied there before must be done."""
        ...

    def record(self) -> Event:
        """The point that the compute stream of the calling thread has reached. Called right after a layer's cache
        was written: the cache may be read by others once the event is done."""
        ...

    def copy(self, pieces: Pieces | Tiles, after: Event | None = None) -> Event:
        """Gather or scatter: local copies from `pieces.source` to `pieces.sink`, on the side stream, after `after`
        if given. Neither end may be reused before the returned event is done.

        Raises LocalProtocolError for addresses outside adopted memory and own buffers, where the device can tell.
        """
        ...
