"""Which copies of a transfer travel packed in a staging buffer, and what to gather and scatter for them.

A copy below the transport's efficient size costs more for being a copy than for its bytes. Such copies share a
*slot* of a staging buffer. Two ways, by who takes part:

* one-sided: only the active end stages. A pull reads whole extents of P's memory into a slot on D and scatters
  them; a push gathers into a slot on P and writes whole extents of D's memory. The passive end does nothing. It
  pays when the passive end's extents are longer than what is contiguous on both ends at once (unequal TP).
* two-sided: the source gathers a batch into a slot, one copy crosses the wire, the sink scatters it. It needs a
  worker on the passive end that answers, and gives full speed whatever the block lists look like.

A batch is named by `Cells`, which both ends turn into addresses on their own: a *cell* is one unit of one region
(all its tokens and heads that move). Two-sided, cells lie in the slot region by region and unit by unit, and in a
cell the copies lie tile by tile. One-sided, the slot is an image of the passive end's extents, in the order of
their addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.layout.pieces import Pieces, Tiles, join
from ascend_pd.layout.plan import BlockIds, PairPlan
from ascend_pd.layout.strand import Ints, Strand, merge, repeat, runs_of


class Staging(StrEnum):
    """Who stages."""

    NONE = "none"
    SINK = "sink"
    """One-sided pull: D reads extents of P's memory and scatters."""
    SOURCE = "source"
    """One-sided push: P gathers and writes extents of D's memory."""
    BOTH = "both"


class Cells(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that fits in a slot: units x regions of one strand of a pair's plan."""

    strand: int
    regions: tuple[int, ...]
    """Indices of the strand's regions, ascending."""
    units: tuple[tuple[int, int], ...]
    """Ranges `(first, count)` of the request's unit numbers, ascending."""


@dataclass(frozen=True, slots=True)
class Split:
    """A transfer's copies: those worth a copy of their own, and batches for the others."""

    direct: Pieces
    staged: tuple[Cells, ...]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What the transport and the staging memory are like."""

    piece_bytes: int
    """Copies from this size on go by themselves (`Transport.efficient_piece_bytes`)."""
    slot_bytes: int
    min_copies: int = 16
    """Staging must spare this many copies of a request, or it costs more than it saves: two-sided a message there
    and back, 0.5 to 1 ms, which is what 16 copies take over TCP."""


def split(
    pair: PairPlan,
    source_block_ids: BlockIds,
    sink_block_ids: BlockIds,
    first_token: int,
    end_token: int,
    *,
    staging: Staging,
    efficiency: Efficiency,
    layers: Collection[int] | None = None,
) -> Split:
    """The copies for tokens `[first_token, end_token)`: direct ones, and batches in the order of layers.

    The unit in whose middle the range starts always goes direct.

    Raises:
        RemoteProtocolError: block ids that do not cover the tokens or do not exist.
    """
    chosen = None if layers is None else frozenset(layers)
    direct: list[Pieces] = []
    staged: list[Cells] = []
    resolved = pair.resolved(source_block_ids, sink_block_ids, first_token, end_token)
    for index, (strand, source_ids, sink_ids, first) in enumerate(resolved):
        direct += strand.partial(source_ids, sink_ids, first, chosen)
        units = strand.whole(source_ids, sink_ids, first, end_token)
        if not units.size:
            continue
        source = strand.source.unit_offsets(source_ids, units)
        sink = strand.sink.unit_offsets(sink_ids, units)
        small = _small_units(strand, source, sink, chosen, staging, efficiency)
        if not small.all():
            direct += [repeat(lanes, source[~small], sink[~small]) for lanes in strand.lanes(chosen)]
        if small.any():
            staged += rectangles(index, strand, strand.regions(chosen), units[small], efficiency.slot_bytes)
    return Split(join(direct), tuple(staged))


def _small_units(
    strand: Strand,
    source: Ints,
    sink: Ints,
    layers: frozenset[int] | None,
    staging: Staging,
    efficiency: Efficiency,
) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Which units move in copies so small that they are better staged."""
    small = np.zeros(source.size, np.bool_)
    if staging is Staging.NONE or strand.cell_bytes > efficiency.slot_bytes:
        return small
    direct_copies = 0
    for lanes in strand.lanes(layers):
        order, starts, counts = runs_of(lanes, source, sink)
        below = counts * lanes.length < efficiency.piece_bytes
        small[order[np.repeat(below, counts)]] = True
        direct_copies += lanes.source.size * int(below.sum())
    if staging is Staging.BOTH or not small.any():
        small[:] &= direct_copies >= efficiency.min_copies
        return small
    passive = source[small] if staging is Staging.SINK else sink[small]
    extents = 0
    for lanes in strand.extents(layers, of_source=staging is Staging.SINK):
        _, starts, _ = runs_of(lanes, passive, passive)
        extents += lanes.source.size * starts.size
    # Below half, the extra pass over memory costs more than it saves.
    small[:] &= 2 * extents <= direct_copies and direct_copies - extents >= efficiency.min_copies
    return small


def rectangles(index: int, strand: Strand, regions: Ints, units: Ints, slot_bytes: int) -> Iterator[Cells]:
    """Batches of regions x units of strand number `index`, each at most a slot, whole regions where they fit."""
    room = slot_bytes // strand.cell_bytes
    if strand.layers_touch and room >= regions.size:
        units_at_once, regions_at_once = room // regions.size, regions.size
    elif units.size <= room:
        units_at_once, regions_at_once = units.size, max(1, room // units.size)
    else:
        units_at_once, regions_at_once = room, 1
    parts = [_ranges(units[unit : unit + units_at_once]) for unit in range(0, units.size, units_at_once)]
    for region in range(0, regions.size, regions_at_once):
        some = tuple(regions[region : region + regions_at_once].tolist())
        for part in parts:
            yield Cells(strand=index, regions=some, units=part)


def _ranges(units: Ints) -> tuple[tuple[int, int], ...]:
    starts = np.concatenate(([0], np.flatnonzero(np.diff(units) != 1) + 1))
    counts = np.diff(np.append(starts, units.size))
    return tuple(zip(units[starts].tolist(), counts.tolist(), strict=True))


def size_of(pair: PairPlan, cells: Cells) -> int:
    """Bytes that a batch takes in a slot.

    Raises:
        RemoteProtocolError: a batch that this pair does not have.
    """
    strand = _strand(pair, cells)
    return strand.cell_bytes * len(cells.regions) * sum(count for _, count in cells.units)


def gather(pair: PairPlan, cells: Cells, source_block_ids: BlockIds, slot: int) -> tuple[Tiles, ...]:
    """Two-sided, on the source: the copies from its cache into the slot at address `slot`.

    Raises:
        RemoteProtocolError: a batch or block ids that do not exist.
    """
    strand = _strand(pair, cells)
    offsets = strand.source.unit_offsets(
        pair.source_ids(strand, source_block_ids, _end(strand, cells)), _units(cells)
    )
    start = np.add.outer(strand.source_base[list(cells.regions)], offsets).ravel()
    return tuple(
        Tiles(_sum(start, tile.source), at, tile.length, tile.count, tile.source_step, tile.length)
        for tile, at in _packed(strand, start.size, slot)
    )


def scatter(pair: PairPlan, cells: Cells, sink_block_ids: BlockIds, slot: int) -> tuple[Tiles, ...]:
    """Two-sided, on the sink: the copies out of the slot at address `slot` into its cache, the mirror of `gather`.

    Raises:
        RemoteProtocolError: a batch or block ids that do not exist.
    """
    strand = _strand(pair, cells)
    ids = pair.sink_ids(strand, sink_block_ids, _end(strand, cells))
    offsets = strand.sink.unit_offsets(ids, _units(cells))
    start = np.add.outer(strand.sink_base[list(cells.regions)], offsets).ravel()
    return tuple(
        Tiles(at, _sum(start, tile.sink), tile.length, tile.count, tile.length, tile.sink_step)
        for tile, at in _packed(strand, start.size, slot)
    )


def _packed(strand: Strand, num_cells: int, slot: int) -> Iterator[tuple[Tiles, Ints]]:
    """Where each tile of each cell begins in a slot that holds the cells one after another."""
    cell = slot + np.arange(num_cells, dtype=np.int64) * strand.cell_bytes
    at = 0
    for tile in strand.tiles:
        size = tile.count * tile.length
        yield tile, _sum(cell, at + np.arange(len(tile), dtype=np.int64) * size)
        at += size * len(tile)


def read(
    pair: PairPlan, cells: Cells, source_block_ids: BlockIds, sink_block_ids: BlockIds, slot: int
) -> tuple[Pieces, tuple[Tiles, ...]]:
    """One-sided, on the sink of a pull: what to read into the slot, and what to scatter out of it then.

    Raises:
        RemoteProtocolError: a batch or block ids that do not exist.
    """
    strand, source, sink = _cells(pair, cells, source_block_ids, sink_block_ids)
    image = _Image.of(source, strand.source_atoms, slot)
    scattered = tuple(
        Tiles(image.at(_sum(source, tile.source)), _sum(sink, tile.sink), *_shape(tile))
        for tile in _within(strand, strand.source_atoms)
    )
    return Pieces(image.address, image.slot, image.length), scattered


def write(
    pair: PairPlan, cells: Cells, source_block_ids: BlockIds, sink_block_ids: BlockIds, slot: int
) -> tuple[tuple[Tiles, ...], Pieces]:
    """One-sided, on the source of a push: what to gather into the slot, and what to write out of it then.

    Raises:
        RemoteProtocolError: a batch or block ids that do not exist.
    """
    strand, source, sink = _cells(pair, cells, source_block_ids, sink_block_ids)
    image = _Image.of(sink, strand.sink_atoms, slot)
    gathered = tuple(
        Tiles(_sum(source, tile.source), image.at(_sum(sink, tile.sink)), *_shape(tile))
        for tile in _within(strand, strand.sink_atoms)
    )
    return gathered, Pieces(image.slot, image.address, image.length)


@dataclass(frozen=True, slots=True)
class _Image:
    """The passive end's extents of a batch, one after another in a slot, in the order of their addresses."""

    address: Ints
    slot: Ints
    length: Ints

    @classmethod
    def of(cls, cell_addresses: Ints, atoms: Pieces, slot: int) -> _Image:
        address = _sum(cell_addresses, atoms.source)
        length = np.tile(atoms.length, cell_addresses.size)
        order = np.argsort(address, kind="stable")
        address, length = address[order], length[order]
        merged = merge(Pieces(address, slot + np.cumsum(length) - length, length))
        return cls(merged.source, merged.sink, merged.length)

    def at(self, address: Ints) -> Ints:
        """Where in the slot the passive end's addresses lie."""
        extent = np.searchsorted(self.address, address, side="right") - 1
        return address - self.address[extent] + self.slot[extent]


def _within(strand: Strand, passive: Pieces) -> tuple[Tiles, ...]:
    """A cell's tiles, none of which reaches from one extent of the passive end into another."""
    return strand.tiles if len(passive) == 1 else strand.atoms().tiles()


def _shape(tile: Tiles) -> tuple[int, int, int, int]:
    return tile.length, tile.count, tile.source_step, tile.sink_step


def _cells(
    pair: PairPlan, cells: Cells, source_block_ids: BlockIds, sink_block_ids: BlockIds
) -> tuple[Strand, Ints, Ints]:
    """Where each cell begins on both sides, region by region and unit by unit."""
    strand, units = _strand(pair, cells), _units(cells)
    end, regions = _end(strand, cells), list(cells.regions)
    source = strand.source.unit_offsets(pair.source_ids(strand, source_block_ids, end), units)
    sink = strand.sink.unit_offsets(pair.sink_ids(strand, sink_block_ids, end), units)
    starts = np.add.outer(strand.source_base[regions], source), np.add.outer(strand.sink_base[regions], sink)
    return strand, starts[0].ravel(), starts[1].ravel()


def _sum(starts: Ints, offsets: Ints) -> Ints:
    sums: Ints = np.add.outer(starts, offsets).ravel()
    return sums


def _strand(pair: PairPlan, cells: Cells) -> Strand:
    if not 0 <= cells.strand < len(pair.strands):
        raise RemoteProtocolError(f"staged batch of strand {cells.strand}, this pair has {len(pair.strands)}")
    strand = pair.strands[cells.strand]
    known = strand.layers.size
    if not cells.regions or min(cells.regions) < 0 or max(cells.regions) >= known:
        raise RemoteProtocolError(f"staged batch of regions {cells.regions}, the strand has {known}")
    if not cells.units or any(first < 0 or count < 1 for first, count in cells.units):
        raise RemoteProtocolError(f"staged batch of units {cells.units}")
    return strand


def _units(cells: Cells) -> Ints:
    first, count = np.array(cells.units, np.int64).T
    before = np.cumsum(count) - count
    units: Ints = np.repeat(first - before, count) + np.arange(int(count.sum()), dtype=np.int64)
    return units


def _end(strand: Strand, cells: Cells) -> int:
    """The token after the batch's last one."""
    return max(first + count for first, count in cells.units) * strand.source.unit_tokens
