"""Received is as sent: both ends add up their own cache, over a real side channel between unequal layouts."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest

from ascend_pd.errors import TransferError
from ascend_pd.wire.messages import Answer, Ask, Checksum, Reply, Request, Story, Verdict, WorkerInfo
from connectors.pull.comparison import Comparison
from connectors.sidechannel.server import SideChannelServer
from connectors.transport.checksum import Verifier
from connectors.transport.stage_peer import StagedRequest
from connectors.transport.worker_service import WorkerService
from tests.unit.test_mover import SINK_IDS, SOURCE_IDS, TOKENS, Bench, Rank

END = 6 * TOKENS - 3


class Pair(Bench):
    """A push by P's rank 0, or a pull by D, already moved, and the other end's worker at its service."""

    def __init__(self, *, push: bool, checksums: bool = True) -> None:
        super().__init__()
        mover = self.mover(push=False)
        self.move(mover, 0, END)
        mover.close()
        self.push = push
        passive: Rank = self.decode if push else self.prefill[0]
        self.service = WorkerService(
            self.device,
            self.transport,
            passive.layout,
            host="127.0.0.1",
            secret=b"",
            staging_bytes=0,
            checksums=checksums,
            idle_s=10.0,
        )
        self.info = WorkerInfo(
            tp_rank=0,
            pp_rank=0,
            transport="loopback",
            session="",
            service_host="127.0.0.1",
            service_port=self.service.port,
            service_life=self.service.life,
            checksums=self.service.checksums,
            layout=passive.layout,
        )
        active = self.prefill[0] if push else self.decode
        self.verifier = Verifier(self.device, self.client, active.layout, push=push)
        self.request = StagedRequest(self.plan.pairs()[0], 0, [SOURCE_IDS], [SINK_IDS])

    def verify(self, first: int = 0, info: WorkerInfo | None = None) -> None:
        self.verifier.verify(info or self.info, self.request, (first, END), time.monotonic() + 5)

    def close(self) -> None:
        self.service.close()
        self.client.close()


@pytest.fixture(params=[False, True], ids=["pull", "push"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    found = Pair(push=request.param)
    yield found
    found.close()


def test_what_arrived_is_what_was_sent(pair: Pair) -> None:
    pair.verify()


def test_one_changed_byte_is_named_by_layer_and_tokens(pair: Pair) -> None:
    pair.decode.cache[1, 0, SINK_IDS[2], 5, 0, 3] ^= 1
    with pytest.raises(TransferError, match=r"layers 0-1 of tokens 0-95 are not received") as found:
        pair.verify()
    assert found.value.quiesced


def test_bytes_that_were_not_moved_are_not_compared(pair: Pair) -> None:
    pair.decode.cache[:, :, SINK_IDS[0]] = 0  # decode's own prefix hit
    pair.decode.cache[:, :, :, :, 1] = 0  # a head of another rank
    pair.verify(first=TOKENS)


def test_a_peer_that_adds_nothing_up_is_refused_with_what_to_do(pair: Pair) -> None:
    with pytest.raises(TransferError, match="set it for both pools"):
        pair.verify(info=msgspec.structs.replace(pair.info, checksums=False))


def test_a_peer_restarted_since_the_handshake_is_no_match(pair: Pair) -> None:
    with pytest.raises(TransferError, match="restarted"):
        pair.verify(info=msgspec.structs.replace(pair.info, service_life="another"))


def test_nonsense_is_refused_and_the_service_lives_on(pair: Pair) -> None:
    good = Checksum(
        question="q",
        life=pair.service.life,
        layout=(pair.prefill[0] if pair.push else pair.decode).layout,
        push=pair.push,
        choice=0,
        cells={"strand": 0, "regions": (0,), "units": ((0, 1),)},
        block_ids=((1,),),
    )
    good = msgspec.convert(msgspec.to_builtins(good), Checksum)
    changed = [
        {"block_ids": ((10_000,),)},
        {"block_ids": ()},
        {"cells": msgspec.structs.replace(good.cells, strand=7)},
        {"cells": msgspec.structs.replace(good.cells, units=((0, 1 << 40),))},
        {"layout": msgspec.structs.replace(good.layout, heads=(2,))},
    ]
    address = "127.0.0.1", pair.service.port
    for change in changed:
        reply = pair.client.request(address, msgspec.structs.replace(good, **change), 5.0)
        assert isinstance(reply, Answer) and reply.verdict is Verdict.REFUSED, (change, reply)
    pair.verify()


def test_off_means_no_port_and_a_refusal() -> None:
    pair = Pair(push=False, checksums=False)
    try:
        assert pair.service.port == 0
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("released", "lease expired", "let go of the blocks.*lease expired"),
        ("held", "", "not received as they were"),
    ],
)
def test_a_difference_after_the_hold_is_over_is_no_corruption(state: str, reason: str, says: str) -> None:
    pair = Pair(push=False)
    pair.decode.cache[0, 0, SINK_IDS[0]] ^= 1
    told: list[Request] = []

    def answer(request: Request) -> Reply:
        told.append(request)
        return Story(known=True, state=state, reason=reason)

    side = SideChannelServer("127.0.0.1", 0, b"", answer, "prefill")
    side.start()
    try:
        comparison = Comparison(pair.verifier, pair.client)
        with pytest.raises(TransferError, match=says):
            comparison.compare(
                ("127.0.0.1", side.port), "t", pair.info, pair.request, (0, END), time.monotonic() + 5
            )
        assert told == [Ask(transfer_id="t")]
    finally:
        side.close()
        pair.close()


def test_a_verification_that_is_given_up_is_no_error(pair: Pair) -> None:
    pair.decode.cache[0, 0, SINK_IDS[0]] ^= 1
    pair.verifier.verify(pair.info, pair.request, (0, END), time.monotonic() + 5, given_up=lambda: True)
