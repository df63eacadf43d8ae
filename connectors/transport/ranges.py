"""Memory ranges: what is registered, and whether a transfer stays inside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ascend_pd.errors import LocalProtocolError
from connectors.transport.base import MemoryRange


def merge(ranges: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
    """Sorted by address; ranges that touch or overlap become one, empty ones vanish."""
    merged: list[MemoryRange] = []
    for item in sorted(ranges, key=lambda r: r.address):
        if item.length <= 0:
            continue
        end = item.address + item.length
        if merged and item.address <= merged[-1].address + merged[-1].length:
            last = merged[-1]
            merged[-1] = MemoryRange(last.address, max(last.address + last.length, end) - last.address)
        else:
            merged.append(item)
    return tuple(merged)


def fresh(registered: Sequence[MemoryRange], wanted: Iterable[MemoryRange]) -> tuple[MemoryRange, ...]:
    """What of `wanted`, merged, is not registered yet.

    Raises:
        LocalProtocolError: a range overlaps a registered one without lying inside it; a library would refuse it,
            or, worse, register the memory twice.
    """
    new: list[MemoryRange] = []
    for item in merge(wanted):
        end = item.address + item.length
        overlap = [r for r in registered if item.address < r.address + r.length and r.address < end]
        if not overlap:
            new.append(item)
        elif not any(r.address <= item.address and end <= r.address + r.length for r in overlap):
            raise LocalProtocolError(
                f"memory [{item.address:#x}, {end:#x}) overlaps [{overlap[0].address:#x}, "
                f"{overlap[0].address + overlap[0].length:#x}), which is registered already"
            )
    return tuple(new)


def first_outside(
    registered: Sequence[MemoryRange], address: NDArray[np.int64], length: NDArray[np.int64]
) -> int | None:
    """Index of the first piece that is not wholly inside one of `registered` (sorted by address), or None."""
    if address.size == 0:
        return None
    if not registered:
        return 0
    starts = np.array([r.address for r in registered], dtype=np.int64)
    ends = np.array([r.address + r.length for r in registered], dtype=np.int64)
    slot = np.searchsorted(starts, address, side="right") - 1
    outside = (slot < 0) | (address + length > ends[np.maximum(slot, 0)])
    return int(np.argmax(outside)) if bool(outside.any()) else None
