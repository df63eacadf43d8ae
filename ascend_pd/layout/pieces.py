"""The planner's result: flat copies between two workers, and repeating ones inside one worker."""

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

    def tiles(self) -> tuple[Tiles, ...]:
        """The same copies by length."""
        sizes = np.unique(self.length).tolist()
        if len(sizes) == 1:
            return (Tiles(self.source, self.sink, sizes[0]),)
        masks = [(self.length == size, size) for size in sizes]
        return tuple(Tiles(self.source[mask], self.sink[mask], size) for mask, size in masks)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Local copies that repeat with constant steps: for every i and every k < `count`, `length` bytes from
    `source[i] + k*source_step` to `sink[i] + k*sink_step`.

    One per block and head where one piece per token would do: a head that lies between other heads' tokens.
    """

    source: NDArray[np.int64]
    sink: NDArray[np.int64]
    length: int
    count: int = 1
    source_step: int = 0
    sink_step: int = 0

    def __len__(self) -> int:
        return int(self.source.size)

    @property
    def num_bytes(self) -> int:
        """Bytes moved in all."""
        return len(self) * self.count * self.length

    def reversed(self) -> Tiles:
        """The copies back."""
        return Tiles(self.sink, self.source, self.length, self.count, self.sink_step, self.source_step)

    def pieces(self) -> Pieces:
        """The same copies one by one."""
        step = np.arange(self.count, dtype=np.int64)
        return Pieces(
            np.add.outer(self.source, step * self.source_step).ravel(),
            np.add.outer(self.sink, step * self.sink_step).ravel(),
            np.full(len(self) * self.count, self.length, np.int64),
        )


def join(parts: Sequence[Pieces]) -> Pieces:
    """All pieces of the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        empty = np.empty(0, np.int64)
        return Pieces(empty, empty, empty)
    return Pieces(
        np.concatenate([part.source for part in parts]),
        np.concatenate([part.sink for part in parts]),
        np.concatenate([part.length for part in parts]),
    )
