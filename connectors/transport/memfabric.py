"""MemFabric's transfer engine behind the transport port: NPU memory over SDMA or the device's own RDMA.

Never run on an NPU yet: without an Ascend driver the library opens no endpoint. Names and signatures are checked
against the released wheels (`tests/contract`), the order of calls against a stand-in (`tests/unit`).
Facts from memfabric-hybrid 1.2.0 and 1.3.0: peers find each other through a store at `tcp://host:port`; a session
is `ip:port`, IPv4 only; memory is registered in granules of 2 MiB, so two buffers in one granule are refused;
0 is success, anything else an error whose text `get_last_err_msg` has; there is no probe, no status and no
deadline of the caller's own.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ascend_pd.errors import OperatorError
from connectors.transport.base import MemoryRange
from connectors.transport.endpoint import Endpoint
from connectors.transport.engine_transport import EngineTransport
from connectors.transport.transfer import Transfer

GRANULE = 2 << 20
OPERATIONS = {"device_sdma": "SDMA", "device_rdma": "DEVICE_RDMA"}
"""Our protocol names and the members of `TransferEngine.TransDataOpType`. SDMA reaches the dies of one A3
super-pod; A2 servers and super-pods among each other need RDMA."""
ROLES = {"prefill": "Prefill", "decode": "Decode"}
STORE_ROLE = "Prefill"
"""Whose processes serve the store, as vllm-ascend has it."""
PROBE_S = 1.0
_LOG_WARNINGS = 2


class MemFabricTransport(EngineTransport):
    """MemFabric over `device_sdma` or `device_rdma`.

    Args:
        host: this node's IPv4 address.
        protocol: a key of `OPERATIONS`.
        store_url: `tcp://host:port` of the store that all engines share.
        role: `prefill` or `decode`.
        device_index: the NPU of this rank, which must be the calling thread's current device.

    Raises:
        OperatorError: an argument that MemFabric cannot take, or no endpoint can be opened.
    """

    def __init__(self, host: str, protocol: str, store_url: str, role: str, device_index: int) -> None:
        if protocol not in OPERATIONS:
            raise OperatorError(f"memfabric has no protocol {protocol!r}", f"use one of {', '.join(OPERATIONS)}")
        if role not in ROLES:
            raise OperatorError(f"memfabric engines are prefill or decode, not {role}", "split the pool by role")
        if not store_url.startswith("tcp://"):
            raise OperatorError(
                f"memfabric store {store_url!r} is not a tcp:// address",
                "set connector.memfabricStore: tcp://HOST:PORT",
            )
        _check_ipv4(host)
        self._protocol = protocol
        self._store_url = store_url
        self._role = ROLES[role]
        self._device_index = device_index
        self._library = load_library()
        self._library.set_log_level(_LOG_WARNINGS)
        # Without certificates the store would wait for a TLS handshake; the network must be closed to others.
        self._library.set_conf_store_tls(False, "")
        super().__init__(host, replaces_in_place=True)

    @property
    def name(self) -> str:
        return f"memfabric/{self._protocol}"

    def probe(self, peer: str) -> bool:
        """The library cannot ask; what can be seen is whether the peer's port takes connections."""
        address, _, port = peer.rpartition(":")
        try:
            socket.create_connection((address, int(port)), timeout=PROBE_S).close()
        except (OSError, ValueError):
            return False
        return True

    def _open_engine(self) -> Any:
        engine = self._library.TransferEngine()
        operation = getattr(self._library.TransferEngine.TransDataOpType, OPERATIONS[self._protocol])
        code = engine.initialize(
            self._store_url,
            self._host,
            self._role,
            self._device_index,
            operation,
            STORE_ROLE,
        )
        if code != 0:
            raise OperatorError(
                f"memfabric cannot open a {self._protocol} endpoint on {self._host}, device {self._device_index}, "
                f"store {self._store_url} (code {code}{self._why()})",
                "check the driver and firmware versions, and that the store's address is reachable",
            )
        return engine

    def _register_with(self, endpoint: Endpoint, ranges: Sequence[MemoryRange]) -> None:
        if not ranges:
            return
        for item in ranges:
            if item.address % GRANULE:
                raise OperatorError(
                    f"memory at {item.address:#x} does not begin at a 2 MiB boundary: memfabric would take its "
                    "neighbour's granule too",
                    "allocate the KV cache aligned (vllm-ascend does when a kv_transfer_config is there)",
                )
        code = endpoint.engine.batch_register_memory([r.address for r in ranges], [r.length for r in ranges])
        if code != 0:
            size = sum(r.length for r in ranges)
            raise OperatorError(
                f"{self.name} cannot register {size} bytes in {len(ranges)} ranges (code {code}{self._why()})",
                "check that the memory lies on this rank's device and is registered once",
            )

    def _carry_out(self, transfer: Transfer, endpoint: Endpoint) -> None:
        transfer.run_blocking(endpoint)

    def _end_engine(self, engine: Any) -> None:
        engine.destroy()

    def _after_failure(self, endpoint: Endpoint, peer: str) -> None:
        """Nothing is known of endpoints that have to be rebuilt."""

    def _why(self) -> str:
        text = str(self._library.get_last_err_msg() or "").strip()
        return f": {text}" if text else ""


def _check_ipv4(host: str) -> None:
    try:
        ipaddress.IPv4Address(host)
    except ValueError as error:
        raise OperatorError(
            f"memfabric needs an IPv4 address, not {host!r}", "set the pool's hosts by address"
        ) from error


def load_library() -> Any:
    """`memfabric_hybrid`.

    Raises:
        OperatorError: it is not installed or cannot be loaded.
    """
    try:
        return import_module("memfabric_hybrid")
    except ModuleNotFoundError as error:
        raise OperatorError(
            "the Python package memfabric_hybrid is not installed", "pip install memfabric-hybrid"
        ) from error
    except (ImportError, OSError) as error:
        raise OperatorError(
            f"memfabric cannot be loaded: {error}", "install the CANN runtime that it was built for"
        ) from error
