"""From two engines' layouts to copies: a plan per pair of engines, resolved once; per request a few array sums.

Block ids are lists per KV cache group, in token order from the prompt's first token on, on both sides. Tokens
are positions in the prompt: `[first_token, end_token)`; `first_token` is what the sink already has (its prefix
hit). The end is rounded up to whole units (see `strand`): one larger copy is cheaper than several exact ones, and
what lies beyond the prompt is nobody's yet. Packed blocks round the start down too. So a range must be the last
one of its transfer or end between two units: `ready_range` gives such ranges while a prefill is still running.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ascend_pd.errors import PairingError, RemoteProtocolError
from ascend_pd.layout.description import Group, KVLayout, Part, Region
from ascend_pd.layout.geometry import (
    Reason,
    Refusal,
    geometry,
    heads_of_rank,
    judge,
    kernel_block_size,
    senders,
)
from ascend_pd.layout.pieces import Pieces, join
from ascend_pd.layout.strand import Ints, Side, Strand, side_of

BlockIds = Sequence[Sequence[int]] | Sequence[Ints]
"""Per KV cache group; arrays spare the conversion of long lists at every call."""
SPLITS = {Part.KV: (Part.K, Part.V), Part.LATENT: (Part.LATENT, Part.ROPE)}


def salt_of(transfer_id: str) -> int:
    """A number that picks among equally good senders, the same on both sides and on every rank."""
    return zlib.crc32(transfer_id.encode())


def ready_range(sent_tokens: int, computed_tokens: int, prompt_tokens: int, unit_tokens: int) -> tuple[int, int]:
    """What may be pushed now: `[first, end)` with `end` between two units unless the prompt is complete.

    Args:
        unit_tokens: `TransferPlan.unit_tokens`.
    """
    if computed_tokens >= prompt_tokens:
        return sent_tokens, prompt_tokens
    return sent_tokens, max(sent_tokens, computed_tokens // unit_tokens * unit_tokens)


@dataclass(frozen=True, slots=True)
class PairPlan:
    """What one source worker sends to one sink worker."""

    strands: tuple[Strand, ...]
    packed: bool
    num_blocks: tuple[int, int]
    """Scheduler blocks of source and sink."""

    def pieces(
        self,
        source_block_ids: BlockIds,
        sink_block_ids: BlockIds,
        first_token: int,
        end_token: int,
        layers: Collection[int] | None = None,
    ) -> Pieces:
        """The copies for tokens `[first_token, end_token)` of one request, absolute addresses.

        Raises:
            RemoteProtocolError: block ids that do not cover the tokens or do not exist.
        """
        chosen = None if layers is None else frozenset(layers)
        found: list[Pieces] = []
        for strand, source, sink, first in self.resolved(source_block_ids, sink_block_ids, first_token, end_token):
            found += strand.pieces(source, sink, first, end_token, chosen)
        return join(found)

    def resolved(
        self, source_block_ids: BlockIds, sink_block_ids: BlockIds, first_token: int, end_token: int
    ) -> Iterator[tuple[Strand, Ints, Ints, int]]:
        """Per strand its checked block ids on both sides and the first token that moves; nothing for no tokens.

        Raises:
            RemoteProtocolError: block ids that do not cover the tokens or do not exist.
        """
        if first_token >= end_token:
            return
        for strand in self.strands:
            source = self.source_ids(strand, source_block_ids, end_token)
            sink = self.sink_ids(strand, sink_block_ids, end_token)
            unit = strand.source.unit_tokens
            yield strand, source, sink, first_token // unit * unit if self.packed else first_token

    def source_ids(self, strand: Strand, block_ids: BlockIds, end_token: int) -> Ints:
        """The source's block ids for a strand. Raises RemoteProtocolError when they cannot be right."""
        return _checked(block_ids, strand.group, strand.source.group, end_token, self.num_blocks[0], "prefill")

    def sink_ids(self, strand: Strand, block_ids: BlockIds, end_token: int) -> Ints:
        """The sink's block ids for a strand. Raises RemoteProtocolError when they cannot be right."""
        return _checked(block_ids, strand.group, strand.sink.group, end_token, self.num_blocks[1], "decode")


def _checked(block_ids: BlockIds, number: int, group: Group, end_token: int, limit: int, name: str) -> Ints:
    if number >= len(block_ids):
        raise RemoteProtocolError(f"{name} gave no block ids of KV cache group {number}")
    needed = -(-end_token // group.block_size)
    if len(block_ids[number]) < needed:
        have = f"{len(block_ids[number])} blocks of {group.block_size} tokens"
        raise RemoteProtocolError(f"{name} gave {have} for {end_token} tokens")
    ids = np.asarray(block_ids[number], np.int64)[:needed]
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= limit):
        raise RemoteProtocolError(f"{name} gave a block id outside its {limit} blocks")
    return ids


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """One worker's part in every transfer between two engines.

    `choices[salt % len(choices)]` maps the peer worker's number (`KVLayout.worker`) to what moves between it and
    this worker. For pull the peers are sources, for layer-wise pushes they are sinks.
    """

    choices: tuple[Mapping[int, PairPlan], ...]
    unit_tokens: int
    """Where ranges may end inside a prompt, for `ready_range`: a multiple of every KV cache group's unit."""

    def peers(self, salt: int = 0) -> tuple[int, ...]:
        """The peer workers that take part in a transfer."""
        return tuple(self.choices[salt % len(self.choices)])

    def pairs(self, salt: int = 0) -> Mapping[int, PairPlan]:
        """Per peer worker, what moves."""
        return self.choices[salt % len(self.choices)]

    def pieces(
        self,
        source_block_ids: BlockIds,
        sink_block_ids: BlockIds,
        first_token: int,
        end_token: int,
        *,
        salt: int = 0,
        layers: Collection[int] | None = None,
    ) -> dict[int, Pieces]:
        """Per peer worker, the copies for tokens `[first_token, end_token)`, of the given layers or of all.

        Raises:
            RemoteProtocolError: block ids that do not cover the tokens or do not exist.
        """
        return {
            peer: pair.pieces(source_block_ids, sink_block_ids, first_token, end_token, layers)
            for peer, pair in self.pairs(salt).items()
        }


def pull_plan(sources: Sequence[KVLayout], sink: KVLayout) -> TransferPlan:
    """The plan of one decode worker that reads from all workers of a prefill engine.

    Raises:
        PairingError: with the `Reason` as its `reason`.
    """
    if not sources:
        raise PairingError("prefill has announced no workers yet", Reason.WORKERS_INCOMPLETE)
    by_rank = _by_pipeline_and_rank(sources)
    for layout in (*sources, sink):
        _refuse_invalid(layout)
    layers = {region.layer for source in sources for region in source.regions}
    own_layers = {region.layer for region in sink.regions}
    _refuse(judge(geometry(sources[0], len(layers)), geometry(sink, len(own_layers)), "pull"))
    _refuse_layers(own_layers - layers, "prefill")
    compiled: dict[tuple[int, tuple[int, ...]], PairPlan] = {}
    choices: list[dict[int, PairPlan]] = []
    for choice in senders(_kv_heads(sink), sources[0].tp_size, sink.tp_size, sink.tp_rank):
        pairs: dict[int, PairPlan] = {}
        for rank, heads in choice.items():
            for source in by_rank[rank]:
                key = (source.worker, heads)
                if key not in compiled:
                    compiled[key] = pair(source, sink, heads)
                pairs[source.worker] = compiled[key]
        choices.append(pairs)
    return TransferPlan(tuple(choices), _unit_tokens(sources[0], sink))


def push_plan(source: KVLayout, sinks: Sequence[KVLayout]) -> TransferPlan:
    """The plan of one prefill worker that writes to all workers of a decode engine. A peer is absent from a choice
    when another replica sends to it.

    Raises:
        PairingError: with the `Reason` as its `reason`.
    """
    if not sinks:
        raise PairingError("decode has announced no workers yet", Reason.WORKERS_INCOMPLETE)
    _by_pipeline_and_rank(sinks)
    for layout in (source, *sinks):
        _refuse_invalid(layout)
    layers = {region.layer for region in source.regions}
    own_layers = {region.layer for sink in sinks for region in sink.regions}
    _refuse(judge(geometry(source, len(layers)), geometry(sinks[0], len(own_layers)), "layerwise"))
    _refuse_layers(own_layers - layers, "prefill")
    compiled: dict[tuple[int, tuple[int, ...]], PairPlan] = {}
    offers = {
        sink.worker: senders(_kv_heads(source), source.tp_size, sink.tp_size, sink.tp_rank) for sink in sinks
    }
    choices: list[dict[int, PairPlan]] = []
    for index in range(max(len(offer) for offer in offers.values())):
        pairs: dict[int, PairPlan] = {}
        for sink in sinks:
            heads = offers[sink.worker][index].get(source.tp_rank)
            if heads is None:
                continue
            key = (sink.worker, heads)
            if key not in compiled:
                compiled[key] = pair(source, sink, heads)
            pairs[sink.worker] = compiled[key]
        choices.append(pairs)
    return TransferPlan(tuple(choices), _unit_tokens(source, sinks[0]))


def pair(source: KVLayout, sink: KVLayout, heads: tuple[int, ...]) -> PairPlan:
    """Resolve what `source` sends to `sink`: the given heads of every layer that both have.

    Raises:
        PairingError: with the `Reason` as its `reason`.
    """
    for side in (source, sink):
        expected = heads_of_rank(_kv_heads(side), side.tp_size, side.tp_rank)
        if set(side.heads) != set(expected):
            message = f"rank {side.tp_rank} of {side.tp_size} stores KV heads {side.heads}, expected {expected}"
            raise PairingError(message, Reason.LAYOUT_INVALID)
    ours, theirs = _matched(source, sink)
    local_source = tuple(source.heads.index(head) for head in heads)
    local_sink = tuple(sink.heads.index(head) for head in heads)
    families: dict[tuple[Side, Side, int, int], list[tuple[int, int, int]]] = {}
    for key in sorted(ours.keys() & theirs.keys()):
        one, other = ours[key], theirs[key]
        if one.token_bytes != other.token_bytes or one.group != other.group:
            sizes = f"{one.token_bytes} bytes per token on prefill, {other.token_bytes} on decode"
            message = f"layer {key[0]} {key[1].value}: {sizes}"
            raise PairingError(message, Reason.HEAD_BYTES_DIFFER)
        groups = source.all_groups[one.group], sink.all_groups[other.group]
        unit = min(kernel_block_size(group) for group in groups)
        views = side_of(one, groups[0], unit, local_source), side_of(other, groups[1], unit, local_sink)
        family = families.setdefault((*views, one.token_bytes, one.group), [])
        family.append((key[0], one.base, other.base))
    strands = []
    for (left, right, token_bytes, group), rows in families.items():
        layers, source_base, sink_base = np.asarray(rows, np.int64).T
        strands.append(Strand(left, right, token_bytes, group, layers, source_base, sink_base))
    return PairPlan(tuple(strands), bool(source.packed), (source.num_blocks, sink.num_blocks))


def _matched(
    source: KVLayout, sink: KVLayout
) -> tuple[dict[tuple[int, Part], Region], dict[tuple[int, Part], Region]]:
    """Both sides' regions by (layer, part), joined ones split where the other side has them apart."""
    ours = {(region.layer, region.part): region for region in source.regions}
    theirs = {(region.layer, region.part): region for region in sink.regions}
    for mine, others in ((ours, theirs), (theirs, ours)):
        for (layer, part), region in list(mine.items()):
            halves = SPLITS.get(part)
            apart = halves is not None and (layer, halves[1]) in others and (layer, halves[1]) not in mine
            if halves is not None and apart:
                if source.packed:
                    message = f"layer {layer}: K and V are packed together on one side only"
                    raise PairingError(message, Reason.PACKING_DIFFERS)
                _split(mine, region, halves, others)
    shared = {layer for layer, _ in ours} & {layer for layer, _ in theirs}
    odd = sorted({key for key in ours.keys() ^ theirs.keys() if key[0] in shared})
    if odd:
        message = f"layer {odd[0][0]}: only one side has a part {odd[0][1].value!r}"
        raise PairingError(message, Reason.ATTENTION_DIFFERS)
    return ours, theirs


def _split(
    mine: dict[tuple[int, Part], Region],
    region: Region,
    halves: tuple[Part, Part],
    others: Mapping[tuple[int, Part], Region],
) -> None:
    first = others.get((region.layer, halves[0]))
    first_bytes = first.token_bytes if first is not None else 0
    if not 0 < first_bytes < region.token_bytes:
        message = (
            f"layer {region.layer}: {region.token_bytes} bytes cannot hold {halves[0].value} of {first_bytes}"
        )
        raise PairingError(message, Reason.HEAD_BYTES_DIFFER)
    del mine[region.layer, region.part]
    rest = region.token_bytes - first_bytes
    mine[region.layer, halves[0]] = msgspec.structs.replace(region, part=halves[0], token_bytes=first_bytes)
    mine[region.layer, halves[1]] = msgspec.structs.replace(
        region, part=halves[1], base=region.base + first_bytes, token_bytes=rest
    )


def _by_pipeline_and_rank(layouts: Sequence[KVLayout]) -> dict[int, list[KVLayout]]:
    """Workers by TP rank, one per pipeline stage each.

    Raises:
        PairingError: a worker is missing or there twice.
    """
    expected = layouts[0].tp_size * layouts[0].pp_size
    if sorted(layout.worker for layout in layouts) != list(range(expected)):
        have = sorted(layout.worker for layout in layouts)
        raise PairingError(f"workers {have} are known, {expected} expected", Reason.WORKERS_INCOMPLETE)
    by_rank: dict[int, list[KVLayout]] = {}
    for layout in layouts:
        by_rank.setdefault(layout.tp_rank, []).append(layout)
    return by_rank


def _kv_heads(layout: KVLayout) -> int:
    return 1 if layout.mla else layout.num_kv_heads


def _unit_tokens(source: KVLayout, sink: KVLayout) -> int:
    groups = zip(source.all_groups, sink.all_groups, strict=True)
    return math.lcm(*(min(kernel_block_size(ours), kernel_block_size(theirs)) for ours, theirs in groups))


def _refuse(refusals: list[Refusal]) -> None:
    if refusals:
        raise PairingError("; ".join(map(str, refusals)), refusals[0].reason)


def _refuse_invalid(layout: KVLayout) -> None:
    """What a worker says of itself must at least not contradict itself: it may come from anywhere."""
    groups = len(layout.all_groups)
    keys = [(region.layer, region.part) for region in layout.regions]
    wrong = [
        ("no cache", not layout.regions),
        ("a part of a layer twice", len(set(keys)) != len(keys)),
        ("a region of no group", any(not 0 <= region.group < groups for region in layout.regions)),
        ("a region of no bytes", any(region.token_bytes <= 0 for region in layout.regions)),
        ("a rank outside its engine", not 0 <= layout.tp_rank < layout.tp_size),
        ("a stage outside its engine", not 0 <= layout.pp_rank < layout.pp_size),
    ]
    for what, found in wrong:
        if found:
            raise PairingError(f"the layout of worker {layout.worker} has {what}", Reason.LAYOUT_INVALID)


def _refuse_layers(missing: set[int], side: str) -> None:
    if missing:
        raise PairingError(f"{side} has no cache for layers {sorted(missing)}", Reason.LAYERS_DIFFER)
