"""How much a layer-wise P may keep of finished prefills for which no D has reserved blocks yet.

Without a cap two full engines wait for each other: P holds prefills that D has no room to reserve for, and D holds
reservations for prefills that P has no room to start. Only the unreserved side can be dropped without loss of a
reservation, so it is dropped first.
"""

from __future__ import annotations


class UnreservedCap:
    """Finished and unreserved transfers in the order they finished, and which of them are too many."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._blocks: dict[str, int] = {}

    def add(self, transfer_id: str, num_blocks: int) -> list[str]:
        """A prefill finished without a reservation. Returns the transfers to cancel, newest first.

        The newest goes first: D reserves in the order of arrival, so the oldest is the next to be wanted.
        """
        self._blocks[transfer_id] = num_blocks
        dropped = []
        while sum(self._blocks.values()) > self.max_blocks:
            newest = next(reversed(self._blocks))
            del self._blocks[newest]
            dropped.append(newest)
        return dropped

    def remove(self, transfer_id: str) -> None:
        """It was reserved, or ended."""
        self._blocks.pop(transfer_id, None)

    def __len__(self) -> int:
        return len(self._blocks)
