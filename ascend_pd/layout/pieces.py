"""The planner's result: flat copies between two workers."""

from __future__ import annotations

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
