"""Everything that one source worker copies to one sink worker, resolved to numbers once per pair.

A *unit* is the larger number of tokens that lies together on both sides: the smaller of the two kernel blocks. A
*lane* is one contiguous copy inside a unit: a pair of base addresses and a length; it repeats for every unit at
`base + offset(unit)`. A *strand* is the lanes of all regions with equal strides. A request then costs two outer
sums per strand, however many layers and blocks there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascend_pd.layout.description import Group, Region
from ascend_pd.layout.geometry import kernel_block_size
from ascend_pd.layout.pieces import Pieces

Ints = NDArray[np.int64]
MAX_CACHED_LAYER_SETS = 1024


@dataclass(frozen=True, slots=True)
class Side:
    """How one side finds a unit inside its regions."""

    group: Group
    unit_tokens: int
    block_stride: int
    head_offsets: tuple[int, ...]
    """Of the heads that move, in one order for both sides."""
    token_stride: int

    def unit_offsets(self, block_ids: Ints, first_unit: int, end_unit: int) -> Ints:
        """Byte offset of units `[first_unit, end_unit)` of a request from a region's base."""
        kernel_blocks = self.group.kernel_blocks_per_block
        units_per_kernel_block = kernel_block_size(self.group) // self.unit_tokens
        unit = np.arange(first_unit, end_unit, dtype=np.int64)
        if kernel_blocks == 1 and units_per_kernel_block == 1:
            return block_ids[first_unit:end_unit] * self.block_stride
        kernel, sub = np.divmod(unit, units_per_kernel_block)
        block, kernel_in_block = np.divmod(kernel, kernel_blocks)
        kernel_id = block_ids[block] * kernel_blocks + kernel_in_block
        offsets: Ints = kernel_id * self.block_stride + sub * (self.unit_tokens * self.token_stride)
        return offsets

    def grid(self, first_token: int) -> Ints:
        """Offsets of (head, token) in a unit, from token `first_token` of it on, flat."""
        heads = np.asarray(self.head_offsets, np.int64)
        tokens = np.arange(first_token, self.unit_tokens, dtype=np.int64) * self.token_stride
        return np.add.outer(heads, tokens).ravel()


@dataclass(frozen=True, slots=True)
class Lanes:
    """Copies of one length that repeat for every unit."""

    source: Ints
    sink: Ints
    length: int


@dataclass(frozen=True, slots=True)
class Strand:
    """The regions of a pair of workers that share all strides."""

    source: Side
    sink: Side
    token_bytes: int
    group: int
    layers: Ints
    source_base: Ints
    sink_base: Ints
    _lanes: dict[frozenset[int] | None, tuple[Lanes, ...]] = field(default_factory=dict)

    def lanes(self, layers: frozenset[int] | None) -> tuple[Lanes, ...]:
        """The lanes of whole units for the given layers (None is all), merged where regions touch."""
        known = self._lanes.get(layers)
        if known is None:
            known = self._resolve(layers, 0)
            if len(self._lanes) < MAX_CACHED_LAYER_SETS:
                self._lanes[layers] = known
        return known

    def _resolve(self, layers: frozenset[int] | None, first_token: int) -> tuple[Lanes, ...]:
        source_base, sink_base = self.source_base, self.sink_base
        if layers is not None:
            chosen = np.isin(self.layers, np.fromiter(layers, np.int64, len(layers)))
            source_base, sink_base = source_base[chosen], sink_base[chosen]
        length = np.full(self.source.grid(first_token).size, self.token_bytes, np.int64)
        atoms = merge(Pieces(self.source.grid(first_token), self.sink.grid(first_token), length))
        found: list[Lanes] = []
        for size in np.unique(atoms.length):
            same = atoms.length == size
            source = np.add.outer(source_base, atoms.source[same]).ravel()
            sink = np.add.outer(sink_base, atoms.sink[same]).ravel()
            merged = merge(Pieces(source, sink, np.full(source.size, size, np.int64)))
            for total in np.unique(merged.length):
                here = merged.length == total
                found.append(Lanes(merged.source[here], merged.sink[here], int(total)))
        return tuple(found)

    def pieces(
        self, source_ids: Ints, sink_ids: Ints, first_token: int, end_token: int, layers: frozenset[int] | None
    ) -> list[Pieces]:
        """The copies for tokens `[first_token, end_token)`, the end rounded up to a whole unit."""
        first_unit, skipped = divmod(first_token, self.source.unit_tokens)
        end_unit = -(-end_token // self.source.unit_tokens)
        source = self.source.unit_offsets(source_ids, first_unit, end_unit)
        sink = self.sink.unit_offsets(sink_ids, first_unit, end_unit)
        found: list[Pieces] = []
        whole = self._present(source_ids, sink_ids, first_unit, end_unit)
        if skipped:
            if whole[0]:
                found += [repeat(lanes, source[:1], sink[:1]) for lanes in self._resolve(layers, skipped)]
            whole[0] = False
        if not whole.all():
            source, sink = source[whole], sink[whole]
        if source.size:
            found += [repeat(lanes, source, sink) for lanes in self.lanes(layers)]
        return found

    def _present(self, source_ids: Ints, sink_ids: Ints, first_unit: int, end_unit: int) -> NDArray[np.bool_]:
        """Per unit, whether both sides have its block: in a sliding window old ones are dropped."""
        if not self.source.group.sliding_window:
            return np.ones(end_unit - first_unit, np.bool_)
        token = np.arange(first_unit, end_unit, dtype=np.int64) * self.source.unit_tokens
        dropped = (source_ids[token // self.source.group.block_size] == 0) | (
            sink_ids[token // self.sink.group.block_size] == 0
        )
        present: NDArray[np.bool_] = ~dropped
        return present


def repeat(lanes: Lanes, source: Ints, sink: Ints) -> Pieces:
    """The lanes at every unit offset. Units that follow each other on both sides become one piece.

    Block ids descend once a pool has been used. Pairs are sorted by source first: two lists that descend together
    merge then, and a run that descends on one side alone is rightly not a run.
    """
    if source.size > 1:
        order = np.argsort(source, kind="stable")
        source, sink = source[order], sink[order]
        follows = (np.diff(source) == lanes.length) & (np.diff(sink) == lanes.length)
        starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        counts = np.diff(np.append(starts, source.size))
        source, sink, length = source[starts], sink[starts], counts * lanes.length
    else:
        length = np.full(source.size, lanes.length, np.int64)
    return Pieces(
        np.add.outer(lanes.source, source).ravel(),
        np.add.outer(lanes.sink, sink).ravel(),
        np.tile(length, lanes.source.size),
    )


def merge(pieces: Pieces) -> Pieces:
    """The same copies, sorted by source, with those joined that touch on both sides."""
    if len(pieces) < 2:
        return pieces
    order = np.argsort(pieces.source, kind="stable")
    source, sink, length = pieces.source[order], pieces.sink[order], pieces.length[order]
    follows = (source[1:] == source[:-1] + length[:-1]) & (sink[1:] == sink[:-1] + length[:-1])
    if not follows.any():
        return Pieces(source, sink, length)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return Pieces(source[starts], sink[starts], np.add.reduceat(length, starts))


def concatenate(parts: list[Pieces]) -> Pieces:
    """One list of copies out of several."""
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


def side_of(region: Region, group: Group, unit_tokens: int, local_heads: tuple[int, ...]) -> Side:
    """One side's view of a region, for the heads (storage indices) that move."""
    return Side(
        group=group,
        unit_tokens=unit_tokens,
        block_stride=region.block_stride,
        head_offsets=tuple(head * region.head_stride for head in local_heads),
        token_stride=region.token_stride,
    )
