"""Planning a long transfer: the planner against a per-block Python loop that yields the same copies.

131,072 tokens x 94 layers, prefill TP 8, decode TP 2, 4 KV heads of 128 (bfloat16), blocks of 128 tokens whose ids
come from a used pool. Run: `python scripts/bench_plan.py`.
"""

from __future__ import annotations

import argparse
import gc
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from ascend_pd.layout.description import KVLayout, Part, Region
from ascend_pd.layout.geometry import heads_of_rank
from ascend_pd.layout.plan import PairPlan, TransferPlan, pull_plan, push_plan
from ascend_pd.layout.staging import Efficiency, Split, Staging, read, split

HEADS, HEAD_SIZE, ELEMENT_BYTES, BLOCK_TOKENS = 4, 128, 2, 128
Copies = tuple[list[int], list[int], list[int]]


def layout(kind: str, tp_size: int, tp_rank: int, layers: int, blocks: int) -> KVLayout:
    """One rank's cache: K and V joined or apart, heads before tokens, or apart with tokens before heads as
    vllm-ascend has it; layers one after another."""
    heads = heads_of_rank(HEADS, tp_size, tp_rank)
    at = (tp_rank + 1) << 44
    regions = []
    for layer in range(layers):
        parts = (Part.KV,) if kind == "joined" else (Part.K, Part.V)
        for part in parts:
            token = HEAD_SIZE * ELEMENT_BYTES * (2 if part is Part.KV else 1)
            block = token * BLOCK_TOKENS * len(heads)
            strides = (token, token * len(heads)) if kind == "tokens" else (token * BLOCK_TOKENS, token)
            regions.append(Region(layer, part, at, block, *strides, token))
            at += block * blocks
    return KVLayout(
        regions=tuple(regions),
        dtype="bfloat16",
        num_blocks=blocks,
        block_size=BLOCK_TOKENS,
        tp_rank=tp_rank,
        tp_size=tp_size,
        num_kv_heads=HEADS,
        heads=heads,
    )


def used_pool(needed: int, blocks: int, seed: int) -> list[int]:
    """Block ids as a pool hands them out after a while: runs up, runs down, single blocks."""
    dice = random.Random(seed)
    free = list(range(1, blocks))
    ids: list[int] = []
    while len(ids) < needed:
        at = dice.randrange(len(free))
        run = free[at : at + dice.choice((1, 2, 4, 8, 16))]
        del free[at : at + len(run)]
        ids += reversed(run) if dice.random() < 0.5 else run
    return ids[:needed]


def per_block_loop(source: KVLayout, sink: KVLayout, source_ids: list[int], sink_ids: list[int]) -> Copies:
    """The same copies, one region and block after another in plain Python, without merging."""
    sources: list[int] = []
    sinks: list[int] = []
    lengths: list[int] = []
    for ours, theirs in zip(source.regions, sink.regions, strict=True):
        for head in source.heads:
            from_head = ours.base + source.heads.index(head) * ours.head_stride
            to_head = theirs.base + sink.heads.index(head) * theirs.head_stride
            for source_id, sink_id in zip(source_ids, sink_ids, strict=True):
                sources.append(from_head + source_id * ours.block_stride)
                sinks.append(to_head + sink_id * theirs.block_stride)
                lengths.append(ours.token_bytes * BLOCK_TOKENS)
    return sources, sinks, lengths


@dataclass(frozen=True)
class Timing:
    """Median milliseconds. On a box shared with others the processor's time is the fairer figure."""

    wall: float
    processor: float

    def __str__(self) -> str:
        return (
            f"{self.wall:.2f} / {self.processor:.2f}"
            if self.wall < 20
            else f"{self.wall:.0f} / {self.processor:.0f}"
        )


def timed(run: Callable[[], object], repeats: int) -> Timing:
    """Both medians, the garbage collected before each run."""
    wall, processor = [], []
    for _ in range(repeats):
        gc.collect()
        start = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return Timing(statistics.median(wall) * 1e3, statistics.median(processor) * 1e3)


def times(slow: Timing, fast: Timing) -> str:
    """How many times faster, by both clocks."""
    return f"{slow.wall / fast.wall:.0f} / {slow.processor / fast.processor:.0f}"


def same_bytes(plan: TransferPlan, copies: list[Copies], source_ids: list[int], sink_ids: list[int]) -> bool:
    """Whether planner and loop move the same (source, sink) bytes, compared per block-sized step."""
    step = min(min(lengths) for _, _, lengths in copies)
    ours: set[tuple[int, int]] = set()
    for pieces in plan.pieces([source_ids], [sink_ids], 0, len(source_ids) * BLOCK_TOKENS).values():
        for source, sink, length in zip(pieces.source, pieces.sink, pieces.length, strict=True):
            ours |= {(int(source) + at, int(sink) + at) for at in range(0, int(length), step)}
    theirs = {(s, d) for sources, sinks, _ in copies for s, d in zip(sources, sinks, strict=True)}
    return ours == theirs


def row(name: str, kind: str, mode: str, tokens: int, layers: int, pool: str, repeats: int) -> str:
    needed = tokens // BLOCK_TOKENS
    blocks = needed * 2
    prefill = [layout(kind, 8, rank, layers, blocks) for rank in range(8)]
    decode = [layout(kind, 2, rank, layers, blocks) for rank in range(2)]
    source_ids = list(range(1, needed + 1)) if pool == "fresh" else used_pool(needed, blocks, 1)
    sink_ids = list(range(1, needed + 1)) if pool == "fresh" else used_pool(needed, blocks, 2)
    start = time.perf_counter()
    plan = pull_plan(prefill, decode[0]) if mode == "pull" else push_plan(prefill[0], decode)
    resolve = time.perf_counter() - start
    pairs = [(prefill[peer], decode[0]) if mode == "pull" else (prefill[0], decode[peer]) for peer in plan.peers()]

    def vectorised() -> object:
        return plan.pieces([source_ids], [sink_ids], 0, tokens)

    def looped() -> list[Copies]:
        return [per_block_loop(*pair, source_ids, sink_ids) for pair in pairs]

    assert same_bytes(plan, looped(), source_ids, sink_ids), "the two plans differ"
    pieces = sum(len(part) for part in plan.pieces([source_ids], [sink_ids], 0, tokens).values())
    copies = sum(len(part[0]) for part in looped())
    fast, slow = timed(vectorised, repeats), timed(looped, max(3, repeats // 5))
    cells = f"{copies:,} | {pieces:,} | {resolve * 1e3:.1f} | {fast} | {slow} | {times(slow, fast)}"
    return f"| {name} | {cells} |"


def staged_row(name: str, tokens: int, layers: int, repeats: int) -> str:
    """A pull whose copies per token are replaced by reads of whole blocks into slots and tiles out of them. The
    loop makes one copy per block and region, and leaves D to reorder each block afterwards."""
    needed = tokens // BLOCK_TOKENS
    blocks = needed * 2
    prefill = [layout("tokens", 8, rank, layers, blocks) for rank in range(8)]
    decode = [layout("tokens", 2, rank, layers, blocks) for rank in range(2)]
    source_ids, sink_ids = used_pool(needed, blocks, 1), used_pool(needed, blocks, 2)
    start = time.perf_counter()
    plan = pull_plan(prefill, decode[0])
    resolve = time.perf_counter() - start
    lists = [np.array(source_ids)], [np.array(sink_ids)]
    efficiency = Efficiency(piece_bytes=128 << 10, slot_bytes=16 << 20)
    moved = {"copies": 0, "pieces": 0}

    def divided() -> list[tuple[PairPlan, Split]]:
        sink = {"staging": Staging.SINK, "efficiency": efficiency}
        return [(pair, split(pair, *lists, 0, tokens, **sink)) for pair in plan.pairs().values()]

    def planned() -> None:
        moved.update(copies=0, pieces=0)
        for pair, parts in divided():
            moved["pieces"] += len(parts.direct)
            for cells in parts.staged:
                wire, tiles = read(pair, cells, *lists, 0)
                moved["pieces"] += len(wire)
                moved["copies"] += sum(len(tile) * tile.count for tile in tiles)

    def looped() -> list[Copies]:
        return [per_block_loop(prefill[peer], decode[0], source_ids, sink_ids) for peer in plan.peers()]

    first, fast, slow = timed(divided, repeats), timed(planned, repeats), timed(looped, max(3, repeats // 5))
    fixed = f"{moved['copies']:,} | {moved['pieces']:,} | {resolve * 1e3:.1f}"
    return (
        f"| {name}: before the first slot | {fixed} | {first} | {slow} | {times(slow, first)} |\n"
        f"| the same, all slots, while the wire is busy | {fixed} | {fast} | {slow} | {times(slow, fast)} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--repeats", type=int, default=25)
    given = parser.parse_args()
    print(f"{given.tokens:,} tokens x {given.layers} layers, TP 8 -> 2; Python {platform.python_version()},")
    print(f"numpy {np.__version__}, {platform.machine()}; wall / processor time\n")
    print("| one rank plans | copies | pieces | resolve once, ms | plan, ms | per-block loop, ms | times |")
    print("|---|---|---|---|---|---|---|")
    for name, kind, mode, pool in (
        ("decode rank pulls, K‖V joined, used pool", "joined", "pull", "used"),
        ("decode rank pulls, K and V apart, used pool", "apart", "pull", "used"),
        ("decode rank pulls, K‖V joined, fresh pool", "joined", "pull", "fresh"),
        ("prefill rank pushes, K‖V joined, used pool", "joined", "push", "used"),
        ("prefill rank pushes, K and V apart, used pool", "apart", "push", "used"),
    ):
        print(row(name, kind, mode, given.tokens, given.layers, pool, given.repeats), flush=True)
    name = "decode rank pulls, tokens before heads, staged"
    print(staged_row(name, given.tokens, given.layers, given.repeats), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
