"""What every transport promises, over the real library and two processes."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ascend_pd.errors import LocalProtocolError, TransferError
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.transport import create
from connectors.transport.base import MemoryRange, Transport
from tests.engine.transport_peer import Peer, pattern, pieces

pytestmark = pytest.mark.engine
SIZE = 32 << 20
StartPeer = Callable[[int], Peer]
CONFIGS = {"mooncake-tcp": {"transport": "mooncake", "protocol": "tcp"}}


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module", params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


@pytest.fixture(scope="module")
def lasting_peer(config: dict[str, str]) -> Iterator[Peer]:
    """For tests that leave the peer as they found it."""
    peer = Peer(config, SIZE, seed=1)
    yield peer
    peer.stop()


@pytest.fixture
def peers(config: dict[str, str]) -> Iterator[StartPeer]:
    started: list[Peer] = []

    def start(seed: int) -> Peer:
        started.append(Peer(config, SIZE, seed))
        return started[-1]

    yield start
    for peer in started:
        peer.stop()


@pytest.fixture
def buffer() -> np.ndarray:
    return np.zeros(SIZE, dtype=np.uint8)


@pytest.fixture
def transport(config: dict[str, str], buffer: np.ndarray) -> Iterator[Transport]:
    transport = create(ConnectorConfig(**config))
    transport.register([MemoryRange(buffer.ctypes.data, SIZE)])
    yield transport
    transport.close()


@pytest.mark.parametrize("length", [1, 7, 4096, 65_537, 196_608, SIZE])
def test_a_read_brings_exactly_the_bytes_asked_for(
    transport: Transport, buffer: np.ndarray, lasting_peer: Peer, length: int
) -> None:
    at = (SIZE - length) // 2
    transport.read(lasting_peer.session, pieces(lasting_peer.address, buffer.ctypes.data, [at], length), soon())
    expected = np.zeros_like(buffer)
    expected[at : at + length] = pattern(SIZE, 1)[at : at + length]
    assert np.array_equal(buffer, expected)


@pytest.mark.parametrize("length", [1, 65_537, 196_608])
def test_a_write_changes_exactly_the_bytes_sent(
    transport: Transport, buffer: np.ndarray, lasting_peer: Peer, length: int
) -> None:
    lasting_peer.ask(do="fill", value=0)
    buffer[:] = 7
    offsets = [SIZE - length, 0, length]
    transport.write(
        lasting_peer.session, pieces(buffer.ctypes.data, lasting_peer.address, offsets, length), soon()
    )
    assert lasting_peer.ask(do="count", value=7)["value"] == 3 * length


def test_more_pieces_than_the_library_can_queue_arrive_in_any_order(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    peer = peers(2)
    length = 1024
    offsets = np.random.default_rng(3).permutation(SIZE // length)[:5000] * length
    transport.read(peer.session, pieces(peer.address, buffer.ctypes.data, offsets, length), soon())
    expected = np.zeros_like(buffer).reshape(-1, length)
    expected[offsets // length] = pattern(SIZE, 2).reshape(-1, length)[offsets // length]
    assert np.array_equal(buffer, expected.reshape(-1))


def test_no_pieces_is_a_transfer_that_succeeds(transport: Transport, lasting_peer: Peer) -> None:
    transport.read(lasting_peer.session, pieces(0, 0, [], 1), soon())


def test_local_memory_that_is_not_registered_is_refused_before_anything_moves(
    transport: Transport, lasting_peer: Peer
) -> None:
    other = np.zeros(4096, dtype=np.uint8)
    with pytest.raises(LocalProtocolError, match="registered"):
        transport.read(lasting_peer.session, pieces(lasting_peer.address, other.ctypes.data, [0], 4096), soon())
    assert not other.any()


def test_remote_memory_that_is_not_registered_fails_and_the_peer_stays_usable(
    transport: Transport, buffer: np.ndarray, lasting_peer: Peer
) -> None:
    with pytest.raises(TransferError) as caught:
        transport.read(
            lasting_peer.session, pieces(lasting_peer.unregistered, buffer.ctypes.data, [0], 64), soon()
        )
    assert not caught.value.quiesced
    transport.read(lasting_peer.session, pieces(lasting_peer.address, buffer.ctypes.data, [0], 64), soon())


def test_a_peer_that_never_was_is_an_error_with_nothing_left_behind(
    transport: Transport, buffer: np.ndarray
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(TransferError) as caught:
            transport.read(nobody, pieces(buffer.ctypes.data, buffer.ctypes.data, [0], 64), soon())
        assert caught.value.quiesced
        assert not transport.probe(nobody)


def test_a_peer_that_dies_fails_the_transfer_and_its_successor_is_reached(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    first = peers(4)
    many = pieces(first.address, buffer.ctypes.data, [0], SIZE)
    transport.read(first.session, many, soon())
    first.stop()
    with pytest.raises(TransferError):
        transport.read(first.session, many, soon())
    assert not transport.probe(first.session)
    second = peers(5)
    assert second.session != first.session
    transport.read(second.session, pieces(second.address, buffer.ctypes.data, [0], SIZE), soon())
    assert np.array_equal(buffer, pattern(SIZE, 5))


def test_a_peer_that_stops_costs_no_more_than_the_deadline(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    peer = peers(6)
    many = pieces(peer.address, buffer.ctypes.data, np.arange(0, SIZE, 1 << 20), 1 << 20)
    transport.read(peer.session, many, soon())
    os.kill(peer.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransferError, match="deadline") as caught:
        transport.read(peer.session, many, soon(0.5))
    assert not caught.value.quiesced
    # Far below every timer of the library, so it was the caller's deadline that counted.
    assert time.monotonic() - started < 4


def test_a_peer_that_is_stopped_before_the_first_contact_delays_nobody_else(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    stopped, well = peers(6), peers(7)
    os.kill(stopped.process.pid, signal.SIGSTOP)
    failures: list[TransferError] = []

    def read() -> None:
        try:
            transport.read(stopped.session, pieces(stopped.address, buffer.ctypes.data, [0], 64), soon(2.0))
        except TransferError as error:
            failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.1)
    transport.read(well.session, pieces(well.address, buffer.ctypes.data, [0], SIZE), soon())
    assert not failures and reader.is_alive()
    reader.join(10)
    assert failures[0].quiesced


def test_two_threads_share_a_peer(transport: Transport, buffer: np.ndarray, lasting_peer: Peer) -> None:
    lasting_peer.ask(do="fill", value=9)
    halves = np.array_split(np.random.default_rng(0).permutation(SIZE // 8192) * 8192, 2)
    errors: list[Exception] = []

    def read(offsets: np.ndarray) -> None:
        try:
            transport.read(
                lasting_peer.session, pieces(lasting_peer.address, buffer.ctypes.data, offsets, 8192), soon()
            )
        except (TransferError, LocalProtocolError) as error:
            errors.append(error)

    threads = [threading.Thread(target=read, args=(half,)) for half in halves]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert np.count_nonzero(buffer == 9) == SIZE


def test_transfers_with_several_peers_run_side_by_side(
    transport: Transport, buffer: np.ndarray, peers: StartPeer
) -> None:
    sources = [peers(seed) for seed in (10, 11, 12)]
    share = SIZE // 4

    def read(index: int) -> None:
        offsets = np.arange(index * share, (index + 1) * share, 65_536)
        peer = sources[index]
        transport.read(peer.session, pieces(peer.address, buffer.ctypes.data, offsets, 65_536), soon())

    threads = [threading.Thread(target=read, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for index, seed in enumerate((10, 11, 12)):
        part = slice(index * share, (index + 1) * share)
        assert np.array_equal(buffer[part], pattern(SIZE, seed)[part])


def test_closing_twice_is_closing_once(config: dict[str, str]) -> None:
    transport = create(ConnectorConfig(**config))
    transport.close()
    transport.close()
    with pytest.raises(LocalProtocolError):
        transport.rotate()
