"""The planner's result: flat copies between two workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Pieces:
    """Three arrays of equal length (int64): copy `length[i]` bytes from P's address `source[i]` to D's address
    `sink[i]`."""

    source: NDArray[np.int64]
    sink: NDArray[np.int64]
    length: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.length.size)

    @property
    def num_bytes(self) -> int:
        """Bytes moved in all."""
        return int(self.length.sum())


def join(parts: Sequence[Pieces]) -> Pieces:
    """All pieces of the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return Pieces(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.sink for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
