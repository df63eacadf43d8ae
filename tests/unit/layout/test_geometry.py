"""Every reason for which a pair is refused, by preflight's judgement and again from the handshake's layouts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ascend_pd.errors import PairingError
from ascend_pd.layout.description import Group, KVLayout, Part
from ascend_pd.layout.geometry import (
    Geometry,
    Reason,
    geometry,
    heads_of_rank,
    judge,
    ranks_of_head,
    senders,
)
from ascend_pd.layout.plan import pull_plan, push_plan
from tests.unit.layout.caches import engine

GROUP = Group(block_size=128)


def shape(**changes: Any) -> Geometry:
    usual = {"tp_size": 2, "num_layers": 4, "num_kv_heads": 4, "token_bytes": 512, "dtype": "bfloat16"}
    return Geometry(**{**usual, "groups": (GROUP,), **changes})


def blocks(size: int, kernel_blocks: int = 1, **rest: Any) -> dict[str, Any]:
    return {"groups": (Group(block_size=size, kernel_blocks_per_block=kernel_blocks, **rest),)}


REFUSED = {
    Reason.TP_NOT_MULTIPLE: ({"tp_size": 1}, {"tp_size": 2}),
    Reason.KV_HEADS_NOT_DIVISIBLE: (
        {"num_kv_heads": 3, "tp_size": 2},
        {"num_kv_heads": 3, "tp_size": 1},
    ),
    Reason.KV_HEADS_DIFFER: ({"num_kv_heads": 4}, {"num_kv_heads": 8}),
    Reason.LAYERS_DIFFER: ({"num_layers": 4}, {"num_layers": 5}),
    Reason.DTYPE_DIFFERS: ({"dtype": "bfloat16"}, {"dtype": "int8"}),
    Reason.ATTENTION_DIFFERS: ({"mla": True}, {"num_kv_heads": 1}),
    Reason.HEAD_BYTES_DIFFER: ({"token_bytes": 512}, {"token_bytes": 256}),
    Reason.BLOCK_SIZE_NOT_DIVISIBLE: (blocks(128), blocks(96)),
    Reason.BLOCK_SIZE_PACKED: ({"packed": "vec", **blocks(128)}, {"packed": "vec", **blocks(64)}),
    Reason.PACKING_DIFFERS: ({"packed": "vec"}, {"packed": "amx"}),
    Reason.GROUPS_DIFFER: ({"groups": (GROUP, GROUP)}, {"groups": (GROUP,)}),
    Reason.RECURRENT_STATE: (blocks(128, recurrent=True), blocks(128, recurrent=True)),
    Reason.PIPELINE_DECODE: ({}, {"pp_size": 2}),
    Reason.CONTEXT_PARALLEL: ({"cp_size": 2}, {}),
    Reason.LAYOUT_INVALID: (blocks(128, 3), blocks(128)),
}


@pytest.mark.parametrize("reason", REFUSED, ids=str)
def test_each_impossible_pair_is_refused_with_its_own_reason_alone(reason: Reason) -> None:
    source, sink = REFUSED[reason]
    assert [refusal.reason for refusal in judge(shape(**source), shape(**sink))] == [reason]


@pytest.mark.parametrize(
    "changes", [{"tp_size": 0}, {"pp_size": 0}, {"num_kv_heads": 0}, {"num_layers": 0}], ids=str
)
def test_numbers_without_sense_are_refused_before_they_are_divided_by(changes: dict[str, Any]) -> None:
    for pair in ((shape(**changes), shape()), (shape(), shape(**changes))):
        assert [refusal.reason for refusal in judge(*pair)] == [Reason.LAYOUT_INVALID]


def test_every_reason_is_tested() -> None:
    from_layouts_only = {Reason.WORKERS_INCOMPLETE}
    assert set(REFUSED) | from_layouts_only | {Reason.PIPELINE_LAYERWISE} == set(Reason)


def test_pipeline_stages_on_prefill_are_for_pull_only() -> None:
    assert judge(shape(pp_size=2), shape(), "pull") == []
    assert [refusal.reason for refusal in judge(shape(pp_size=2), shape(), "layerwise")] == [
        Reason.PIPELINE_LAYERWISE
    ]


def test_a_refusal_names_both_values() -> None:
    (refusal,) = judge(shape(tp_size=1), shape(tp_size=2))
    assert str(refusal) == "tp-not-multiple: prefill's tensor parallel size 1 is not a multiple of decode's 2"


def test_all_reasons_are_reported_at_once() -> None:
    found = judge(shape(tp_size=1, dtype="int8"), shape(tp_size=2, num_layers=5))
    assert [refusal.reason for refusal in found] == [
        Reason.TP_NOT_MULTIPLE,
        Reason.LAYERS_DIFFER,
        Reason.DTYPE_DIFFERS,
    ]


@pytest.mark.parametrize(
    ("source", "sink"),
    [
        ({"tp_size": 8}, {"tp_size": 2}),
        ({"tp_size": 16, "mla": True}, {"tp_size": 4, "mla": True}),
        (blocks(256), blocks(128)),
        (blocks(128), blocks(256)),
        ({"packed": "vec", **blocks(128)}, {"packed": "vec", **blocks(256, 2)}),
        (blocks(128, sliding_window=512), blocks(128, sliding_window=512)),
        ({"token_bytes": 0}, {"token_bytes": 512}),
    ],
)
def test_possible_pairs_are_not_refused(source: dict[str, Any], sink: dict[str, Any]) -> None:
    assert judge(shape(**source), shape(**sink)) == []


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp_size", [1, 2, 4, 8, 16])
def test_ranks_and_heads_are_each_other_s_inverse(heads: int, tp_size: int) -> None:
    for head in range(heads):
        holders = [rank for rank in range(tp_size) if head in heads_of_rank(heads, tp_size, rank)]
        assert holders == list(ranks_of_head(heads, tp_size, head))


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("source_tp", [1, 2, 4, 8, 16])
def test_senders_hold_what_they_send_and_all_replicas_take_part(heads: int, source_tp: int) -> None:
    for sink_tp in (1, 2, 4, 8, 16):
        if source_tp % sink_tp:
            continue
        used = set()
        for sink_rank in range(sink_tp):
            for choice in senders(heads, source_tp, sink_tp, sink_rank):
                used |= set(choice)
                sent = sorted(head for part in choice.values() for head in part)
                assert sent == list(heads_of_rank(heads, sink_tp, sink_rank))
                assert all(
                    set(part) <= set(heads_of_rank(heads, source_tp, rank)) for rank, part in choice.items()
                )
        assert used == set(range(source_tp))


def layouts(tp_size: int = 2, kind: str = "joined_head_major", **rest: Any) -> list[KVLayout]:
    return [worker.layout for worker in engine(kind, tp_size, 4, **rest)]


def refused(sources: list[KVLayout], sink: KVLayout) -> str:
    with pytest.raises(PairingError) as error:
        pull_plan(sources, sink)
    return error.value.reason


def test_layouts_and_their_geometry_get_the_same_verdict() -> None:
    source, sink = layouts(1), layouts(2)
    assert [r.reason for r in judge(geometry(source[0], 2), geometry(sink[0], 2))] == [Reason.TP_NOT_MULTIPLE]
    assert refused(source, sink[0]) == Reason.TP_NOT_MULTIPLE
    with pytest.raises(PairingError, match="tp-not-multiple") as error:
        push_plan(source[0], sink)
    assert error.value.reason == Reason.TP_NOT_MULTIPLE


def test_a_handshake_without_all_workers_is_refused() -> None:
    assert refused([], layouts(1)[0]) == Reason.WORKERS_INCOMPLETE
    assert refused(layouts(2)[:1], layouts(1)[0]) == Reason.WORKERS_INCOMPLETE
    assert refused([layouts(2)[0]] * 2, layouts(1)[0]) == Reason.WORKERS_INCOMPLETE
    with pytest.raises(PairingError, match="expected"):
        push_plan(layouts(2)[0], layouts(2)[:1])


def test_a_rank_that_stores_other_heads_than_its_place_says_is_refused() -> None:
    source = [msgspec.structs.replace(layout, heads=(1,)) for layout in layouts(4)]
    assert refused(source, layouts(1)[0]) == Reason.LAYOUT_INVALID


@pytest.mark.parametrize(
    "changes",
    [
        {"num_kv_heads": 0},
        {"tp_size": 0},
        {"tp_rank": 9},
        {"pp_rank": 1},
        {"pp_size": 0},
        {"regions": ()},
        {"block_size": 0},
        {"kernel_blocks_per_block": 0},
    ],
    ids=str,
)
def test_a_layout_that_makes_no_sense_is_refused_whatever_it_says(changes: dict[str, Any]) -> None:
    good = layouts(1)[0]
    bad = msgspec.structs.replace(good, **changes)
    for source, sink in ((bad, good), (good, bad)):
        for attempt in (lambda s=source, d=sink: pull_plan([s], d), lambda s=source, d=sink: push_plan(s, [d])):
            with pytest.raises(PairingError) as error:
                attempt()
            assert error.value.reason in {Reason.LAYOUT_INVALID, Reason.WORKERS_INCOMPLETE}


@pytest.mark.parametrize("changes", [{"group": 3}, {"token_bytes": 0}, {"layer": 1}], ids=str)
def test_regions_that_make_no_sense_are_refused(changes: dict[str, Any]) -> None:
    good = layouts(1)[0]
    regions = (msgspec.structs.replace(good.regions[0], **changes), *good.regions[1:])
    bad = msgspec.structs.replace(good, regions=regions)
    assert refused([bad], good) == Reason.LAYOUT_INVALID


def test_layers_that_no_source_has_are_refused() -> None:
    source = [
        msgspec.structs.replace(
            layout,
            regions=tuple(msgspec.structs.replace(region, layer=region.layer + 7) for region in layout.regions),
        )
        for layout in layouts(2)
    ]
    assert refused(source, layouts(1)[0]) == Reason.LAYERS_DIFFER


def test_a_part_that_one_side_lacks_is_refused() -> None:
    def indexed(layout: KVLayout) -> KVLayout:
        extra = msgspec.structs.replace(layout.regions[0], part=Part.INDEXER)
        return msgspec.structs.replace(layout, regions=(*layout.regions, extra))

    assert refused([indexed(layout) for layout in layouts(2)], layouts(1)[0]) == Reason.ATTENTION_DIFFERS


def test_joined_and_apart_caches_cannot_mix_when_blocks_are_packed() -> None:
    assert (
        refused(layouts(1, packed="vec"), layouts(1, "apart_head_major", packed="vec")[0])
        == Reason.PACKING_DIFFERS
    )


def test_parts_of_other_sizes_are_refused() -> None:
    def wider(layout: KVLayout) -> KVLayout:
        regions = tuple(msgspec.structs.replace(r, token_bytes=r.token_bytes * 2) for r in layout.regions)
        return msgspec.structs.replace(layout, regions=regions)

    assert refused([wider(layout) for layout in layouts(2)], layouts(1)[0]) == Reason.HEAD_BYTES_DIFFER


def test_layouts_survive_the_wire() -> None:
    for kind in ("joined_head_major", "mla_apart"):
        for layout in layouts(2, kind, sliding_window=4):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout
