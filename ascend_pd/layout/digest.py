"""What both ends of a transfer add up to compare what was sent with what was received.

Either end packs the same batches of its own cache into a scratch slot, cell by cell as in two-sided staging: equal
caches give equal bytes there, whatever the layouts, block ids and TP sizes.
"""

from __future__ import annotations

from collections.abc import Collection

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.layout.pieces import Tiles
from ascend_pd.layout.plan import BlockIds, PairPlan
from ascend_pd.layout.staging import Cells, gather, rectangles, scatter


def batches(
    pair: PairPlan,
    source_block_ids: BlockIds,
    sink_block_ids: BlockIds,
    first_token: int,
    end_token: int,
    *,
    slot_bytes: int,
    layers: Collection[int] | None = None,
) -> tuple[Cells, ...]:
    """All whole units of tokens `[first_token, end_token)`, in batches of at most `slot_bytes`.

    A unit in whose middle the range starts is left out: the sink's own part of it need not equal the source's.

    Raises:
        RemoteProtocolError: block ids that do not cover the tokens or do not exist, or a cell larger than a slot.
    """
    chosen = None if layers is None else frozenset(layers)
    found: list[Cells] = []
    resolved = pair.resolved(source_block_ids, sink_block_ids, first_token, end_token)
    for index, (strand, source_ids, sink_ids, first) in enumerate(resolved):
        if strand.cell_bytes > slot_bytes:
            raise RemoteProtocolError(f"a block of {strand.cell_bytes} bytes per layer does not fit {slot_bytes}")
        units = strand.whole(source_ids, sink_ids, first, end_token)
        regions = strand.regions(chosen)
        if units.size and regions.size:
            found += rectangles(index, strand, regions, units, slot_bytes)
    return tuple(found)


def packed(pair: PairPlan, cells: Cells, block_ids: BlockIds, slot: int, *, of_source: bool) -> tuple[Tiles, ...]:
    """The copies of a batch from one end's own cache into the scratch slot at address `slot`.

    Raises:
        RemoteProtocolError: a batch or block ids that do not exist.
    """
    if of_source:
        return gather(pair, cells, block_ids, slot)
    return tuple(part.reversed() for part in scatter(pair, cells, block_ids, slot))
