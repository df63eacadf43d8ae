"""The mover without a peer's help: heads between other heads cross in whole blocks, everything else untouched."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from ascend_pd.errors import TransferError
from ascend_pd.layout.description import KVLayout, Part, Region
from ascend_pd.layout.plan import pull_plan
from ascend_pd.wire.messages import WorkerInfo
from connectors.device.cpu import CpuDevice
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.mover import Mover
from connectors.transport.stage_peer import StagedRequest
from tests.fakes.loopback_transport import LoopbackTransport

LAYERS, BLOCKS, TOKENS, HEADS, SIZE = 2, 12, 16, 4, 8
SOURCE_IDS, SINK_IDS = [3, 4, 5, 6, 9, 8], [1, 11, 2, 10, 3, 9]


class Rank:
    """A worker's cache as `[layers, K or V, blocks, tokens, heads, size]`: vllm-ascend's order."""

    def __init__(self, device: CpuDevice, tp_size: int, tp_rank: int) -> None:
        heads = HEADS // tp_size
        shape = (LAYERS, 2, BLOCKS, TOKENS, heads, SIZE)
        buffer = device.allocate(int(np.prod(shape)))
        start = buffer.range.address - buffer.owner.ctypes.data
        self.cache = buffer.owner[start : start + buffer.range.length].reshape(shape)
        stride = BLOCKS * TOKENS * heads * SIZE
        regions = tuple(
            Region(
                layer=layer,
                part=part,
                base=buffer.range.address + (2 * layer + index) * stride,
                block_stride=TOKENS * heads * SIZE,
                head_stride=SIZE,
                token_stride=heads * SIZE,
                token_bytes=SIZE,
            )
            for layer in range(LAYERS)
            for index, part in enumerate((Part.K, Part.V))
        )
        self.layout = KVLayout(
            regions=regions,
            dtype="int8",
            num_blocks=BLOCKS,
            block_size=TOKENS,
            tp_rank=tp_rank,
            tp_size=tp_size,
            num_kv_heads=HEADS,
            heads=tuple(range(tp_rank * heads, (tp_rank + 1) * heads)),
        )


class Bench:
    """P of TP 4 and D of TP 1 in one process."""

    def __init__(self) -> None:
        self.device, self.transport = CpuDevice(), LoopbackTransport()
        self.client = SideChannelClient(b"", "test")
        self.prefill = [Rank(self.device, 4, rank) for rank in range(4)]
        self.decode = Rank(self.device, 1, 0)
        for rank in self.prefill:
            rank.cache[:] = np.random.default_rng(rank.layout.tp_rank).integers(1, 255, rank.cache.shape)
        self.plan = pull_plan([rank.layout for rank in self.prefill], self.decode.layout)

    def mover(self, *, push: bool, staging_bytes: int = 1 << 20) -> Mover:
        layout = self.prefill[0].layout if push else self.decode.layout
        return Mover(
            self.device, self.transport, self.client, "me", layout, push=push, staging_bytes=staging_bytes
        )

    def move(self, mover: Mover, first: int = 0, end: int = 6 * TOKENS) -> int:
        moved = 0
        for worker, pair in self.plan.pairs().items():
            info = WorkerInfo(
                tp_rank=worker, pp_rank=0, transport="loopback", session="", layout=self.prefill[worker].layout
            )
            request = StagedRequest(pair, 0, [SOURCE_IDS], [SINK_IDS])
            moved += mover.move(info, request, (first, end), time.monotonic() + 10)
        return moved

    def expected(self, first_block: int = 0) -> np.ndarray:
        whole = np.zeros_like(self.decode.cache)
        for source, sink in list(zip(SOURCE_IDS, SINK_IDS, strict=True))[first_block:]:
            for rank in self.prefill:
                whole[:, :, sink, :, rank.layout.tp_rank] = rank.cache[:, :, source, :, 0]
        return whole


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.client.close()


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("staging_bytes", [0, 1 << 20], ids=["unstaged", "staged"])
def test_all_heads_arrive_whether_or_not_there_is_staging_memory(
    bench: Bench, push: bool, staging_bytes: int
) -> None:
    mover = bench.mover(push=push, staging_bytes=staging_bytes)
    assert bench.move(mover) == bench.expected().astype(bool).sum()
    assert np.array_equal(bench.decode.cache, bench.expected())
    mover.close()


def test_what_the_sink_has_is_left_alone(bench: Bench) -> None:
    mover = bench.mover(push=False)
    bench.move(mover, first=2 * TOKENS)
    assert np.array_equal(bench.decode.cache, bench.expected(first_block=2))
    mover.close()


def test_a_pull_reads_blocks_where_it_would_have_read_tokens(bench: Bench) -> None:
    mover = bench.mover(push=False)
    bench.move(mover)
    runs = 3 - 1  # [3..6] and [8, 9]
    assert sum(bench.transport.moves) == 4 * LAYERS * 2 * runs
    mover.close()


def test_a_failed_read_says_whether_bytes_may_still_land_and_the_next_one_works(bench: Bench) -> None:
    mover = bench.mover(push=False, staging_bytes=128 << 10)
    for quiesced in (True, False, True):
        bench.transport.on_move = lambda q=quiesced: (_ for _ in ()).throw(TransferError("no", quiesced=q))
        with pytest.raises(TransferError) as failed:
            bench.move(mover)
        assert failed.value.quiesced is quiesced
    bench.transport.on_move = lambda: None
    bench.transport.rotate()
    mover.fenced()
    bench.move(mover)
    assert np.array_equal(bench.decode.cache, bench.expected())
    mover.close()


def test_batches_are_never_numbered_twice_however_often_a_peer_is_met_anew(bench: Bench) -> None:
    """A lease outlives this end's memory of it: a number used before would be taken for a repeat."""
    mover = bench.mover(push=True)
    worker = WorkerInfo(
        tp_rank=0,
        pp_rank=0,
        transport="loopback",
        session="",
        service_host="127.0.0.1",
        service_port=1,
        service_life="one",
        stages=True,
        layout=bench.decode.layout,
    )
    first = mover._stage(worker)
    assert first is not None
    numbers = [next(first._sequence) for _ in range(3)]
    mover._peers.clear()
    again = mover._stage(worker)
    assert again is not None and again is not first
    assert next(again._sequence) not in numbers
    mover.close()
