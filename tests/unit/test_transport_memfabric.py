"""MemFabric's transport against a stand-in with the library's signatures: order of calls, refusals, the fence."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ascend_pd.errors import LocalProtocolError, OperatorError, TransferError
from ascend_pd.layout.pieces import Pieces
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.transport import Placement, create, memfabric
from connectors.transport.base import MemoryRange

BASE = 64 << 20
STORE = "tcp://10.0.0.1:50089"


class Library:
    """`memfabric_hybrid` as far as used. `calls` has everything in order, `code` is what operations return."""

    def __init__(self) -> None:
        calls: list[tuple[Any, ...]] = []
        library = self
        self.calls = calls
        self.code = 0
        self.alive = 0

        class TransferEngine:
            TransDataOpType = SimpleNamespace(SDMA="sdma", DEVICE_RDMA="rdma")
            ports = 6000

            def __init__(self) -> None:
                TransferEngine.ports += 1
                self.port = TransferEngine.ports

            def initialize(
                self,
                store_url: str,
                session_id: str,
                role: str,
                device_id: int,
                data_op_type: str,
                store_server_role: str = "Decode",
                nic: str = "",
            ) -> int:
                library.alive += 1
                calls.append(
                    ("initialize", store_url, session_id, role, device_id, data_op_type, store_server_role)
                )
                assert library.alive == 1, "two endpoints at once on one device"
                return library.code

            def get_rpc_port(self) -> int:
                return self.port

            def batch_register_memory(self, buffer_addrs: list[int], capacities: list[int]) -> int:
                calls.append(("register", buffer_addrs, capacities))
                return library.code

            def batch_transfer_sync_read(
                self, dest_session: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
            ) -> int:
                calls.append(("read", dest_session, buffers, peer_buffers, lengths))
                return library.code

            def batch_transfer_sync_write(
                self, dest_session: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
            ) -> int:
                calls.append(("write", dest_session, buffers, peer_buffers, lengths))
                return library.code

            def destroy(self) -> None:
                library.alive -= 1
                calls.append(("destroy",))

        self.TransferEngine = TransferEngine

    def set_log_level(self, level: int) -> None:
        self.calls.append(("set_log_level", level))

    def set_conf_store_tls(self, enable: bool, info: str) -> None:
        self.calls.append(("set_conf_store_tls", enable, info))

    def get_last_err_msg(self) -> str:
        return "driver too old" if self.code else ""

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setattr(memfabric, "import_module", lambda name: library)
    return library


def config(**changes: Any) -> ConnectorConfig:
    fields = {"transport": "memfabric", "protocol": "device_sdma", "host": "10.0.0.2", "memfabric_store": STORE}
    return ConnectorConfig(**{**fields, **changes})


def piece(source: int, sink: int, length: int = 4096) -> Pieces:
    return Pieces(*(np.array([x], dtype=np.int64) for x in (source, sink, length)))


def soon() -> float:
    return time.monotonic() + 10


def test_an_endpoint_is_opened_as_the_cluster_file_says(library: Library) -> None:
    transport = create(config(protocol="device_rdma"), Placement("decode", 3))
    assert library.calls[:2] == [("set_log_level", 2), ("set_conf_store_tls", False, "")]
    assert library.named("initialize") == [(STORE, "10.0.0.2", "Decode", 3, "rdma", "Prefill")]
    assert transport.name == "memfabric/device_rdma"
    assert transport.session == "10.0.0.2:6001"
    transport.close()
    assert library.alive == 0


def test_local_addresses_are_the_first_list_whichever_way_bytes_go(library: Library) -> None:
    transport = create(config(), Placement("decode", 0))
    transport.register([MemoryRange(BASE, GRANULES), MemoryRange(BASE + 4 * GRANULES, GRANULES)])
    assert library.named("register") == [([BASE, BASE + 4 * GRANULES], [GRANULES, GRANULES])]
    transport.read("10.0.0.1:7", piece(source=1 << 40, sink=BASE), soon())
    transport.write("10.0.0.1:7", piece(source=BASE, sink=1 << 40), soon())
    expected = ("10.0.0.1:7", [BASE], [1 << 40], [4096])
    assert library.named("read") == library.named("write") == [expected]
    with pytest.raises(LocalProtocolError):
        transport.read("10.0.0.1:7", piece(source=1 << 40, sink=BASE - 8), soon())
    transport.close()


GRANULES = 2 * memfabric.GRANULE


def test_the_fence_destroys_the_old_endpoint_before_it_opens_the_next(library: Library) -> None:
    transport = create(config(), Placement("prefill", 0))
    transport.register([MemoryRange(BASE, GRANULES)])
    former = transport.session
    assert transport.rotate() != former
    names = [call[0] for call in library.calls[2:]]
    assert names == ["initialize", "register", "destroy", "initialize", "register"]
    transport.close()


def test_an_error_says_what_the_library_says_and_is_not_quiesced(library: Library) -> None:
    transport = create(config(), Placement("prefill", 0))
    transport.register([MemoryRange(BASE, GRANULES)])
    library.code = -1
    with pytest.raises(TransferError, match="code -1") as caught:
        transport.read("10.0.0.1:7", piece(source=1 << 40, sink=BASE), soon())
    assert not caught.value.quiesced
    transport.close()


def test_an_endpoint_that_cannot_be_opened_names_the_reason(library: Library) -> None:
    library.code = -1
    with pytest.raises(OperatorError, match="driver too old"):
        create(config(), Placement("prefill", 0))


def test_memory_that_shares_a_granule_is_refused(library: Library) -> None:
    transport = create(config(), Placement("prefill", 0))
    with pytest.raises(OperatorError, match="2 MiB boundary"):
        transport.register([MemoryRange(BASE + 4096, 4096)])
    assert not library.named("register")
    transport.close()


@pytest.mark.parametrize(
    ("changes", "role", "words"),
    [
        ({"protocol": "tcp"}, "prefill", "no protocol 'tcp'"),
        ({}, "union", "prefill or decode"),
        ({"host": "fe80::1"}, "prefill", "IPv4"),
        ({"memfabric_store": ""}, "prefill", "tcp://"),
    ],
)
def test_what_memfabric_cannot_do_is_refused_at_the_start(
    library: Library, changes: dict[str, str], role: str, words: str
) -> None:
    with pytest.raises(OperatorError, match=words):
        create(config(**changes), Placement(role, 0))
    assert not library.named("initialize")


def test_a_missing_package_says_which_one_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'memfabric_hybrid'", name=name)

    monkeypatch.setattr(memfabric, "import_module", fail)
    with pytest.raises(OperatorError, match="pip install memfabric-hybrid"):
        create(config(), Placement("prefill", 0))
