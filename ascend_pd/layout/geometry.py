"""Whether two engines' caches can be exchanged at all, judged without addresses: by preflight from the cluster
file, by the connectors from the handshake. Also which rank holds and which rank sends a KV head."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from ascend_pd.layout.description import Group, KVLayout

Mode = Literal["pull", "layerwise"]


class Reason(StrEnum):
    """Why a pair is refused. The values are stable names: they appear in findings, logs and answers."""

    TP_NOT_MULTIPLE = "tp-not-multiple"
    KV_HEADS_NOT_DIVISIBLE = "kv-heads-not-divisible"
    KV_HEADS_DIFFER = "kv-heads-differ"
    LAYERS_DIFFER = "layers-differ"
    DTYPE_DIFFERS = "kv-dtype-differs"
    ATTENTION_DIFFERS = "attention-kind-differs"
    HEAD_BYTES_DIFFER = "head-bytes-differ"
    BLOCK_SIZE_NOT_DIVISIBLE = "block-size-not-divisible"
    BLOCK_SIZE_PACKED = "block-size-packed"
    PACKING_DIFFERS = "packing-differs"
    GROUPS_DIFFER = "groups-differ"
    RECURRENT_STATE = "recurrent-state"
    PIPELINE_DECODE = "pipeline-decode"
    PIPELINE_LAYERWISE = "pipeline-layerwise"
    CONTEXT_PARALLEL = "context-parallel"
    WORKERS_INCOMPLETE = "workers-incomplete"
    LAYOUT_INVALID = "layout-invalid"


class Refusal(msgspec.Struct, frozen=True):
    """One reason against a pair, with both values in the message."""

    reason: Reason
    message: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's cache without its addresses."""

    tp_size: int
    pp_size: int = 1
    cp_size: int = 1
    """Prefill or decode context parallel size, the larger one."""
    num_layers: int
    num_kv_heads: int
    """Of the whole model; ignored for MLA."""
    token_bytes: int
    """K and V of one head and token together (for MLA latent and rope together); 0 when unknown or not the same
    in all layers."""
    dtype: str
    mla: bool = False
    packed: str = ""
    groups: tuple[Group, ...]

    @property
    def kv_heads(self) -> int:
        """Heads to spread over ranks: MLA's latent counts as one head that every rank holds."""
        return 1 if self.mla else self.num_kv_heads


def geometry(layout: KVLayout, num_layers: int) -> Geometry:
    """The geometry of the engine that `layout`'s worker belongs to; `num_layers` counts the whole model's."""
    per_layer: dict[int, int] = {}
    for region in layout.regions:
        per_layer[region.layer] = per_layer.get(region.layer, 0) + region.token_bytes
    sizes = set(per_layer.values())
    return Geometry(
        tp_size=layout.tp_size,
        pp_size=layout.pp_size,
        num_layers=num_layers,
        num_kv_heads=layout.num_kv_heads,
        token_bytes=sizes.pop() if len(sizes) == 1 else 0,
        dtype=layout.dtype,
        mla=layout.mla,
        packed=layout.packed,
        groups=layout.all_groups,
    )


def judge(source: Geometry, sink: Geometry, mode: Mode = "pull") -> list[Refusal]:
    """Everything that speaks against moving `source`'s (prefill) cache into `sink`'s (decode); empty when nothing
    does."""
    senseless = [*_senseless("prefill", source), *_senseless("decode", sink)]
    if senseless:
        return senseless
    found = _judge_parallel(source, sink, mode)
    found += _judge_model(source, sink)
    if len(source.groups) != len(sink.groups):
        message = f"prefill has {len(source.groups)} KV cache groups, decode {len(sink.groups)}"
        return [*found, Refusal(Reason.GROUPS_DIFFER, message)]
    packed = source.packed or sink.packed
    for index, (ours, theirs) in enumerate(zip(source.groups, sink.groups, strict=True)):
        found += _judge_group(index, ours, theirs, packed)
    return found


def _senseless(side: str, engine: Geometry) -> list[Refusal]:
    sizes = {"tensor parallel size": engine.tp_size, "pipeline parallel size": engine.pp_size}
    sizes |= {"number of KV heads": engine.kv_heads, "number of layers": engine.num_layers}
    found = [
        Refusal(Reason.LAYOUT_INVALID, f"{side}: {what} is {size}") for what, size in sizes.items() if size < 1
    ]
    for group in engine.groups:
        tokens, kernel_blocks = group.block_size, group.kernel_blocks_per_block
        if tokens < 1 or kernel_blocks < 1 or tokens % kernel_blocks:
            message = f"{side}: {kernel_blocks} kernel blocks in a block of {tokens} tokens"
            found.append(Refusal(Reason.LAYOUT_INVALID, message))
    return found


def _judge_parallel(source: Geometry, sink: Geometry, mode: Mode) -> list[Refusal]:
    found = []
    if source.tp_size % sink.tp_size:
        message = f"prefill's tensor parallel size {source.tp_size} is not a multiple of decode's {sink.tp_size}"
        found.append(Refusal(Reason.TP_NOT_MULTIPLE, message))
    for side, engine in (("prefill", source), ("decode", sink)):
        heads, tp_size = engine.kv_heads, engine.tp_size
        if heads % tp_size and tp_size % heads:
            message = f"{side}: {heads} KV heads can be neither split nor replicated evenly over {tp_size} ranks"
            found.append(Refusal(Reason.KV_HEADS_NOT_DIVISIBLE, message))
        if engine.cp_size > 1:
            found.append(Refusal(Reason.CONTEXT_PARALLEL, f"{side}: context parallel size is {engine.cp_size}"))
    if sink.pp_size > 1:
        found.append(Refusal(Reason.PIPELINE_DECODE, f"decode's pipeline parallel size is {sink.pp_size}"))
    if source.pp_size > 1 and mode == "layerwise":
        message = f"prefill's pipeline parallel size is {source.pp_size}; only pull mode reads from several stages"
        found.append(Refusal(Reason.PIPELINE_LAYERWISE, message))
    return found


def _judge_model(source: Geometry, sink: Geometry) -> list[Refusal]:
    def differ(reason: Reason, what: str, ours: object, theirs: object) -> list[Refusal]:
        return [] if ours == theirs else [Refusal(reason, f"{what}: prefill has {ours!r}, decode has {theirs!r}")]

    found = differ(Reason.ATTENTION_DIFFERS, "MLA", source.mla, sink.mla)
    found += differ(Reason.KV_HEADS_DIFFER, "KV heads", source.kv_heads, sink.kv_heads)
    found += differ(Reason.LAYERS_DIFFER, "layers", source.num_layers, sink.num_layers)
    found += differ(Reason.DTYPE_DIFFERS, "KV cache dtype", source.dtype, sink.dtype)
    if source.token_bytes and sink.token_bytes:
        found += differ(Reason.HEAD_BYTES_DIFFER, "bytes per head and token", source.token_bytes, sink.token_bytes)
    return found + differ(Reason.PACKING_DIFFERS, "packing of a block", source.packed, sink.packed)


def _judge_group(index: int, source: Group, sink: Group, packed: str) -> list[Refusal]:
    if source.recurrent or sink.recurrent:
        return [Refusal(Reason.RECURRENT_STATE, f"KV cache group {index} holds recurrent state (Mamba, GDN)")]
    if source.sliding_window != sink.sliding_window:
        message = (
            f"group {index}: sliding window {source.sliding_window} on prefill, {sink.sliding_window} on decode"
        )
        return [Refusal(Reason.GROUPS_DIFFER, message)]
    ours, theirs = kernel_block_size(source), kernel_block_size(sink)
    if ours != theirs and packed:
        message = f"a block packed for {packed} moves whole: prefill has {ours} tokens per block, decode {theirs}"
        return [Refusal(Reason.BLOCK_SIZE_PACKED, message)]
    if max(ours, theirs) % min(ours, theirs):
        message = f"neither block size divides the other: prefill has {ours} tokens, decode {theirs}"
        return [Refusal(Reason.BLOCK_SIZE_NOT_DIVISIBLE, message)]
    return []


def kernel_block_size(group: Group) -> int:
    """Tokens that lie together in memory."""
    return group.block_size // group.kernel_blocks_per_block


def heads_of_rank(num_kv_heads: int, tp_size: int, tp_rank: int) -> tuple[int, ...]:
    """The global KV heads that a rank stores, as vLLM splits or replicates them (use 1 head for MLA)."""
    if tp_size <= num_kv_heads:
        per_rank = num_kv_heads // tp_size
        return tuple(range(tp_rank * per_rank, (tp_rank + 1) * per_rank))
    return (tp_rank // (tp_size // num_kv_heads),)


def ranks_of_head(num_kv_heads: int, tp_size: int, head: int) -> range:
    """The TP ranks that store a head: one, or several neighbours that hold replicas."""
    if tp_size <= num_kv_heads:
        rank = head // (num_kv_heads // tp_size)
        return range(rank, rank + 1)
    replicas = tp_size // num_kv_heads
    return range(head * replicas, (head + 1) * replicas)


def senders(num_kv_heads: int, source_tp: int, sink_tp: int, sink_rank: int) -> list[dict[int, tuple[int, ...]]]:
    """Which source TP rank sends which heads to `sink_rank`: every head from exactly one rank.

    With replicas on the source there are several equally good choices, and a transfer takes
    `choices[salt % len(choices)]`. The replicas are dealt out to the sink's own replicas first, so that one
    transfer never asks the same source rank twice for what another could send, and a sink rank keeps to few peers.
    """
    heads = heads_of_rank(num_kv_heads, sink_tp, sink_rank)
    num_choices = max(1, source_tp // max(num_kv_heads, sink_tp))
    choices: list[dict[int, tuple[int, ...]]] = []
    for choice in range(num_choices):
        by_rank: dict[int, tuple[int, ...]] = {}
        for head in heads:
            replica = sink_rank - ranks_of_head(num_kv_heads, sink_tp, head).start
            rank = ranks_of_head(num_kv_heads, source_tp, head)[replica * num_choices + choice]
            by_rank[rank] = (*by_rank.get(rank, ()), head)
        choices.append(by_rank)
    return choices
