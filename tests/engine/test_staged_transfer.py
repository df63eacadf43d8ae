"""Small pieces between two processes over real Mooncake TCP: gathered there, sent large, scattered here."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from ascend_pd.errors import TransferError
from ascend_pd.layout.plan import pair
from ascend_pd.layout.staging import Cells
from ascend_pd.wire.messages import Answer, Stage, StageOpen, StageReady, Verdict, WorkerInfo
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.mover import Mover
from connectors.transport.stage_peer import StagedRequest
from tests.engine.staged_peer import BLOCK_SIZE, BLOCKS, LAYERS, SECRET, SLAB, StagedPeer, StagedWorker, pattern

pytestmark = pytest.mark.engine
STAGING = 128 << 10
"""Two slots of 64 KiB: a request of 20 blocks, 4 layers and 1 KiB pieces takes two batches."""
SOURCE_IDS = ([19, 18, 17, 3, 5, 4, 0, 23, 22, 21, 1, 2, 9, 8, 7, 6, 10, 11, 12, 13],)
SINK_IDS = ([5, 4, 3, 2, 1, 0, 23, 7, 9, 8, 10, 20, 21, 22, 19, 18, 17, 16, 15, 14],)
TOKENS = 20 * BLOCK_SIZE


def soon() -> float:
    return time.monotonic() + 20


class Pair:
    """P with TP 8 and D with TP 2, rank 0 of each; the active one in this process."""

    def __init__(self, *, push: bool, staging: tuple[int, int] = (STAGING, STAGING)) -> None:
        self.push = push
        here, there = (8, 2) if push else (2, 8)
        self.peer = StagedPeer(there, seed=5, staging_bytes=staging[1])
        self.worker = StagedWorker(here, staging[0])
        self.worker.cache[:] = pattern(8, 6) if push else 0
        self.client = SideChannelClient(SECRET, "test")
        self.mover = Mover(
            self.worker.device,
            self.worker.transport,
            self.client,
            "this test",
            self.worker.layout,
            push=push,
            staging_bytes=staging[0],
        )

    @property
    def request(self) -> StagedRequest:
        layouts = (self.worker.layout, self.peer.info.layout)
        source, sink = layouts if self.push else layouts[::-1]
        return StagedRequest(pair(source, sink, (0,)), 0, SOURCE_IDS, SINK_IDS)

    def move(self, first: int = 0, deadline: float | None = None) -> int:
        tokens = (first, TOKENS)
        return self.mover.move(self.peer.info, self.request, tokens, deadline or soon())

    def close(self) -> None:
        self.mover.close()
        self.client.close()
        self.worker.close()
        self.peer.stop()


@pytest.fixture(params=[False, True], ids=["pull", "push"])
def direction(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def both(direction: bool) -> Iterator[Pair]:
    both = Pair(push=direction)
    yield both
    both.close()


def moved(both: Pair, first_block: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The sink's cache, and what it should be."""
    if both.push:
        source, sink, before = pattern(8, 6), both.peer.cache(2), pattern(2, 5)
    else:
        source, sink, before = pattern(8, 5), both.worker.cache.copy(), np.zeros_like(both.worker.cache)
    expected = before.copy()
    for from_block, to_block in list(zip(SOURCE_IDS[0], SINK_IDS[0], strict=True))[first_block:]:
        expected[:, to_block, 0] = source[:, from_block, 0]
    return sink, expected


def test_every_head_of_every_block_arrives_and_nothing_else_changes(both: Pair) -> None:
    assert both.move() == LAYERS * 20 * SLAB
    assert np.array_equal(*moved(both))


def test_what_the_sink_already_has_is_left_alone(both: Pair) -> None:
    both.move(first=7 * BLOCK_SIZE)
    assert np.array_equal(*moved(both, first_block=7))


def test_few_large_copies_cross_the_wire(both: Pair) -> None:
    sent = copies_of(both)
    both.move()
    assert sum(sent) <= 4, f"{LAYERS * 20} pieces travelled as {sent}"


def test_a_pull_from_a_peer_that_stages_nothing_reads_whole_runs_of_its_blocks() -> None:
    both = Pair(push=False, staging=(STAGING, 0))
    try:
        sent = copies_of(both)
        both.move()
        assert np.array_equal(*moved(both))
        assert sum(sent) <= LAYERS * 3, f"{LAYERS * 20} pieces travelled as {sent}"
    finally:
        both.close()


def copies_of(both: Pair) -> list[int]:
    """Filled with the number of copies of each call of the transport."""
    sent: list[int] = []
    name = "write" if both.push else "read"
    original = getattr(both.worker.transport, name)

    def counted(peer: str, pieces: object, deadline: float, via: str = "") -> None:
        sent.append(len(pieces))
        original(peer, pieces, deadline, via)

    setattr(both.worker.transport, name, counted)
    return sent


def test_transfers_follow_each_other_in_the_same_slots(both: Pair) -> None:
    for _ in range(5):
        both.move()
    assert np.array_equal(*moved(both))


@pytest.mark.parametrize("staging", [(0, STAGING), (STAGING, 0)], ids=["active", "passive"])
def test_without_staging_memory_on_one_end_everything_arrives_all_the_same(
    direction: bool, staging: tuple[int, int]
) -> None:
    both = Pair(push=direction, staging=staging)
    try:
        both.move()
        assert np.array_equal(*moved(both))
    finally:
        both.close()


def test_a_former_life_of_the_peer_is_not_staged_with(both: Pair) -> None:
    opening = StageOpen(life="a former one", caller="a test", layout=both.worker.layout, push=both.push)
    answer = both.client.request(("127.0.0.1", both.peer.info.service_port), opening, 5.0)
    assert isinstance(answer, Answer) and answer.verdict is Verdict.EPOCH


def test_after_the_peers_fence_slots_are_asked_for_anew(both: Pair) -> None:
    both.move()
    former = both.peer.info
    both.peer.ask(do="fence")
    with pytest.raises(TransferError):
        both.move(deadline=time.monotonic() + 5)
    assert both.peer.info == former  # the caller learns the new session by a handshake, as after any failure


def test_after_the_peers_fence_a_handshake_is_all_it_takes(both: Pair) -> None:
    """Also for a caller that had no part in what was fenced: it uses no lease of before."""
    both.move()
    both.peer.info = msgspec.json.decode(both.peer.ask(do="fence")["info"], type=WorkerInfo)
    both.move()
    assert np.array_equal(*moved(both))


def test_a_batch_is_carried_out_once_and_a_late_one_never(both: Pair) -> None:
    """A repeated message changes nothing; one that arrives after its successor could overwrite it."""
    address = ("127.0.0.1", both.peer.info.service_port)
    opening = StageOpen(
        life=both.peer.info.service_life, caller="a test", layout=both.worker.layout, push=both.push
    )
    ready = both.client.request(address, opening, 5.0)
    assert isinstance(ready, StageReady)

    def stage(sequence: int, block: int) -> Verdict:
        message = Stage(
            token=ready.token,
            sequence=sequence,
            slot=0,
            choice=0,
            cells=Cells(strand=0, regions=(0,), units=((0, 1),)),
            block_ids=((block,),),
        )
        answer = both.client.request(address, message, 5.0)
        assert isinstance(answer, Answer)
        return answer.verdict

    assert stage(1, 0) is Verdict.OK
    before = both.peer.cache(2 if both.push else 8)
    assert stage(1, 1) is Verdict.OK
    assert stage(3, 2) is Verdict.OK
    after = both.peer.cache(2 if both.push else 8)
    assert stage(2, 3) is Verdict.GONE
    assert np.array_equal(before[:, 1], after[:, 1])
    assert np.array_equal(both.peer.cache(2 if both.push else 8), after)


def test_blocks_that_do_not_exist_are_refused(both: Pair) -> None:
    address = ("127.0.0.1", both.peer.info.service_port)
    opening = StageOpen(
        life=both.peer.info.service_life, caller="a test", layout=both.worker.layout, push=both.push
    )
    ready = both.client.request(address, opening, 5.0)
    assert isinstance(ready, StageReady)
    message = Stage(
        token=ready.token,
        sequence=1,
        slot=0,
        choice=0,
        cells=Cells(strand=0, regions=(0,), units=((0, 1),)),
        block_ids=((BLOCKS,),),
    )
    answer = both.client.request(address, message, 5.0)
    assert isinstance(answer, Answer) and answer.verdict is Verdict.REFUSED
