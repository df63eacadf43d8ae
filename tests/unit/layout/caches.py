"""Whole engines' KV caches as numpy arenas, filled and read by plain loops: the reference for the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ascend_pd.layout.description import Group, KVLayout, Part, Region
from ascend_pd.layout.geometry import heads_of_rank
from ascend_pd.layout.pieces import Pieces

WORKER_SPAN = 1 << 40
"""Workers' arenas lie this far apart, so that an address names its worker."""

KINDS = (
    "joined_head_major",
    "joined_token_major",
    "apart_head_major",
    "apart_token_major",
    "joined_heads_outermost",
    "joined_blocks_outermost",
    "mla_joined",
    "mla_apart",
)
K_BYTES, V_BYTES, ROPE_BYTES = 4, 4, 2


@dataclass
class Worker:
    """One worker's layout and memory."""

    layout: KVLayout
    memory: NDArray[np.uint8]
    written: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.written = np.zeros(self.memory.size, np.uint8)

    @property
    def origin(self) -> int:
        return (self.layout.worker + 1) * WORKER_SPAN

    def where(self, region: Region, ids: Sequence[int], head: int, token: int) -> int:
        """Offset in this worker's memory of one token of one local head, by the definition of the layout."""
        group = self.layout.all_groups[region.group]
        per_kernel_block = group.block_size // group.kernel_blocks_per_block
        kernel_in_block, inside = divmod(token % group.block_size, per_kernel_block)
        block = ids[token // group.block_size] * group.kernel_blocks_per_block + kernel_in_block
        address = region.base + block * region.block_stride + head * region.head_stride
        return address + inside * region.token_stride - self.origin


def regions_of(
    kind: str, layer: int, index: int, base: int, heads: int, tokens: int, blocks: int, layers: int
) -> tuple[list[Region], int]:
    """One layer's regions, and where the next layer's memory begins (`tokens` and `blocks` are the kernel's)."""
    joined = K_BYTES + V_BYTES

    def one(part: Part, size: int, at: int, major: str) -> Region:
        head_stride, token_stride = (tokens * size, size) if major == "head" else (size, heads * size)
        return Region(layer, part, at, heads * tokens * size, head_stride, token_stride, size)

    block_bytes = heads * tokens * joined
    if kind in ("joined_head_major", "joined_token_major"):
        return [one(Part.KV, joined, base, kind.split("_")[1])], base + blocks * block_bytes
    if kind in ("apart_head_major", "apart_token_major"):
        major = kind.split("_")[1]
        middle = base + blocks * heads * tokens * K_BYTES + 2  # a gap, as after alignment
        return [
            one(Part.K, K_BYTES, base, major),
            one(Part.V, V_BYTES, middle, major),
        ], base + blocks * block_bytes + 2
    if kind == "joined_heads_outermost":
        region = Region(layer, Part.KV, base, tokens * joined, blocks * tokens * joined, joined, joined)
        return [region], base + blocks * block_bytes
    if kind == "joined_blocks_outermost":
        at = base + index * block_bytes
        region = Region(layer, Part.KV, at, layers * block_bytes, tokens * joined, joined, joined)
        return [region], base if index < layers - 1 else base + layers * blocks * block_bytes
    if kind == "mla_joined":
        return [one(Part.LATENT, K_BYTES + ROPE_BYTES, base, "head")], base + blocks * tokens * (
            K_BYTES + ROPE_BYTES
        )
    middle = base + blocks * tokens * K_BYTES
    regions = [one(Part.LATENT, K_BYTES, base, "token"), one(Part.ROPE, ROPE_BYTES, middle, "token")]
    return regions, middle + blocks * tokens * ROPE_BYTES


def engine(
    kind: str,
    tp_size: int,
    num_kv_heads: int,
    *,
    block_size: int = 4,
    kernel_blocks: int = 1,
    num_blocks: int = 12,
    num_layers: int = 2,
    pp_size: int = 1,
    packed: str = "",
    sliding_window: int = 0,
) -> list[Worker]:
    """All workers of one engine. Layers are dealt out to pipeline stages in order."""
    mla = kind.startswith("mla")
    workers = []
    per_stage = -(-num_layers // pp_size)
    for pp_rank in range(pp_size):
        layers = range(pp_rank * per_stage, min(num_layers, (pp_rank + 1) * per_stage))
        for tp_rank in range(tp_size):
            heads = (0,) if mla else heads_of_rank(num_kv_heads, tp_size, tp_rank)
            origin = at = (pp_rank * tp_size + tp_rank + 1) * WORKER_SPAN
            regions: list[Region] = []
            for index, layer in enumerate(layers):
                shape = (len(heads), block_size // kernel_blocks, num_blocks * kernel_blocks, len(layers))
                more, at = regions_of(kind, layer, index, at, *shape)
                regions += more
            groups = Group(
                block_size=block_size, kernel_blocks_per_block=kernel_blocks, sliding_window=sliding_window
            )
            layout = KVLayout(
                regions=tuple(regions),
                dtype="int8",
                num_blocks=num_blocks,
                block_size=block_size,
                kernel_blocks_per_block=kernel_blocks,
                groups=(groups,) if sliding_window else (),
                tp_rank=tp_rank,
                tp_size=tp_size,
                num_kv_heads=1 if mla else num_kv_heads,
                heads=heads,
                mla=mla,
                packed=packed,
                pp_rank=pp_rank,
                pp_size=pp_size,
            )
            workers.append(Worker(layout, np.zeros(at - origin, np.uint8)))
    return workers


def slices_of(region: Region) -> slice:
    """Which bytes of a head and token's content (K then V, latent then rope) a region holds."""
    if region.part in (Part.V, Part.ROPE):
        return slice(K_BYTES, K_BYTES + region.token_bytes)
    return slice(0, region.token_bytes)


def fill(workers: Sequence[Worker], ids: Sequence[int], content: NDArray[np.uint8]) -> None:
    """Store `content[layer, head, token]` as the prefill of one request would."""
    for worker in workers:
        for region in worker.layout.regions:
            for local, head in enumerate(worker.layout.heads):
                for token in range(content.shape[2]):
                    at = worker.where(region, ids, local, token)
                    worker.memory[at : at + region.token_bytes] = content[
                        region.layer, head, token, slices_of(region)
                    ]


def execute(pieces: Pieces, sources: Mapping[int, Worker], sinks: Mapping[int, Worker]) -> None:
    """Do the copies one by one and count how often each byte is written."""
    for source, sink, length in zip(pieces.source, pieces.sink, pieces.length, strict=True):
        giver, taker = sources[int(source) // WORKER_SPAN - 1], sinks[int(sink) // WORKER_SPAN - 1]
        start, to = int(source) - giver.origin, int(sink) - taker.origin
        assert 0 <= start <= start + length <= giver.memory.size
        assert 0 <= to <= to + length <= taker.memory.size
        taker.memory[to : to + length] = giver.memory[start : start + length]
        taker.written[to : to + length] += 1


def expect(
    workers: Sequence[Worker],
    ids: Sequence[int],
    content: NDArray[np.uint8],
    first: int,
    end: int,
    *,
    written: bool = True,
) -> None:
    """Every head of every layer of tokens `[first, end)` is there, written once; nothing outside the last unit of
    the same blocks was touched."""
    for worker in workers:
        allowed = np.zeros(worker.memory.size, np.bool_)
        for region in worker.layout.regions:
            for local, head in enumerate(worker.layout.heads):
                for token in range(len(ids) * worker.layout.block_size):
                    at = worker.where(region, ids, local, token)
                    where = slice(at, at + region.token_bytes)
                    if first <= token < end:
                        expected = content[region.layer, head, token, slices_of(region)]
                        place = (worker.layout.worker, region.layer, region.part, head, token)
                        assert np.array_equal(worker.memory[where], expected), place
                        assert not written or (worker.written[where] == 1).all(), place
                    allowed[where] = token >= first
        assert not worker.written[~allowed].any()
        assert worker.written.max(initial=0) <= 1
