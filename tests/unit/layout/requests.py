"""What the property tests draw: pairs of engines and one request between them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests.unit.layout.caches import KINDS, Worker

TP_SIZES = (1, 2, 4, 8, 16)
KV_HEADS = (1, 2, 3, 4, 8)


def content_of(layers: int, heads: int, tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, (layers, heads, tokens, 8), np.uint8)


def by_worker(workers: list[Worker]) -> dict[int, Worker]:
    return {worker.layout.worker: worker for worker in workers}


def shards(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@st.composite
def block_ids(draw: st.DrawFn, needed: int, num_blocks: int) -> list[int]:
    """Ids as a used pool hands them out: a mixture of ascending runs, descending runs and single blocks."""
    free = list(range(1, num_blocks))
    ids: list[int] = []
    while len(ids) < needed:
        at = draw(st.integers(0, len(free) - 1))
        run = free[at : at + draw(st.integers(1, 5))]
        ids += reversed(run) if draw(st.booleans()) else run
        free = [block for block in free if block not in run]
    return ids[:needed]


@st.composite
def transfers(draw: st.DrawFn) -> dict:
    """A supported pair of engines and one request between them."""
    mla = draw(st.booleans())
    kinds = [kind for kind in KINDS if kind.startswith("mla") == mla]
    heads = 1 if mla else draw(st.sampled_from(KV_HEADS))
    fitting = [tp for tp in TP_SIZES if shards(heads, tp)]
    source_tp = draw(st.sampled_from(fitting))
    sink_tp = draw(st.sampled_from([tp for tp in fitting if source_tp % tp == 0]))
    small = draw(st.sampled_from((2, 4)))
    sizes = draw(st.permutations([small, small * draw(st.sampled_from((1, 2, 4)))]))
    kernel_blocks = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2)))
    end = draw(st.integers(1, 24))
    first = draw(st.integers(0, end - 1))
    needed = [-(-end // size) for size in sizes]
    return {
        "source": {
            "kind": draw(st.sampled_from(kinds)),
            "tp_size": source_tp,
            "pp_size": draw(st.sampled_from((1, 2))),
        }
        | {"block_size": sizes[0], "kernel_blocks": kernel_blocks[0], "num_blocks": needed[0] + 5},
        "sink": {"kind": draw(st.sampled_from(kinds)), "tp_size": sink_tp}
        | {"block_size": sizes[1], "kernel_blocks": kernel_blocks[1], "num_blocks": needed[1] + 5},
        "heads": heads,
        "ids": tuple(draw(block_ids(count, count + 5)) for count in needed),
        "tokens": (first, end),
        "salt": draw(st.integers(0, 2**32)),
    }
