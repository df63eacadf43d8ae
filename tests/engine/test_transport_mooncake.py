"""What is true of Mooncake alone: its wedge, its system libraries, its environment."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from ascend_pd.errors import OperatorError, TransferError
from connectors.transport import mooncake
from connectors.transport.base import MemoryRange
from connectors.transport.own_sockets import set_accept_timeout
from tests.engine.transport_peer import Peer, pattern, pieces

pytestmark = pytest.mark.engine
SIZE = 16 << 20
CONFIG = {"transport": "mooncake", "protocol": "tcp"}


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer(CONFIG, SIZE, seed=1)
    yield peer
    peer.stop()


def test_a_peer_that_answers_and_fails_every_transfer_gets_a_new_endpoint(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's wedge, made in the one way that makes it: more pieces at once than its queue takes."""
    monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "1")
    monkeypatch.setenv("MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "1")
    buffer = np.zeros(SIZE, dtype=np.uint8)
    transport = mooncake.MooncakeTransport("127.0.0.1")
    try:
        transport.register([MemoryRange(buffer.ctypes.data, SIZE)])
        former = transport.session
        many = pieces(peer.address, buffer.ctypes.data, np.arange(0, SIZE, 65_536), 65_536)
        failures = 0
        for attempt in range(10):
            if attempt == 3:
                # As in life: the queue was too small for what others had sent, not for what is sent now.
                monkeypatch.setenv("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")
            try:
                transport.read(peer.session, many, time.monotonic() + 2)
                break
            except TransferError:
                failures += 1
        assert failures >= mooncake.WEDGED_AFTER
        assert transport.session != former
        assert np.array_equal(buffer, pattern(SIZE, 1))
    finally:
        transport.close()


def test_a_missing_system_library_names_its_debian_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(mooncake, "import_module", fail)
    with pytest.raises(OperatorError, match="apt-get install libibverbs1"):
        mooncake.MooncakeTransport("127.0.0.1")


def test_a_missing_package_says_which_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'mooncake'", name="mooncake")

    monkeypatch.setattr(mooncake, "import_module", fail)
    with pytest.raises(OperatorError, match="mooncake-transfer-engine-non-cuda"):
        mooncake.MooncakeTransport("127.0.0.1")


def test_an_unknown_protocol_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OperatorError, match="tcp, rdma, ascend"):
        mooncake.MooncakeTransport("127.0.0.1", "carrier-pigeon")


def test_the_name_of_an_endpoint_is_never_used_again_in_a_process() -> None:
    transport = mooncake.MooncakeTransport("127.0.0.1")
    try:
        names = [transport.session, *(transport.rotate() for _ in range(5))]
    finally:
        transport.close()
    assert len(set(names)) == len(names)


def test_the_library_thread_that_its_destructor_waits_for_can_be_hurried() -> None:
    """Without that a fence holds the interpreter, and the engine's steps with it, for up to a second."""
    transport = mooncake.MooncakeTransport("127.0.0.1")
    try:
        port = int(transport.session.rsplit(":", 1)[1])
        assert set_accept_timeout("127.0.0.1", port, 0.05)
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            assert not set_accept_timeout("127.0.0.1", other.getsockname()[1], 0.05)
    finally:
        transport.close()
