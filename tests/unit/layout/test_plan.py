"""The planner against plain loops, over all combinations that it must support or refuse."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.errors import PairingError, RemoteProtocolError
from ascend_pd.layout.description import Group, KVLayout
from ascend_pd.layout.geometry import Reason
from ascend_pd.layout.plan import pull_plan, push_plan, ready_range, salt_of
from tests.unit.layout.caches import KINDS, Worker, engine, execute, expect, fill
from tests.unit.layout.requests import KV_HEADS, TP_SIZES, by_worker, content_of, shards, transfers


def pull_all(
    sources: list[Worker], sinks: list[Worker], ids: tuple, tokens: tuple[int, int], salt: int = 0
) -> None:
    for sink in sinks:
        plan = pull_plan([worker.layout for worker in sources], sink.layout)
        for peer, pieces in plan.pieces([ids[0]], [ids[1]], *tokens, salt=salt).items():
            execute(pieces, {peer: by_worker(sources)[peer]}, by_worker(sinks))


def push_all(
    sources: list[Worker], sinks: list[Worker], ids: tuple, tokens: tuple[int, int], salt: int = 0, layers=None
) -> None:
    for source in sources:
        plan = push_plan(source.layout, [worker.layout for worker in sinks])
        for peer, pieces in plan.pieces([ids[0]], [ids[1]], *tokens, salt=salt, layers=layers).items():
            execute(pieces, by_worker(sources), {peer: by_worker(sinks)[peer]})


@pytest.mark.parametrize(("kind", "heads"), list(itertools.product(KINDS, KV_HEADS)))
def test_every_tp_pair_moves_every_head_once_or_is_refused(kind: str, heads: int) -> None:
    heads = 1 if kind.startswith("mla") else heads
    content = content_of(1, heads, 6, heads)
    for source_tp, sink_tp, sizes in itertools.product(TP_SIZES, TP_SIZES, ((4, 4), (4, 2), (2, 4))):
        sources = engine(kind, source_tp, heads, num_layers=1, num_blocks=4, block_size=sizes[0])
        sinks = engine(kind, sink_tp, heads, num_layers=1, num_blocks=4, block_size=sizes[1])
        ids = [2, 1, 3][: -(-6 // sizes[0])], [1, 3, 2][: -(-6 // sizes[1])]
        if source_tp % sink_tp or not shards(heads, source_tp) or not shards(heads, sink_tp):
            expected = Reason.TP_NOT_MULTIPLE if source_tp % sink_tp else Reason.KV_HEADS_NOT_DIVISIBLE
            with pytest.raises(PairingError) as refused:
                pull_all(sources, sinks, ids, (0, 6))
            assert refused.value.reason == expected
            with pytest.raises(PairingError) as refused:
                push_all(sources, sinks, ids, (0, 6))
            assert refused.value.reason == expected
            continue
        fill(sources, ids[0], content)
        move = pull_all if (source_tp + sink_tp) % 3 else push_all
        move(sources, sinks, ids, (0, 6), salt=source_tp + sizes[0])
        expect(sinks, ids[1], content, 0, 6)


@settings(max_examples=300, deadline=None)
@given(transfers())
def test_pulled_bytes_equal_the_reference_for_any_layout_pair_and_block_lists(transfer: dict) -> None:
    sources = engine(num_kv_heads=transfer["heads"], **transfer["source"])
    sinks = engine(num_kv_heads=transfer["heads"], **transfer["sink"])
    first, end = transfer["tokens"]
    content = content_of(2, transfer["heads"], end, end)
    fill(sources, transfer["ids"][0], content)
    pull_all(sources, sinks, transfer["ids"], (first, end), transfer["salt"])
    expect(sinks, transfer["ids"][1], content, first, end)


@settings(max_examples=150, deadline=None)
@given(transfers(), st.lists(st.integers(1, 9), max_size=6))
def test_pushing_chunk_by_chunk_and_layer_by_layer_equals_one_transfer(transfer: dict, chunks: list[int]) -> None:
    transfer["source"]["pp_size"] = 1
    sources = engine(num_kv_heads=transfer["heads"], **transfer["source"])
    sinks = engine(num_kv_heads=transfer["heads"], **transfer["sink"])
    first, end = transfer["tokens"]
    content = content_of(2, transfer["heads"], end, end)
    fill(sources, transfer["ids"][0], content)
    unit = push_plan(sources[0].layout, [worker.layout for worker in sinks]).unit_tokens
    sent = computed = first
    for chunk in [*chunks, end]:
        computed = min(end, computed + chunk)
        start, stop = ready_range(sent, computed, end, unit)
        for layer in (0, 1):
            push_all(sources, sinks, transfer["ids"], (start, stop), transfer["salt"], layers=[layer])
        sent = stop
    expect(sinks, transfer["ids"][1], content, first, end)


@pytest.mark.parametrize(("source_tp", "sink_tp", "heads"), [(1, 1, 2), (4, 2, 4), (8, 2, 4), (4, 4, 1)])
def test_packed_blocks_move_whole_and_round_the_start_down(source_tp: int, sink_tp: int, heads: int) -> None:
    sources = engine("joined_head_major", source_tp, heads, packed="vec")
    sinks = engine("joined_head_major", sink_tp, heads, packed="vec")
    content = content_of(2, heads, 12, 5)
    fill(sources, [9, 3, 4], content)
    pull_all(sources, sinks, ([9, 3, 4], [1, 8, 7]), (5, 11))
    expect(sinks, [1, 8, 7], content, 4, 12)


def test_one_prefill_pool_serves_decode_pools_of_different_tp() -> None:
    sources = engine("joined_head_major", 4, 4)
    content = content_of(2, 4, 8, 5)
    fill(sources, [1, 2], content)
    for sink_tp in (1, 2, 4):
        sinks = engine("joined_head_major", sink_tp, 4)
        pull_all(sources, sinks, ([1, 2], [2, 1]), (0, 8))
        expect(sinks, [2, 1], content, 0, 8)


def test_heads_are_found_by_name_whatever_the_storage_order() -> None:
    sources = engine("joined_head_major", 1, 4)
    sinks = engine("joined_token_major", 1, 4)
    sources[0].layout = msgspec.structs.replace(sources[0].layout, heads=(2, 0, 3, 1))
    sinks[0].layout = msgspec.structs.replace(sinks[0].layout, heads=(3, 2, 1, 0))
    content = content_of(2, 4, 8, 5)
    fill(sources, [1, 2], content)
    pull_all(sources, sinks, ([1, 2], [2, 1]), (0, 8))
    expect(sinks, [2, 1], content, 0, 8)


def test_each_cache_group_has_its_own_block_ids() -> None:
    def grouped(workers: list[Worker]) -> None:
        for worker in workers:
            regions = tuple(msgspec.structs.replace(r, group=r.layer) for r in worker.layout.regions)
            groups = (Group(block_size=4), Group(block_size=4))
            worker.layout = msgspec.structs.replace(worker.layout, regions=regions, groups=groups)

    sources, sinks = engine("joined_head_major", 2, 4), engine("apart_token_major", 1, 4)
    grouped(sources)
    grouped(sinks)
    content = content_of(2, 4, 8, 5)
    for layer, ids in ((0, [1, 2]), (1, [9, 4])):
        only = np.zeros_like(content)
        only[layer] = content[layer]
        fill([Worker(part_of(w.layout, layer), w.memory) for w in sources], ids, only)
    plan = pull_plan([worker.layout for worker in sources], sinks[0].layout)
    for pieces in plan.pieces([[1, 2], [9, 4]], [[5, 6], [8, 7]], 0, 8).values():
        execute(pieces, by_worker(sources), by_worker(sinks))
    for layer, ids in ((0, [5, 6]), (1, [8, 7])):
        view = Worker(part_of(sinks[0].layout, layer), sinks[0].memory)
        expect([view], ids, content, 0, 8, written=False)


def part_of(layout: KVLayout, layer: int) -> KVLayout:
    return msgspec.structs.replace(layout, regions=tuple(r for r in layout.regions if r.layer == layer))


def test_blocks_that_left_a_sliding_window_are_not_moved() -> None:
    sources = engine("joined_head_major", 1, 2, sliding_window=8)
    sinks = engine("joined_head_major", 1, 2, sliding_window=8)
    content = content_of(2, 2, 16, 5)
    fill(sources, [7, 5, 4, 3], content)
    pull_all(sources, sinks, ([0, 5, 4, 3], [0, 0, 8, 9]), (2, 16))
    expect(sinks, [1, 2, 8, 9], content, 8, 16)


def merged(source_ids: list[int], sink_ids: list[int], kind: str = "joined_head_major", layers: int = 1) -> int:
    source = engine(kind, 1, 2, num_layers=layers, num_blocks=32)[0].layout
    sink = engine(kind, 1, 2, num_layers=layers, num_blocks=32)[0].layout
    return len(pull_plan([source], sink).pieces([source_ids], [sink_ids], 0, 4 * len(source_ids))[0])


@pytest.mark.parametrize(
    ("source_ids", "sink_ids", "pieces"),
    [
        ([1, 2, 3, 4], [11, 12, 13, 14], 1),
        ([4, 3, 2, 1], [14, 13, 12, 11], 1),
        ([4, 3, 2, 1], [11, 12, 13, 14], 4),
        ([1, 2, 3, 4], [14, 13, 12, 11], 4),
        ([13, 11, 14, 15], [3, 1, 4, 5], 2),
        ([9, 8, 1, 2], [19, 18, 10, 11], 2),
    ],
)
def test_blocks_merge_when_both_sides_move_the_same_way(source_ids: list, sink_ids: list, pieces: int) -> None:
    assert merged(source_ids, sink_ids) == pieces


def test_layers_that_touch_on_both_sides_merge() -> None:
    assert merged([1, 5, 9], [2, 4, 6], "joined_blocks_outermost", layers=8) == 3
    assert merged([1, 5, 9], [2, 4, 6], "joined_head_major", layers=8) == 24


def test_replicas_of_a_head_take_turns_and_one_transfer_spreads_over_them() -> None:
    sources = [worker.layout for worker in engine("mla_joined", 8, 1)]
    sinks = [worker.layout for worker in engine("mla_joined", 2, 1)]
    plans = [pull_plan(sources, sink) for sink in sinks]
    used = {salt: [plan.peers(salt) for plan in plans] for salt in range(8)}
    assert all(len(peers) == 1 for salt in used for peers in used[salt])
    assert {peers[0] for salt in used for peers in used[salt]} == set(range(8))
    assert all(used[salt][0] != used[salt][1] for salt in used)


def test_push_and_pull_agree_on_who_sends() -> None:
    sources = [worker.layout for worker in engine("joined_head_major", 8, 2)]
    sinks = [worker.layout for worker in engine("joined_head_major", 2, 2)]
    for salt in range(5):
        pulled = {(peer, sink.worker) for sink in sinks for peer in pull_plan(sources, sink).peers(salt)}
        pushed = {(source.worker, peer) for source in sources for peer in push_plan(source, sinks).peers(salt)}
        assert pulled == pushed


def test_the_salt_depends_on_the_transfer_alone() -> None:
    assert salt_of("a") == salt_of("a") != salt_of("b")


@pytest.mark.parametrize(
    ("kind", "packed", "reason"),
    [(kind, "", Reason.BLOCK_SIZE_NOT_DIVISIBLE) for kind in KINDS]
    + [("joined_head_major", "vec", Reason.BLOCK_SIZE_PACKED)],
)
def test_block_sizes_that_do_not_fit_are_refused(kind: str, packed: str, reason: Reason) -> None:
    for source_tp, sink_tp in ((1, 1), (4, 2), (8, 8)):
        source = [w.layout for w in engine(kind, source_tp, 8, packed=packed, block_size=8 if packed else 6)]
        sinks = [w.layout for w in engine(kind, sink_tp, 8, packed=packed, block_size=4)]
        for attempt in (
            lambda s=source, d=sinks: pull_plan(s, d[0]),
            lambda s=source, d=sinks: push_plan(s[0], d),
        ):
            with pytest.raises(PairingError) as refused:
                attempt()
            assert refused.value.reason == reason


def test_ranges_end_where_every_group_has_a_unit() -> None:
    def grouped(sizes: tuple[int, int]) -> KVLayout:
        layout = engine("joined_head_major", 1, 2)[0].layout
        regions = tuple(msgspec.structs.replace(r, group=r.layer) for r in layout.regions)
        groups = tuple(Group(block_size=size) for size in sizes)
        return msgspec.structs.replace(layout, regions=regions, groups=groups)

    assert pull_plan([grouped((4, 6))], grouped((8, 6))).unit_tokens == 12


def test_nothing_to_move_is_no_pieces() -> None:
    layout = engine("joined_head_major", 1, 2)[0].layout
    assert len(pull_plan([layout], layout).pieces([[]], [[]], 0, 0)[0]) == 0
    assert len(pull_plan([layout], layout).pieces([[1, 2]], [[1, 2]], 8, 8)[0]) == 0


@pytest.mark.parametrize(
    ("source_ids", "sink_ids"),
    [([[1]], [[1, 2]]), ([[1, 2]], [[1]]), ([[1, 99]], [[1, 2]]), ([[1, -1]], [[1, 2]])],
)
def test_block_lists_that_do_not_cover_the_tokens_or_do_not_exist_are_refused(
    source_ids: list, sink_ids: list
) -> None:
    layout = engine("joined_head_major", 1, 2)[0].layout
    with pytest.raises(RemoteProtocolError):
        pull_plan([layout], layout).pieces(source_ids, sink_ids, 0, 8)
