"""Everything that one source worker copies to one sink worker, resolved to numbers once per pair.

A *unit* is the larger number of tokens that lies together on both sides: the smaller of the two kernel blocks. A
*lane* is one contiguous copy inside a unit: a pair of base addresses and a length; it repeats for every unit at
`base + offset(unit)`. A *strand* is the lanes of all regions with equal strides. A request then costs two outer
sums per strand, however many layers and blocks there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ascend_pd.layout.description import Group, Region
from ascend_pd.layout.geometry import kernel_block_size
from ascend_pd.layout.pieces import Pieces, Tiles

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

    def unit_offsets(self, block_ids: Ints, units: Ints) -> Ints:
        """Byte offset from a region's base of each of a request's units."""
        kernel_blocks = self.group.kernel_blocks_per_block
        units_per_kernel_block = kernel_block_size(self.group) // self.unit_tokens
        if kernel_blocks == 1 and units_per_kernel_block == 1:
            return block_ids[units] * self.block_stride
        kernel, sub = np.divmod(units, units_per_kernel_block)
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


@dataclass(frozen=True)
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
    _extents: dict[tuple[frozenset[int] | None, bool], tuple[Lanes, ...]] = field(default_factory=dict)

    def regions(self, layers: frozenset[int] | None) -> Ints:
        """Indices of the regions of the given layers (None is all)."""
        if layers is None:
            return np.arange(self.layers.size, dtype=np.int64)
        return np.flatnonzero(np.isin(self.layers, np.fromiter(layers, np.int64, len(layers))))

    def atoms(self, first_token: int = 0) -> Pieces:
        """What is contiguous on both sides inside one unit, from its token `first_token` on: offsets, in the
        source's order."""
        source, sink = self.source.grid(first_token), self.sink.grid(first_token)
        return merge(Pieces(source, sink, np.full(source.size, self.token_bytes, np.int64)))

    @cached_property
    def tiles(self) -> tuple[Tiles, ...]:
        """The copies of one unit of one region as offsets, in as few repeating ones as there are."""
        atoms, heads = self.atoms(), len(self.source.head_offsets)
        steps = np.unique(np.diff(atoms.source)), np.unique(np.diff(atoms.sink))
        length = int(atoms.length[0])
        if len(atoms) > 1 and steps[0].size == steps[1].size == 1 and bool((atoms.length == length).all()):
            first = atoms.source[:1], atoms.sink[:1]
            return (Tiles(*first, length, len(atoms), int(steps[0][0]), int(steps[1][0])),)
        if len(atoms) > heads:
            first = np.asarray(self.source.head_offsets, np.int64), np.asarray(self.sink.head_offsets, np.int64)
            strides = self.source.token_stride, self.sink.token_stride
            return (Tiles(*first, self.token_bytes, self.source.unit_tokens, *strides),)
        return atoms.tiles()

    @cached_property
    def source_atoms(self) -> Pieces:
        """What is contiguous on the source inside a unit, whatever the sink looks like: its offsets, twice."""
        return self._side_atoms(self.source)

    @cached_property
    def sink_atoms(self) -> Pieces:
        """What is contiguous on the sink inside a unit, whatever the source looks like: its offsets, twice."""
        return self._side_atoms(self.sink)

    def _side_atoms(self, side: Side) -> Pieces:
        grid = side.grid(0)
        return merge(Pieces(grid, grid, np.full(grid.size, self.token_bytes, np.int64)))

    @property
    def cell_bytes(self) -> int:
        """Bytes of one unit of one region."""
        return len(self.source.head_offsets) * self.source.unit_tokens * self.token_bytes

    @cached_property
    def layers_touch(self) -> bool:
        """Whether a unit's regions lie one after another on a side (layouts with blocks outermost)."""
        both = (*self.extents(None, of_source=True), *self.extents(None, of_source=False))
        return any(lanes.length > self.cell_bytes for lanes in both)

    def lanes(self, layers: frozenset[int] | None) -> tuple[Lanes, ...]:
        """The lanes of whole units for the given layers (None is all), merged where regions touch."""
        known = self._lanes.get(layers)
        if known is None:
            known = self._resolve(layers, 0)
            if len(self._lanes) < MAX_CACHED_LAYER_SETS:
                self._lanes[layers] = known
        return known

    def extents(self, layers: frozenset[int] | None, *, of_source: bool) -> tuple[Lanes, ...]:
        """What is contiguous on one side, whatever the other looks like: lanes with that side's offsets twice."""
        known = self._extents.get((layers, of_source))
        if known is None:
            atoms = self.source_atoms if of_source else self.sink_atoms
            base = (self.source_base if of_source else self.sink_base)[self.regions(layers)]
            known = lanes_of(atoms, base, base)
            if len(self._extents) < MAX_CACHED_LAYER_SETS:
                self._extents[layers, of_source] = known
        return known

    def _resolve(self, layers: frozenset[int] | None, first_token: int) -> tuple[Lanes, ...]:
        regions = self.regions(layers)
        return lanes_of(self.atoms(first_token), self.source_base[regions], self.sink_base[regions])

    def partial(
        self, source_ids: Ints, sink_ids: Ints, first_token: int, layers: frozenset[int] | None
    ) -> list[Pieces]:
        """The copies of the unit in whose middle a range starts; none when it starts with a unit."""
        unit, skipped = divmod(first_token, self.source.unit_tokens)
        units = self._present(source_ids, sink_ids, np.asarray([unit], np.int64))
        if not skipped or not units.size:
            return []
        source = self.source.unit_offsets(source_ids, units)
        sink = self.sink.unit_offsets(sink_ids, units)
        return [repeat(lanes, source, sink) for lanes in self._resolve(layers, skipped)]

    def whole(self, source_ids: Ints, sink_ids: Ints, first_token: int, end_token: int) -> Ints:
        """The units that `[first_token, end_token)` covers from their start, the last one rounded up."""
        unit = self.source.unit_tokens
        units = np.arange(-(-first_token // unit), -(-end_token // unit), dtype=np.int64)
        return self._present(source_ids, sink_ids, units)

    def pieces(
        self, source_ids: Ints, sink_ids: Ints, first_token: int, end_token: int, layers: frozenset[int] | None
    ) -> list[Pieces]:
        """The copies for tokens `[first_token, end_token)`, the end rounded up to a whole unit."""
        found = self.partial(source_ids, sink_ids, first_token, layers)
        units = self.whole(source_ids, sink_ids, first_token, end_token)
        if units.size:
            source = self.source.unit_offsets(source_ids, units)
            sink = self.sink.unit_offsets(sink_ids, units)
            found += [repeat(lanes, source, sink) for lanes in self.lanes(layers)]
        return found

    def _present(self, source_ids: Ints, sink_ids: Ints, units: Ints) -> Ints:
        """The units whose block both sides still have: in a sliding window old ones are dropped."""
        if not self.source.group.sliding_window:
            return units
        token = units * self.source.unit_tokens
        source = source_ids[token // self.source.group.block_size]
        sink = sink_ids[token // self.sink.group.block_size]
        present: Ints = units[(source != 0) & (sink != 0)]
        return present


def lanes_of(atoms: Pieces, source_base: Ints, sink_base: Ints) -> tuple[Lanes, ...]:
    """A unit's copies in every region, merged where regions touch on both sides, by length."""
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


def runs_of(lanes: Lanes, source: Ints, sink: Ints) -> tuple[Ints, Ints, Ints]:
    """Units (given by offsets) that follow each other on both sides.

    Returns the order that sorts the units by source, where in it each run starts, and how many units it has.
    Block ids descend once a pool has been used: two lists that descend together are runs once sorted, and a list
    that descends on one side alone is rightly none.
    """
    order = np.argsort(source, kind="stable")
    source, sink = source[order], sink[order]
    follows = (np.diff(source) == lanes.length) & (np.diff(sink) == lanes.length)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return order, starts, np.diff(np.append(starts, source.size))


def repeat(lanes: Lanes, source: Ints, sink: Ints) -> Pieces:
    """The lanes at every unit offset. Units that follow each other on both sides become one piece."""
    order, starts, counts = runs_of(lanes, source, sink)
    first = order[starts]
    return Pieces(
        np.add.outer(lanes.source, source[first]).ravel(),
        np.add.outer(lanes.sink, sink[first]).ravel(),
        np.tile(counts * lanes.length, lanes.source.size),
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


def side_of(region: Region, group: Group, unit_tokens: int, local_heads: tuple[int, ...]) -> Side:
    """One side's view of a region, for the heads (storage indices) that move."""
    return Side(
        group=group,
        unit_tokens=unit_tokens,
        block_stride=region.block_stride,
        head_offsets=tuple(head * region.head_stride for head in local_heads),
        token_stride=region.token_stride,
    )
