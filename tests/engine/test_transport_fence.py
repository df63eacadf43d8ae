"""The fence: a process stopped in the middle of a transfer that goes on later must find nothing to write to.

Each guarantee stands beside the same situation without a fence, where the bytes do land: otherwise these tests
would also pass if nothing had been on its way.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ascend_pd.errors import TransferError
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.transport import create
from connectors.transport.base import MemoryRange, Transport
from tests.engine.transport_peer import Peer, pieces

pytestmark = pytest.mark.engine
SIZE = 8 << 20
PIECE = 1024
EVERYTHING = np.arange(0, SIZE, PIECE)
SETTLE_S = 0.5
CONFIG = {"transport": "mooncake", "protocol": "tcp"}
StartPeer = Callable[[int], Peer]


@pytest.fixture
def peers() -> Iterator[StartPeer]:
    started: list[Peer] = []

    def start(value: int) -> Peer:
        peer = Peer(CONFIG, SIZE, seed=0)
        started.append(peer)
        peer.ask(do="fill", value=value)
        return peer

    yield start
    for peer in started:
        peer.stop()


@pytest.fixture
def buffer() -> np.ndarray:
    return np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def transport(buffer: np.ndarray) -> Iterator[Transport]:
    transport = create(ConnectorConfig(**CONFIG))
    transport.register([MemoryRange(buffer.ctypes.data, SIZE)])
    yield transport
    transport.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the situation did not come about"
        time.sleep(0.001)


def landed_after_waking(peer: Peer, buffer: np.ndarray, value: int) -> int:
    """Bytes that arrive once the stopped peer goes on."""
    before = int(np.count_nonzero(buffer == value))
    os.kill(peer.process.pid, signal.SIGCONT)
    time.sleep(SETTLE_S)
    return int(np.count_nonzero(buffer == value)) - before


def read_from_a_peer_that_stops(transport: Transport, buffer: np.ndarray, peer: Peer) -> None:
    failures: list[TransferError] = []

    def read() -> None:
        try:
            many = pieces(peer.address, buffer.ctypes.data, EVERYTHING, PIECE)
            transport.read(peer.session, many, time.monotonic() + 1.0)
        except TransferError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: bool(buffer[: SIZE // 16].any()))
    os.kill(peer.process.pid, signal.SIGSTOP)
    reader.join(10)
    assert failures and not failures[0].quiesced


def write_of_a_peer_that_stops(transport: Transport, buffer: np.ndarray, peer: Peer) -> None:
    peer.tell(
        do="write",
        peer=transport.session,
        sink=buffer.ctypes.data,
        offsets=EVERYTHING.tolist(),
        length=PIECE,
        timeout_s=60,
    )
    wait_for(lambda: bool(buffer[: SIZE // 16].any()))
    os.kill(peer.process.pid, signal.SIGSTOP)
    time.sleep(0.1)


SITUATIONS = [read_from_a_peer_that_stops, write_of_a_peer_that_stops]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_without_a_fence_bytes_land_after_the_transfer_was_given_up(
    transport: Transport, buffer: np.ndarray, peers: StartPeer, situation: Callable[..., None]
) -> None:
    peer = peers(7)
    situation(transport, buffer, peer)
    assert landed_after_waking(peer, buffer, 7) > 0


@pytest.mark.parametrize("situation", SITUATIONS)
def test_after_a_fence_nothing_lands_any_more(
    transport: Transport, buffer: np.ndarray, peers: StartPeer, situation: Callable[..., None]
) -> None:
    peer = peers(7)
    situation(transport, buffer, peer)
    transport.rotate()
    assert landed_after_waking(peer, buffer, 7) == 0


@pytest.mark.parametrize("situation", SITUATIONS)
def test_after_a_fence_both_ends_go_on_under_the_new_name(
    transport: Transport, buffer: np.ndarray, peers: StartPeer, situation: Callable[..., None]
) -> None:
    peer = peers(7)
    former = transport.session
    situation(transport, buffer, peer)
    new = transport.rotate()
    assert new == transport.session != former
    os.kill(peer.process.pid, signal.SIGCONT)
    if situation is write_of_a_peer_that_stops:
        answer = peer.answer()
        assert answer["ok"] is False and answer["quiesced"] is False
    many = pieces(peer.address, buffer.ctypes.data, [0], SIZE)
    transport.read(peer.session, many, time.monotonic() + 10)
    assert np.count_nonzero(buffer == 7) == SIZE
    buffer[:] = 0
    order = {"do": "write", "sink": buffer.ctypes.data, "offsets": [0], "length": SIZE, "timeout_s": 5}
    assert peer.ask(peer=former, **order)["ok"] is False
    assert not buffer.any()
    assert peer.ask(peer=new, **order)["ok"] is True
    assert np.count_nonzero(buffer == 7) == SIZE


def test_a_healthy_read_outlives_the_fence_that_another_transfer_needs(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    sick, healthy = peers(7), peers(8)
    half = SIZE // 2
    outcome: list[str] = []

    def read() -> None:
        many = pieces(healthy.address, buffer.ctypes.data, np.arange(half, SIZE, 256), 256)
        try:
            transport.read(healthy.session, many, time.monotonic() + 30)
            outcome.append("done")
        except TransferError as error:
            outcome.append(str(error))

    transport.read(sick.session, pieces(sick.address, buffer.ctypes.data, [0], 64), time.monotonic() + 10)
    os.kill(sick.process.pid, signal.SIGSTOP)
    reader = threading.Thread(target=read)
    reader.start()
    wait_for(lambda: bool(buffer[half:].any()))
    with pytest.raises(TransferError):
        transport.read(
            sick.session, pieces(sick.address, buffer.ctypes.data, [0], 1 << 20), time.monotonic() + 0.2
        )
    assert not outcome, "the healthy read must still be under way for this test to say something"
    transport.rotate(spare_s=25)
    reader.join(30)
    assert outcome == ["done"]
    assert np.count_nonzero(buffer[half:] == 8) == SIZE - half
    assert landed_after_waking(sick, buffer, 7) == 0


def test_a_healthy_write_of_a_peer_is_spared_while_the_caller_says_it_is_busy(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    peer = peers(7)
    peer.tell(
        do="write",
        peer=transport.session,
        sink=buffer.ctypes.data,
        offsets=EVERYTHING.tolist(),
        length=PIECE,
        timeout_s=30,
    )
    wait_for(lambda: bool(buffer.any()))
    transport.rotate(spare_s=25, busy=lambda: int(np.count_nonzero(buffer[::PIECE])) < SIZE // PIECE)
    assert np.count_nonzero(buffer[::PIECE]) == SIZE // PIECE


def test_a_transfer_that_is_not_spared_is_cut_off_and_says_so(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    peer = peers(7)
    transport.read(peer.session, pieces(peer.address, buffer.ctypes.data, [0], 64), time.monotonic() + 10)
    os.kill(peer.process.pid, signal.SIGSTOP)
    failures: list[TransferError] = []

    def read() -> None:
        try:
            transport.read(
                peer.session, pieces(peer.address, buffer.ctypes.data, [0], SIZE), time.monotonic() + 60
            )
        except TransferError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    transport.rotate()
    reader.join(5)
    assert failures and "fence" in str(failures[0])
    assert landed_after_waking(peer, buffer, 7) == 0


def test_closing_the_writers_endpoint_does_not_stop_what_it_has_already_sent(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    """Why P's closed session is no promise to D: only D's own fence ends what is on its way to D."""
    peer = peers(0)
    buffer[:] = 7
    transport.write(peer.session, pieces(buffer.ctypes.data, peer.address, [0], 64), time.monotonic() + 10)
    failures: list[TransferError] = []

    def write() -> None:
        try:
            many = pieces(buffer.ctypes.data, peer.address, [0, SIZE // 2], SIZE // 2)
            transport.write(peer.session, many, time.monotonic() + 0.5)
        except TransferError as error:
            failures.append(error)

    os.kill(peer.process.pid, signal.SIGSTOP)
    write()
    assert failures and not failures[0].quiesced
    transport.rotate()
    os.kill(peer.process.pid, signal.SIGCONT)
    time.sleep(SETTLE_S)
    assert peer.ask(do="count", value=7)["value"] > 64


def test_a_transfer_of_several_reads_goes_on_through_the_spared_endpoint(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    peer = peers(7)
    former = transport.session
    over = threading.Event()
    fence = threading.Thread(target=transport.rotate, args=(20.0, lambda: not over.is_set()))
    fence.start()
    wait_for(lambda: transport.session != former)
    half = SIZE // 2
    for at in (0, half):
        many = pieces(peer.address + at, buffer.ctypes.data + at, [0], half)
        transport.read(peer.session, many, time.monotonic() + 10, former)
    assert np.count_nonzero(buffer == 7) == SIZE
    over.set()
    fence.join(10)
    with pytest.raises(TransferError, match="replaced") as caught:
        transport.read(peer.session, many, time.monotonic() + 10, former)
    assert caught.value.quiesced
