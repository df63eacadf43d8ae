"""The planner against plain loops, over all combinations that it must support or refuse."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ascend_pd.errors import PairingError
from ascend_pd.layout.geometry import Reason
from ascend_pd.layout.plan import pull_plan, push_plan
from tests.unit.layout.caches import KINDS, Worker, engine, execute, expect, fill

TP_SIZES = (1, 2, 4, 8, 16)
KV_HEADS = (1, 2, 3, 4, 8)


def content_of(layers: int, heads: int, tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 255, (layers, heads, tokens, 8), np.uint8)


def by_worker(workers: list[Worker]) -> dict[int, Worker]:
    return {worker.layout.worker: worker for worker in workers}


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


def shards(heads: int, tp: int) -> bool:
    return heads % tp == 0 or tp % heads == 0


@pytest.mark.parametrize(("kind", "heads"), list(itertools.product(KINDS, KV_HEADS)))
def test_every_tp_pair_moves_every_head_once_or_is_refused(kind: str, heads: int) -> None:
    heads = 1 if kind.startswith("mla") else heads
    content = content_of(1, heads, 6, heads)
    for source_tp, sink_tp in itertools.product(TP_SIZES, TP_SIZES):
        sources = engine(kind, source_tp, heads, num_layers=1, num_blocks=4)
        sinks = engine(kind, sink_tp, heads, num_layers=1, num_blocks=4)
        ids = [2, 1], [1, 3]
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
        move(sources, sinks, ids, (0, 6), salt=source_tp + 1)
        expect(sinks, ids[1], content, 0, 6)
