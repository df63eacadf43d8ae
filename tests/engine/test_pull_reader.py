"""D's reader against all of P's workers: real Mooncake TCP, the side channel and staging, in two processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ascend_pd.wire.connector_config import ConnectorConfig
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.params import PullHandoff
from connectors.peers import PeerDirectory
from connectors.pull.metadata import PullLoad
from connectors.pull.reader import LoadResults, Reader
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from tests.engine.prefill_workers import ENGINE, FINGERPRINT, PrefillWorkers
from tests.engine.staged_peer import BLOCK_SIZE, KV_HEADS, LAYERS, SECRET, SLAB, StagedWorker, pattern

pytestmark = pytest.mark.engine
STAGING = 128 << 10
SOURCE_IDS = (19, 18, 17, 3, 5, 4, 0, 23, 22, 21)
SINK_IDS = (5, 4, 3, 2, 1, 0, 23, 7, 9, 8)
TP = 2


class Decode:
    """Rank 0 of D: four of the eight heads, so it reads from four of P's ranks."""

    def __init__(self, staging_bytes: int, transfer_seconds: float) -> None:
        self.prefill = PrefillWorkers(staging_bytes)
        self.worker = StagedWorker(TP, 0)
        self.client = SideChannelClient(SECRET, "decode-0")
        settings = ConnectorSettings(
            config=ConnectorConfig(
                staging_bytes=staging_bytes, transfer_seconds=transfer_seconds, quarantine_seconds=0.5
            ),
            engine_id="decode-0",
            side_port=0,
            is_producer=False,
            is_consumer=True,
            recompute=False,
            tp_size=TP,
            pp_size=1,
            block_size=BLOCK_SIZE,
            secret=SECRET,
        )
        peers = PeerDirectory(self.client, FINGERPRINT, self.worker.layout, self.worker.transport.name, push=False)
        self.reader = Reader(
            settings,
            self.worker.device,
            self.worker.transport,
            peers,
            self.client,
            layout=self.worker.layout,
            single_group=True,
        )

    def load(self, name: str, source_ids: tuple[int, ...] = SOURCE_IDS) -> None:
        handoff = PullHandoff(
            transfer_id=f"t-{name}",
            remote_engine_id=ENGINE.engine_id,
            remote_epoch=ENGINE.epoch,
            remote_host="127.0.0.1",
            remote_port=self.prefill.port,
            remote_block_ids=[list(source_ids)],
            remote_block_size=BLOCK_SIZE,
            remote_tp_size=KV_HEADS,
            num_prompt_tokens=len(SOURCE_IDS) * BLOCK_SIZE,
            prompt_hash="",
            lease_seconds=30.0,
        )
        self.reader.start(
            PullLoad(
                request_id=name,
                handoff=handoff,
                sink=EngineRef("decode-0", "life"),
                block_ids=(SINK_IDS,),
                num_cached_tokens=0,
            )
        )

    def results(self) -> LoadResults:
        """What vLLM is told, collected until one request has finished."""
        seen = LoadResults()
        deadline = time.monotonic() + 60
        while not seen.finished:
            assert time.monotonic() < deadline, "the load never ended"
            new = self.reader.take_results()
            seen.finished |= new.finished
            seen.invalid_block_ids |= new.invalid_block_ids
            seen.reports += new.reports
            time.sleep(0.005)
        return seen

    def expected(self) -> np.ndarray:
        cache = np.zeros_like(self.worker.cache)
        for head in range(KV_HEADS // TP):
            source = pattern(KV_HEADS, 100 + head)
            for from_block, to_block in zip(SOURCE_IDS, SINK_IDS, strict=True):
                cache[:, to_block, head] = source[:, from_block, 0]
        return cache

    def close(self) -> None:
        self.worker.transport.close()
        self.reader.close()
        self.client.close()
        self.worker.close()
        self.prefill.stop()


@pytest.fixture(params=[STAGING, 0], ids=["staged", "unstaged"])
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    decode = Decode(request.param, transfer_seconds=20)
    yield decode
    decode.close()


def test_every_head_of_every_rank_arrives_and_is_vouched_for(decode: Decode) -> None:
    for name in ("first", "second"):
        decode.worker.cache[:] = 0
        decode.load(name)
        results = decode.results()
        assert results.finished == {name} and not results.invalid_block_ids
        assert results.reports[0].ok
        assert results.reports[0].bytes_moved == LAYERS * len(SOURCE_IDS) * SLAB * KV_HEADS // TP
        assert np.array_equal(decode.worker.cache, decode.expected())


def test_blocks_that_p_does_not_have_fail_the_load_before_anything_is_read(decode: Decode) -> None:
    decode.load("wrong", (*SOURCE_IDS[:-1], 999))
    results = decode.results()
    assert results.invalid_block_ids == set(SINK_IDS)
    assert "block id" in results.reports[0].reason
    assert not decode.worker.cache.any()


@pytest.mark.parametrize("staging", [STAGING, 0], ids=["staged", "unstaged"])
def test_a_p_that_stops_fails_the_load_and_the_fence_makes_the_next_one_possible(staging: int) -> None:
    decode = Decode(staging, transfer_seconds=3)
    try:
        decode.load("before")
        assert decode.results().reports[0].ok
        former = decode.worker.transport.session
        os.kill(decode.prefill.process.pid, signal.SIGSTOP)
        decode.load("stopped")
        results = decode.results()
        assert not results.reports[0].ok
        assert results.invalid_block_ids == set(SINK_IDS)
        os.kill(decode.prefill.process.pid, signal.SIGCONT)
        decode.worker.cache[:] = 0
        decode.load("after")
        assert decode.results().reports[0].ok
        assert np.array_equal(decode.worker.cache, decode.expected())
        if staging == 0:
            assert decode.worker.transport.session != former
    finally:
        decode.close()
