"""The pull connector's two ends against each other over real Mooncake TCP, in two processes, with checked bytes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.params import PullHandoff
from connectors.peers import PeerDirectory
from connectors.pull.metadata import PullLoad
from connectors.pull.reader import LoadResults, Reader
from connectors.sidechannel.client import SideChannelClient
from tests.engine.kv_fixture import BLOCK_SIZE, FINGERPRINT, Cache, make_cache, make_content, settings
from tests.engine.pull_source import SEED, StartSource

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]


class Sink:
    """D's reader in this process."""

    def __init__(self, *, faults: str = "", recompute: bool = False, **config: Any) -> None:
        own = settings("decode", faults=faults, recompute=recompute, **config)
        self.cache: Cache = make_cache(None, own.faults)
        self.client = SideChannelClient(b"", "decode", faults=own.faults)
        peers = PeerDirectory(self.client, FINGERPRINT, self.cache.layout, self.cache.transport.name, push=False)
        self.reader = Reader(
            own,
            self.cache.device,
            self.cache.transport,
            peers,
            self.client,
            layout=self.cache.layout,
            single_group=True,
        )

    def load(self, handoff: PullHandoff, block_ids: list[int], **fields: Any) -> None:
        base: dict[str, Any] = {"request_id": f"r-{handoff.transfer_id}", "num_cached_tokens": 0}
        sink = EngineRef("decode", "d-epoch")
        self.reader.start(PullLoad(handoff=handoff, sink=sink, block_ids=(tuple(block_ids),), **(base | fields)))

    def results(self, count: int = 1, timeout_s: float = 90.0) -> LoadResults:
        """Everything that was reported until `count` loads have ended."""
        found = LoadResults()
        deadline = time.monotonic() + timeout_s
        while len(found.finished) < count:
            assert time.monotonic() < deadline, "a load never ended"
            step = self.reader.take_results()
            assert not found.finished & step.finished, "a load was reported twice"
            found.finished |= step.finished
            found.failed |= step.failed
            found.invalid_block_ids |= step.invalid_block_ids
            found.reports += step.reports
            time.sleep(0.005)
        return found

    def close(self) -> None:
        self.cache.transport.close()
        self.reader.close()
        self.client.close()


@pytest.fixture
def sink() -> Iterator[Sink]:
    opened = Sink()
    yield opened
    opened.close()


def blocks_of(cache: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    return cache[:, block_ids]


def expected(block_ids: list[int]) -> torch.Tensor:
    return blocks_of(make_content(SEED), block_ids)


def prompt_of(length: int) -> list[int]:
    return list(range(1, length + 1))


def test_every_block_arrives_whatever_the_prompts_length_and_the_blocks_order(
    sink: Sink, start_source: StartSource
) -> None:
    lengths = [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 3]
    theirs, ours = [19, 18, 17, 3, 5, 11], [2, 9, 8, 7, 23, 1]
    source = start_source(
        [(f"t{length}", prompt_of(length), theirs[: -(-length // BLOCK_SIZE)]) for length in lengths]
    )
    try:
        for length, handoff in zip(lengths, source.handoffs, strict=True):
            count = -(-length // BLOCK_SIZE)
            sink.cache.tensor.zero_()
            sink.load(handoff, ours[:count])
            results = sink.results()
            assert results.reports[0].ok, results.reports[0].reason
            assert source.released() == f"t{length}"
            assert torch.equal(blocks_of(sink.cache.tensor, ours[:count]), expected(theirs[:count]))
            untouched = [block for block in range(24) if block not in ours[:count]]
            assert not blocks_of(sink.cache.tensor, untouched).any()
    finally:
        source.close()


def test_decodes_prefix_hit_is_neither_read_nor_overwritten(sink: Sink, start_source: StartSource) -> None:
    theirs, ours = [4, 5, 6], [10, 11, 12]
    source = start_source([("t", prompt_of(3 * BLOCK_SIZE), theirs)])
    try:
        sink.load(source.handoffs[0], ours, num_cached_tokens=BLOCK_SIZE)
        results = sink.results()
    finally:
        source.close()
    assert results.reports[0].ok
    assert not sink.cache.tensor[:, 10].any()
    assert torch.equal(blocks_of(sink.cache.tensor, ours[1:]), expected(theirs[1:]))
    assert results.reports[0].bytes_moved == 2 * sink.cache.tensor[:, 0].nbytes


def test_several_loads_at_once_stay_apart(sink: Sink, start_source: StartSource) -> None:
    holds = [(f"t{i}", prompt_of(2 * BLOCK_SIZE), [2 * i, 2 * i + 1]) for i in range(8)]
    source = start_source(holds)
    try:
        for i, handoff in enumerate(source.handoffs):
            sink.load(handoff, [23 - 2 * i, 22 - 2 * i])
        results = sink.results(count=8)
        assert all(report.ok for report in results.reports)
        assert {source.released() for _ in holds} == {f"t{i}" for i in range(8)}
    finally:
        source.close()
    for i in range(8):
        ours = blocks_of(sink.cache.tensor, [23 - 2 * i, 22 - 2 * i])
        assert torch.equal(ours, expected([2 * i, 2 * i + 1]))


def test_another_prompt_is_refused_and_the_hold_let_go(sink: Sink, start_source: StartSource) -> None:
    source = start_source([("t", prompt_of(40), [1, 2])])
    try:
        sink.load(source.handoffs[0], [1, 2], refusal="the prompt differs")
        results = sink.results()
        assert source.released() == "t"
    finally:
        source.close()
    assert results.reports[0].reason == "the prompt differs"
    assert results.invalid_block_ids == {1, 2}


def test_another_model_is_refused_with_field_and_both_values(sink: Sink, start_source: StartSource) -> None:
    source = start_source([("t", prompt_of(40), [1, 2])], fingerprint={"kv_cache_dtype": "bfloat16"})
    try:
        sink.load(source.handoffs[0], [1, 2])
        [report] = sink.results().reports
    finally:
        source.close()
    assert not report.ok
    assert "kv_cache_dtype: prefill has 'bfloat16', decode has 'float32'" in report.reason


def test_prefill_killed_before_the_read_fails_the_load_with_a_reason(
    sink: Sink, start_source: StartSource
) -> None:
    source = start_source([("a", prompt_of(40), [1, 2]), ("b", prompt_of(40), [3, 4])])
    sink.load(source.handoffs[0], [1, 2])
    assert sink.results().reports[0].ok
    source.kill()
    sink.load(source.handoffs[1], [3, 4])
    results = sink.results()
    source.close()
    assert not results.reports[0].ok
    assert "prefill" in results.reports[0].reason
    assert results.invalid_block_ids == {3, 4}


def test_prefill_restarted_under_the_same_name_is_another_engine(sink: Sink, start_source: StartSource) -> None:
    first = start_source([("a", prompt_of(40), [1, 2]), ("b", prompt_of(40), [3, 4])])
    port = first.handoffs[0].remote_port
    sink.load(first.handoffs[0], [1, 2])
    assert sink.results().reports[0].ok
    first.kill()
    second = start_source([("c", prompt_of(40), [5, 6])], port=port)
    try:
        sink.load(first.handoffs[1], [3, 4])
        [stale] = sink.results().reports
        sink.load(second.handoffs[0], [7, 8])
        [fresh] = sink.results().reports
    finally:
        second.close()
        first.close()
    assert not stale.ok
    assert fresh.ok, fresh.reason
    assert torch.equal(blocks_of(sink.cache.tensor, [7, 8]), expected([5, 6]))


def test_bytes_read_after_the_lease_are_thrown_away(sink: Sink, start_source: StartSource) -> None:
    late = Sink(faults="stall:1.0")
    source = start_source([("t", prompt_of(40), [1, 2])], faults="lease:0.2")
    try:
        late.load(source.handoffs[0], [1, 2])
        results = late.results()
        assert source.released() == "t"
    finally:
        source.close()
        late.close()
    assert not results.reports[0].ok
    assert "lease expired" in results.reports[0].reason


def test_lost_done_and_lost_answers_only_delay(sink: Sink, start_source: StartSource) -> None:
    lossy = Sink(faults="drop:done:2")
    source = start_source([("t", prompt_of(40), [1, 2])], faults="drop:answer:2")
    try:
        lossy.load(source.handoffs[0], [1, 2])
        assert lossy.results().reports[0].ok
        assert source.released() == "t"
    finally:
        source.close()
        lossy.close()


def test_an_errored_read_is_fenced_before_it_is_reported(sink: Sink, start_source: StartSource) -> None:
    failing = Sink(faults="fail-transfer:1")
    before = failing.cache.transport.session
    source = start_source([("t", prompt_of(40), [1, 2]), ("u", prompt_of(40), [3, 4])])
    try:
        failing.load(source.handoffs[0], [1, 2])
        [failed] = failing.results().reports
        assert failing.cache.transport.session != before, "the endpoint was not replaced"
        failing.load(source.handoffs[1], [3, 4])
        [healthy] = failing.results().reports
    finally:
        source.close()
        failing.close()
    assert not failed.ok
    assert healthy.ok, healthy.reason


def test_a_cancelled_load_ends_once_and_names_no_block(sink: Sink, start_source: StartSource) -> None:
    slow = Sink(faults="stall:0.5")
    source = start_source([("t", prompt_of(40), [1, 2])])
    try:
        slow.load(source.handoffs[0], [1, 2])
        time.sleep(0.1)
        slow.reader.cancel("r-t")
        results = slow.results()
        assert source.released() == "t"
    finally:
        source.close()
        slow.close()
    assert results.finished == {"r-t"}
    assert not results.invalid_block_ids


def test_a_stopped_prefill_is_answered_by_the_deadline_and_the_blocks_are_fenced(
    start_source: StartSource,
) -> None:
    sink = Sink(transfer_seconds=4.0)
    source = start_source([("a", prompt_of(40), [1, 2]), ("b", prompt_of(40), [3, 4])])
    try:
        sink.load(source.handoffs[0], [1, 2])
        assert sink.results().reports[0].ok
        source.process.send_signal(signal.SIGSTOP)
        sink.load(source.handoffs[1], [3, 4])
        results = sink.results()
        assert not results.reports[0].ok
        assert results.invalid_block_ids == {3, 4}
        sink.cache.tensor[:, [3, 4]] = 5.0
        source.process.send_signal(signal.SIGCONT)
        time.sleep(1.0)
    finally:
        source.close()
        sink.close()
    assert bool((sink.cache.tensor[:, [3, 4]] == 5.0).all()), "bytes landed after the fence"
