"""Moving small pieces as large ones: a bounded, registered staging buffer and the pipeline through its slots.

A batch is gathered into a slot, crosses the wire in large pieces, and is scattered. While one batch is on the wire
the next is gathered and the one before scattered; with all slots in use the next batch waits, nothing is
allocated. What is gathered by whom is the batch's matter (`ascend_pd.layout.staging` plans it,
`connectors.transport.stage` asks the other end); here are only slots, order and failure.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ascend_pd.errors import AscendPdError, LocalProtocolError, TransferError
from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.device.base import Buffer, Device
from connectors.transport.base import Transport

DEFAULT_SLOT_BYTES = 8 << 20
"""Large enough for full speed of the wire, small enough that gather, wire and scatter of one request overlap."""
MIN_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Slot:
    """A part of the staging buffer."""

    address: int
    length: int


def slot_sizes(staging_bytes: int, slot_bytes: int = DEFAULT_SLOT_BYTES) -> tuple[int, int]:
    """Number and size of the slots that fit into `staging_bytes`; (0, 0) when it is too small to be of use."""
    size = min(slot_bytes, staging_bytes // MIN_SLOTS)
    size -= size % 4096
    return (0, 0) if size < 64 << 10 else (min(4, staging_bytes // size), size)


class SlotPool:
    """The slots of one staging buffer. Thread-safe; memory is taken at the first use.

    Raises:
        OperatorError: from `take`, when the buffer cannot be allocated or registered.
    """

    def __init__(self, device: Device, transport: Transport, staging_bytes: int) -> None:
        self.num_slots, self.slot_bytes = slot_sizes(staging_bytes)
        self._device = device
        self._transport = transport
        self._changed = threading.Condition()
        self._buffer: Buffer | None = None
        self._free: deque[Slot] = deque()
        self._lost: list[tuple[Slot, str]] = []

    def take(self, deadline: float) -> Slot:
        """A free slot.

        Raises:
            TransferError: none became free in time; nothing was submitted.
        """
        slot = self._take(deadline)
        if slot is None:
            raise TransferError("no staging slot became free before the deadline", quiesced=True)
        return slot

    def take_free(self) -> Slot | None:
        """A slot if one is free now. Whoever holds slots uses this: two that wait for each other's would hang."""
        return self._take(0.0)

    def give(self, slot: Slot) -> None:
        """The slot is free again: nothing can touch it any more."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def lose(self, slot: Slot, via: str = "") -> None:
        """Bytes may still land in, or be read from, the slot through the endpoint `via` (the present one when it is
        not named): it is not used again before that one is fenced."""
        with self._changed:
            self._lost.append((slot, via or self._transport.session))

    def fenced(self) -> None:
        """A rotation of the transport has ended: slots lost on former endpoints are free again."""
        with self._changed:
            session = self._transport.session
            self._free.extend(slot for slot, name in self._lost if name != session)
            self._lost = [(slot, name) for slot, name in self._lost if name == session]
            self._changed.notify_all()

    def _take(self, deadline: float) -> Slot | None:
        with self._changed:
            if self._buffer is None:
                self._allocate()
            while not self._free:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    return None
            return self._free.popleft()

    def _allocate(self) -> None:
        if self.num_slots == 0:
            raise LocalProtocolError("staging is off: its buffer is smaller than two slots")
        self._buffer = self._device.allocate(self.num_slots * self.slot_bytes)
        self._transport.register([self._buffer.range])
        base = self._buffer.range.address
        self._free.extend(Slot(base + i * self.slot_bytes, self.slot_bytes) for i in range(self.num_slots))


def _nothing(deadline: float) -> None:
    """For a batch that needs nobody else."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What fills one slot. `wire` and `local` get the slot's address; the others may wait until the deadline that
    they get, and raise TransferError.

    Read: `before`, `wire` into the slot, `after`; `local` scatters out of it.
    Write: `local` gathers into the slot; `before`, `wire` out of it, `after`; `settle` once all are written.
    """

    wire: Callable[[int], Pieces]
    local: Callable[[int], Sequence[Pieces | Tiles]]
    before: Callable[[float], None] = _nothing
    after: Callable[[float], None] = _nothing
    settle: Callable[[float], None] = _nothing


@dataclass(slots=True)
class _Copying:
    """A batch whose gather or scatter runs on the copier's thread."""

    batch: Batch
    slot: Slot
    done: Future[None]


class StagingPipeline:
    """Runs batches through the slots of a pool. Thread-safe; owns one thread that gathers and scatters."""

    def __init__(self, device: Device, transport: Transport, pool: SlotPool, name: str) -> None:
        self._device = device
        self._transport = transport
        self._pool = pool
        self._copier = ThreadPoolExecutor(1, f"staging-{name}", initializer=device.bind_thread)

    def read(self, peer: str, batches: Iterable[Batch], deadline: float, via: str = "") -> None:
        """Read every batch from `peer` and scatter it. Returns when the last is in place.

        Raises:
            TransferError: as `Transport.read`.
        """
        scattering: deque[_Copying] = deque()
        try:
            for batch in batches:
                slot = self._slot(scattering, deadline)
                self._carry(batch, slot, deadline, lambda w: self._transport.read(peer, w, deadline, via), via)
                scattering.append(self._start_copy(batch, slot, deadline))
            while scattering:
                self._finish_copy(scattering.popleft(), give=True)
        finally:
            self._abandon(scattering)

    def write(self, peer: str, batches: Iterable[Batch], deadline: float, via: str = "") -> None:
        """Gather every batch and write it to `peer`. Returns when the last is acknowledged.

        Raises:
            TransferError: as `Transport.write`.
        """
        waiting = iter(batches)
        gathering: deque[_Copying] = deque()
        written: list[Batch] = []
        try:
            while self._gather_ahead(waiting, gathering, deadline):
                gathered = gathering.popleft()
                self._finish_copy(gathered, give=False)
                batch, slot = gathered.batch, gathered.slot
                self._carry(batch, slot, deadline, lambda w: self._transport.write(peer, w, deadline, via), via)
                self._pool.give(slot)
                written.append(batch)
            for batch in written:
                batch.settle(deadline)
        except AscendPdError as error:
            quiesced = isinstance(error, TransferError) and error.quiesced
            if any(batch.settle is not _nothing for batch in written) and (
                quiesced or not isinstance(error, TransferError)
            ):
                # The peer was asked to scatter: it may still do so, or be asked again by a repeated message.
                raise TransferError(str(error), quiesced=False) from error
            raise
        finally:
            self._abandon(gathering)

    def close(self) -> None:
        """End the copier's thread. Safe to repeat."""
        self._copier.shutdown(wait=True, cancel_futures=True)

    def _gather_ahead(self, waiting: Iterator[Batch], gathering: deque[_Copying], deadline: float) -> bool:
        """Keep one batch gathered or being so beyond the next one to go. False when nothing is left."""
        while len(gathering) < MIN_SLOTS:
            slot = self._pool.take_free() if gathering else self._pool.take(deadline)
            if slot is None:
                break
            batch = next(waiting, None)
            if batch is None:
                self._pool.give(slot)
                break
            gathering.append(self._start_copy(batch, slot, deadline))
        return bool(gathering)

    def _slot(self, scattering: deque[_Copying], deadline: float) -> Slot:
        while scattering and scattering[0].done.done():
            self._finish_copy(scattering.popleft(), give=True)
        while (slot := self._pool.take_free()) is None and scattering:
            self._finish_copy(scattering.popleft(), give=True)
        return slot or self._pool.take(deadline)

    def _carry(self, batch: Batch, slot: Slot, deadline: float, move: Callable[[Pieces], None], via: str) -> None:
        try:
            batch.before(deadline)
            move(batch.wire(slot.address))
            batch.after(deadline)
        except TransferError as error:
            if error.quiesced:
                self._pool.give(slot)
            else:
                self._pool.lose(slot, via)
            raise
        except AscendPdError:
            self._pool.give(slot)
            raise

    def _start_copy(self, batch: Batch, slot: Slot, deadline: float) -> _Copying:
        def copy() -> None:
            for pieces in batch.local(slot.address):
                if not self._device.copy(pieces).wait(deadline):
                    raise TransferError("the device did not finish a staging copy in time", quiesced=False)

        return _Copying(batch, slot, self._copier.submit(copy))

    def _finish_copy(self, copying: _Copying, *, give: bool) -> None:
        """Wait for it: the copy itself is bounded by the deadline."""
        try:
            copying.done.result()
        except TransferError:
            self._pool.lose(copying.slot)
            raise
        except AscendPdError:
            self._pool.give(copying.slot)
            raise
        if give:
            self._pool.give(copying.slot)

    def _abandon(self, copying: deque[_Copying]) -> None:
        """After a failure: no copy is left running when the caller hears of it, or the caller hears that too."""
        stuck = False
        while copying:
            try:
                self._finish_copy(copying.popleft(), give=True)
            except TransferError:
                stuck = True
            except AscendPdError:
                continue  # the first failure is the one that is reported
        if stuck:
            raise TransferError("a staging copy is still running after a failed transfer", quiesced=False)
