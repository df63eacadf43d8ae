"""Staged batches against plain loops: whatever is staged, the sink's bytes are the same."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.layout.digest import batches, packed
from ascend_pd.layout.pieces import Pieces, Tiles
from ascend_pd.layout.plan import PairPlan, pull_plan
from ascend_pd.layout.staging import (
    Cells,
    Efficiency,
    Split,
    Staging,
    gather,
    read,
    scatter,
    size_of,
    split,
    write,
)
from tests.unit.layout.caches import Worker, engine, expect, fill
from tests.unit.layout.requests import by_worker, content_of, transfers

SOURCE_SLOT, SINK_SLOT = 1 << 60, 1 << 61


class Slot:
    """A staging slot of one side, with canaries behind its end."""

    def __init__(self, address: int, size: int) -> None:
        self.origin, self.memory = address, np.full(size + 8, 0xEE, np.uint8)
        self.written = np.zeros(size + 8, np.uint8)


def move(pieces: Pieces, givers: list[Worker | Slot], takers: list[Worker | Slot]) -> None:
    """Do the copies one by one between whatever memories they name."""

    def at(memories: list[Worker | Slot], address: int, length: int) -> tuple[Worker | Slot, slice]:
        for memory in memories:
            start = address - memory.origin
            if 0 <= start <= start + length <= memory.memory.size:
                return memory, slice(start, start + length)
        raise AssertionError(f"{address:#x} is nowhere")

    for source, sink, length in zip(
        pieces.source.tolist(), pieces.sink.tolist(), pieces.length.tolist(), strict=True
    ):
        giver, there = at(givers, source, length)
        taker, here = at(takers, sink, length)
        taker.memory[here] = giver.memory[there]
        taker.written[here] += 1


def whole_slot(size: int) -> Pieces:
    return Pieces(*(np.array([value], np.int64) for value in (SOURCE_SLOT, SINK_SLOT, size)))


def carry_out(
    pair: PairPlan, parts: Split, staging: Staging, ids: tuple, source: Worker, sink: Worker, slot_bytes: int
) -> int:
    """Do a split transfer; returns how many copies crossed the wire."""
    ids = [ids[0]], [ids[1]]
    move(parts.direct, [source], [sink])
    crossed = len(parts.direct)
    for cells in parts.staged:
        assert size_of(pair, cells) <= slot_bytes
        ours, theirs = Slot(SOURCE_SLOT, size_of(pair, cells)), Slot(SINK_SLOT, size_of(pair, cells))
        if staging is Staging.SINK:
            wire, after = read(pair, cells, *ids, SINK_SLOT)
            before: tuple[Tiles, ...] = ()
            move(wire, [source], [theirs])
        elif staging is Staging.SOURCE:
            before, wire = write(pair, cells, *ids, SOURCE_SLOT)
            after = ()
            for tiles in before:
                move(tiles.pieces(), [source], [ours])
            move(wire, [ours], [sink])
        else:
            before, after = gather(pair, cells, ids[0], SOURCE_SLOT), scatter(pair, cells, ids[1], SINK_SLOT)
            for tiles in before:
                move(tiles.pieces(), [source], [ours])
            wire = whole_slot(size_of(pair, cells))
            move(wire, [ours], [theirs])
        for tiles in after:
            move(tiles.pieces(), [theirs], [sink])
        assert all(
            sum(tiles.num_bytes for tiles in local) == size_of(pair, cells) for local in (before, after) if local
        )
        for slot in (ours, theirs):
            assert (slot.memory[-8:] == 0xEE).all() and not slot.written[-8:].any()
        crossed += len(wire)
    return crossed


@settings(max_examples=300, deadline=None)
@given(transfers(), st.sampled_from(list(Staging)), st.integers(1, 200), st.integers(1, 600))
def test_staged_and_direct_copies_together_equal_the_reference(
    transfer: dict, staging: Staging, efficient: int, slot_bytes: int
) -> None:
    sources = engine(num_kv_heads=transfer["heads"], **transfer["source"])
    sinks = engine(num_kv_heads=transfer["heads"], **transfer["sink"])
    first, end = transfer["tokens"]
    content = content_of(2, transfer["heads"], end, end)
    fill(sources, transfer["ids"][0], content)
    for sink in sinks:
        plan = pull_plan([worker.layout for worker in sources], sink.layout)
        for peer, pair in plan.pairs(transfer["salt"]).items():
            lists = [transfer["ids"][0]], [transfer["ids"][1]]
            efficiency = Efficiency(piece_bytes=efficient, slot_bytes=slot_bytes, min_copies=1)
            parts = split(pair, *lists, first, end, staging=staging, efficiency=efficiency)
            carry_out(pair, parts, staging, transfer["ids"], by_worker(sources)[peer], sink, slot_bytes)
    expect(sinks, transfer["ids"][1], content, first, end)


def in_slots(
    pair: PairPlan, parts: tuple[Cells, ...], ids: list[int], worker: Worker, *, of_source: bool
) -> bytes:
    """What one end adds up."""
    found = b""
    for cells in parts:
        slot = Slot(SOURCE_SLOT, size_of(pair, cells))
        for tiles in packed(pair, cells, [ids], SOURCE_SLOT, of_source=of_source):
            move(tiles.pieces(), [worker], [slot])
        assert (slot.written[:-8] == 1).all() and not slot.written[-8:].any()
        found += slot.memory[:-8].tobytes()
    return found


@settings(max_examples=200, deadline=None)
@given(transfers(), st.integers(32, 600), st.data())
def test_both_ends_add_up_the_same_bytes_and_a_changed_one_shows(
    transfer: dict, slot_bytes: int, data: st.DataObject
) -> None:
    sources = engine(num_kv_heads=transfer["heads"], **transfer["source"])
    sinks = engine(num_kv_heads=transfer["heads"], **transfer["sink"])
    first, end = transfer["tokens"]
    fill(sources, transfer["ids"][0], content_of(2, transfer["heads"], end, end))
    for sink in sinks:
        plan = pull_plan([worker.layout for worker in sources], sink.layout)
        for peer, pair in plan.pairs(transfer["salt"]).items():
            lists = [transfer["ids"][0]], [transfer["ids"][1]]
            source = by_worker(sources)[peer]
            moved = pair.pieces(*lists, first, end)
            move(moved, [source], [sink])
            if max(strand.cell_bytes for strand in pair.strands) > slot_bytes:
                continue
            parts = batches(pair, *lists, first, end, slot_bytes=slot_bytes)
            assert all(size_of(pair, cells) <= slot_bytes for cells in parts)
            sent = in_slots(pair, parts, transfer["ids"][0], source, of_source=True)
            assert sent == in_slots(pair, parts, transfer["ids"][1], sink, of_source=False)
            # All that moves is added up but for the unit in whose middle the range starts.
            unit = pair.strands[0].source.unit_tokens
            assert len(sent) == pair.pieces(*lists, -(-first // unit) * unit, end).num_bytes
            if sent:
                cells = data.draw(st.sampled_from(parts))
                [tiles, *_] = packed(pair, cells, [transfer["ids"][1]], SOURCE_SLOT, of_source=False)
                sink.memory[int(tiles.source[0]) - sink.origin] ^= 0xFF
                assert sent != in_slots(pair, parts, transfer["ids"][1], sink, of_source=False)


def test_a_block_larger_than_the_scratch_slot_is_refused_by_name() -> None:
    _, _, pair = one_pair("joined_head_major", 1, 1)
    with pytest.raises(RemoteProtocolError, match="does not fit"):
        batches(pair, [[1]], [[1]], 0, 4, slot_bytes=16)


def one_pair(kind: str, source_tp: int, sink_tp: int, **rest: int) -> tuple[Worker, Worker, PairPlan]:
    sources, sinks = engine(kind, source_tp, 4, **rest), engine(kind, sink_tp, 4, **rest)
    pair = pull_plan([worker.layout for worker in sources], sinks[0].layout).pairs()[0]
    return sources[0], sinks[0], pair


def crossings(kind: str, staging: Staging, ids: tuple[list[int], list[int]], slot_bytes: int = 1 << 20) -> int:
    source, sink, pair = one_pair(kind, 4, 2, num_blocks=16)
    efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=slot_bytes, min_copies=1)
    parts = split(pair, [ids[0]], [ids[1]], 0, 4 * len(ids[0]), staging=staging, efficiency=efficiency)
    return carry_out(pair, parts, staging, ids, source, sink, slot_bytes)


RUN, SCATTERED = ([3, 4, 5, 6], [9, 8, 7, 6]), ([9, 2, 5, 7], [1, 8, 3, 6])


def test_a_pull_reads_whole_extents_of_the_source_where_heads_interleave_on_the_sink() -> None:
    assert crossings("joined_token_major", Staging.NONE, RUN) == 2 * 4 * 4
    assert crossings("joined_token_major", Staging.SINK, RUN) == 2
    assert crossings("joined_token_major", Staging.SINK, SCATTERED) == 2 * 4


def test_a_push_writes_whole_extents_of_the_sink_whatever_the_source_s_order() -> None:
    source, sink, pair = one_pair("joined_token_major", 4, 4, num_blocks=16, block_size=4)
    ids = [9, 2, 5, 7], [6, 3, 4, 5]
    efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=1 << 20, min_copies=1)
    parts = split(pair, [ids[0]], [ids[1]], 0, 16, staging=Staging.SOURCE, efficiency=efficiency)
    assert carry_out(pair, parts, Staging.SOURCE, ids, source, sink, 1 << 20) == 2


def test_a_push_orders_heads_and_tokens_as_the_sink_stores_them() -> None:
    sources, sinks = engine("joined_token_major", 1, 4), engine("joined_head_major", 1, 4)
    pair = pull_plan([sources[0].layout], sinks[0].layout).pairs()[0]
    efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=1 << 20, min_copies=1)
    parts = split(pair, [[1, 2]], [[5, 4]], 0, 8, staging=Staging.SOURCE, efficiency=efficiency)
    assert carry_out(pair, parts, Staging.SOURCE, ([1, 2], [5, 4]), sources[0], sinks[0], 1 << 20) == 2


@pytest.mark.parametrize("slot_cells", [2, 4, 8])
def test_with_blocks_outermost_all_layers_of_a_block_are_read_at_once(slot_cells: int) -> None:
    sources, sinks = engine("joined_blocks_outermost", 1, 4), engine("joined_token_major", 1, 4)
    pair = pull_plan([sources[0].layout], sinks[0].layout).pairs()[0]
    ids, slot_bytes = ([9, 2, 5, 7], [1, 8, 3, 6]), slot_cells * 4 * 4 * 8
    parts = split(
        pair,
        [ids[0]],
        [ids[1]],
        0,
        16,
        staging=Staging.SINK,
        efficiency=Efficiency(piece_bytes=1 << 20, slot_bytes=slot_bytes, min_copies=1),
    )
    assert carry_out(pair, parts, Staging.SINK, ids, sources[0], sinks[0], slot_bytes) == 4


def test_staging_on_both_sides_crosses_once_per_slot() -> None:
    assert crossings("joined_token_major", Staging.BOTH, SCATTERED) == 1
    assert crossings("joined_token_major", Staging.BOTH, SCATTERED, slot_bytes=4 * 8 * 4) == 2
    assert crossings("joined_token_major", Staging.BOTH, SCATTERED, slot_bytes=3 * 8 * 4) == 4


def test_one_sided_staging_is_not_chosen_when_it_saves_too_little() -> None:
    assert crossings("joined_head_major", Staging.SINK, SCATTERED) == 2 * 4
    _, _, pair = one_pair("joined_head_major", 4, 2, num_blocks=16)
    parts = split(
        pair,
        [SCATTERED[0]],
        [SCATTERED[1]],
        0,
        16,
        staging=Staging.SINK,
        efficiency=Efficiency(piece_bytes=1 << 20, slot_bytes=1 << 20, min_copies=1),
    )
    assert parts.staged == ()


def test_units_in_long_runs_go_direct_and_the_rest_is_staged() -> None:
    _, _, pair = one_pair("joined_head_major", 4, 4, num_blocks=16)
    ids = [4, 3, 2, 1, 11, 0], [6, 5, 4, 3, 12, 8]
    efficiency = Efficiency(piece_bytes=4 * 4 * 8, slot_bytes=1 << 20, min_copies=1)
    parts = split(pair, [ids[0]], [ids[1]], 0, 24, staging=Staging.BOTH, efficiency=efficiency)
    assert parts.direct.length.tolist() == [4 * 4 * 8] * 2
    assert parts.staged == (Cells(strand=0, regions=(0, 1), units=((4, 2),)),)


@pytest.mark.parametrize("staging", [Staging.SINK, Staging.BOTH])
def test_a_handful_of_copies_is_not_staged(staging: Staging) -> None:
    _, _, pair = one_pair("joined_token_major", 4, 2)
    for min_copies, staged in ((4, True), (9, False)):
        efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=1 << 20, min_copies=min_copies)
        parts = split(pair, [[1]], [[1]], 0, 4, staging=staging, efficiency=efficiency)
        assert bool(parts.staged) == staged and bool(len(parts.direct)) != staged


def test_a_cell_larger_than_a_slot_goes_direct() -> None:
    _, _, pair = one_pair("joined_token_major", 4, 2)
    efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=4 * 8 - 1, min_copies=1)
    parts = split(pair, [[1]], [[1]], 0, 4, staging=Staging.BOTH, efficiency=efficiency)
    assert parts.staged == () and parts.direct.num_bytes == 2 * 4 * 8


def test_a_push_of_one_layer_stages_that_layer_alone() -> None:
    _, _, pair = one_pair("apart_token_major", 4, 2)
    efficiency = Efficiency(piece_bytes=1 << 20, slot_bytes=1 << 20, min_copies=1)
    parts = split(pair, [[1]], [[1]], 0, 4, staging=Staging.BOTH, efficiency=efficiency, layers=[1])
    layers = {int(pair.strands[cells.strand].layers[region]) for cells in parts.staged for region in cells.regions}
    assert layers == {1} and sum(size_of(pair, cells) for cells in parts.staged) == 4 * 8


def test_batches_survive_the_wire() -> None:
    cells = Cells(strand=1, regions=(0, 4), units=((3, 7), (12, 1)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(cells), type=Cells) == cells


@pytest.mark.parametrize(
    "cells",
    [
        Cells(strand=9, regions=(0,), units=((0, 1),)),
        Cells(strand=-1, regions=(0,), units=((0, 1),)),
        Cells(strand=0, regions=(), units=((0, 1),)),
        Cells(strand=0, regions=(99,), units=((0, 1),)),
        Cells(strand=0, regions=(-1,), units=((0, 1),)),
        Cells(strand=0, regions=(0,), units=()),
        Cells(strand=0, regions=(0,), units=((-1, 1),)),
        Cells(strand=0, regions=(0,), units=((0, 99),)),
        Cells(strand=0, regions=(0,), units=((0, 0),)),
    ],
)
def test_batches_that_do_not_exist_are_refused(cells: Cells) -> None:
    _, _, pair = one_pair("joined_head_major", 4, 2)
    with pytest.raises(RemoteProtocolError):
        scatter(pair, cells, [[1, 2]], SINK_SLOT)
