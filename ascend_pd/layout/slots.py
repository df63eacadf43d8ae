"""The schedule of staged batches: which step may start now, so that gather, wire and scatter overlap.

A batch takes a slot before its first step and gives it back after its last. With none free nothing starts
(back-pressure), and nothing is ever allocated. Steps of one kind start in batch order, one at a time, so that each
kind can be a thread or a stream of its own; two slots overlap two kinds, three overlap all.

Pure and not thread-safe: drivers call it under a lock of theirs and wait on their own condition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import StrEnum

from ascend_pd.errors import LocalProtocolError


class Step(StrEnum):
    """What is done with a batch, in this order."""

    GATHER = "gather"
    WIRE = "wire"
    SCATTER = "scatter"


class SlotPool:
    """The slots of one staging buffer, shared by all transfers with one peer.

    Args:
        address: of the buffer.
        size: of the buffer in bytes; it holds `size // slot_bytes` slots.
    """

    def __init__(self, address: int, size: int, slot_bytes: int) -> None:
        if not 0 < slot_bytes <= size:
            raise LocalProtocolError(f"a staging buffer of {size} bytes holds no slot of {slot_bytes}")
        self._address = address
        self._slot_bytes = slot_bytes
        self._free = deque(range(size // slot_bytes))
        self._taken: set[int] = set()

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot: the bound of a batch."""
        return self._slot_bytes

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot, or None when all are in use: wait for one, allocate nothing."""
        if not self._free:
            return None
        slot = self._free.popleft()
        self._taken.add(slot)
        return slot

    def give_back(self, slot: int) -> None:
        """Raises LocalProtocolError for a slot that is not taken: its bytes might be somebody else's."""
        if slot not in self._taken:
            raise LocalProtocolError(f"staging slot {slot} is not taken")
        self._taken.remove(slot)
        self._free.append(slot)

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self._address + slot * self._slot_bytes


class Pipeline:
    """One transfer's batches, numbered from 0, on their way through the steps.

    Args:
        num_batches: how many there are.
        steps: those that this end takes or waits for, e.g. wire and scatter for a one-sided pull.
        slots: where batches wait between steps; other pipelines may share it.
    """

    def __init__(self, num_batches: int, steps: Sequence[Step], slots: SlotPool) -> None:
        if not steps or list(steps) != [step for step in Step if step in steps]:
            raise LocalProtocolError(f"staging steps {list(steps)} are not in order")
        self._steps = tuple(steps)
        self._slots = slots
        self._waiting = {step: deque[int]() for step in steps}
        self._waiting[steps[0]].extend(range(num_batches))
        self._running: dict[Step, int] = {}
        self._slot_of: dict[int, int] = {}
        self._left = num_batches
        self._stopped = False

    @property
    def finished(self) -> bool:
        """Whether every batch has taken its last step."""
        return self._left == 0

    @property
    def quiet(self) -> bool:
        """Whether no step is running, so that neither slots nor caches are being touched."""
        return not self._running

    def start(self, step: Step) -> tuple[int, int] | None:
        """The batch and slot with which this step may start now; None when it must wait."""
        waiting = self._waiting[step]
        if step in self._running or not waiting:
            return None
        batch = waiting[0]
        if step is self._steps[0]:
            slot = self._slots.take()
            if slot is None:
                return None
            self._slot_of[batch] = slot
        waiting.popleft()
        self._running[step] = batch
        return batch, self._slot_of[batch]

    def end(self, step: Step, batch: int) -> None:
        """The step is over; the batch may take its next one, or its slot is free.

        Raises:
            LocalProtocolError: that step of that batch is not running.
        """
        if self._running.get(step) != batch:
            raise LocalProtocolError(f"{step} of staged batch {batch} is not running")
        del self._running[step]
        later = self._steps[self._steps.index(step) + 1 :]
        if not later:
            self._slots.give_back(self._slot_of.pop(batch))
            self._left -= 1
        elif self._stopped:
            self._slots.give_back(self._slot_of.pop(batch))
        else:
            self._waiting[later[0]].append(batch)

    def stop(self) -> None:
        """Start nothing any more. Slots of batches between steps are free at once, those of running steps when
        they end; a step that may still touch its slot must therefore not be ended before it cannot."""
        self._stopped = True
        for batch in [batch for batch in self._slot_of if batch not in self._running.values()]:
            self._slots.give_back(self._slot_of.pop(batch))
        for waiting in self._waiting.values():
            waiting.clear()
