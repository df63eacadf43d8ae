"""Mooncake's transfer engine behind the transport port.

Facts it is built on (mooncake-transfer-engine 0.3.13.post1 over TCP, shown by `tests/engine/test_transport*.py`):
more than ~2048 requests outstanding to one peer wedge that peer's connections until the engine object is rebuilt
(kvcache-ai/Mooncake#4209); -1 is the only error and does not say that nothing more will land; the synchronous
calls spin on a core and know no deadline but the library's own. So over TCP every piece is one asynchronous
operation whose status is polled between sleeps: faster, a third of the CPU, and the caller's deadline holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ascend_pd.errors import OperatorError
from connectors.transport.base import MemoryRange
from connectors.transport.endpoint import Endpoint, EndpointClosingError
from connectors.transport.engine_transport import EngineTransport
from connectors.transport.transfer import Transfer

PROTOCOLS = ("tcp", "rdma", "ascend")
WEDGED_AFTER = 3
"""Failures in a row, while the peer answers a probe, after which the endpoint is rebuilt."""
WEDGE_PROBE_S = 0.5
_DEBIAN = {"libibverbs": "libibverbs1", "libnl": "libibverbs1", "librdmacm": "librdmacm1", "libnuma": "libnuma1"}


class MooncakeTransport(EngineTransport):
    """Mooncake over `tcp`, `rdma` or `ascend`.

    With `ascend` the calling thread's device must be set before this and before every `read` and `write`.

    Raises:
        OperatorError: the library or a system library is missing, or no endpoint can be opened.
    """

    def __init__(self, host: str, protocol: str = "tcp") -> None:
        if protocol not in PROTOCOLS:
            raise OperatorError(f"mooncake has no protocol {protocol!r}", f"use one of {', '.join(PROTOCOLS)}")
        self._protocol = protocol
        self._library = load_library()
        self._polled = protocol == "tcp"
        super().__init__(host, replaces_in_place=protocol != "tcp")

    @property
    def name(self) -> str:
        return f"mooncake/{self._protocol}"

    def probe(self, peer: str) -> bool:
        try:
            with self._current.entered() as endpoint:
                return endpoint.contact(peer, float("inf"), open_segment=self._polled)
        except EndpointClosingError:
            return False

    def _open_engine(self) -> Any:
        engine = self._library.TransferEngine()
        if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, "") != 0:
            raise OperatorError(
                f"mooncake cannot open a {self._protocol} endpoint on {self._host}",
                "check that the address belongs to this host and that the protocol's driver is there",
            )
        return engine

    def _register_with(self, endpoint: Endpoint, ranges: Sequence[MemoryRange]) -> None:
        if not ranges:
            return
        code = endpoint.engine.batch_register_memory([r.address for r in ranges], [r.length for r in ranges])
        if code != 0:
            size = sum(r.length for r in ranges)
            raise OperatorError(
                f"{self.name} cannot register {size} bytes in {len(ranges)} ranges (code {code})",
                "check the locked-memory limit (ulimit -l) and that the memory lies on this rank's device",
            )

    def _carry_out(self, transfer: Transfer, endpoint: Endpoint) -> None:
        peer = transfer.peer
        if not endpoint.knows(peer) and not endpoint.contact(peer, transfer.deadline, open_segment=self._polled):
            raise transfer.error("the peer's endpoint does not answer")
        if self._polled:
            transfer.run_polled(endpoint)
        else:
            transfer.run_blocking(endpoint)

    def _end_engine(self, engine: Any) -> None:
        """The destructor does it all."""

    def _after_failure(self, endpoint: Endpoint, peer: str) -> None:
        """A peer that answers probes and fails every transfer is wedged: go on with a new endpoint."""
        if not self._polled:
            return
        until = time.monotonic() + WEDGE_PROBE_S
        try:
            with endpoint.entered():
                wedged = endpoint.failed(peer) >= WEDGED_AFTER and endpoint.contact(peer, until, open_segment=True)
        except EndpointClosingError:
            return
        if wedged and not self._closed:
            self._replace(endpoint)


def load_library() -> Any:
    """`mooncake.engine`.

    Raises:
        OperatorError: it, or a system library it needs, is missing; names the package to install.
    """
    try:
        return import_module("mooncake.engine")
    except ModuleNotFoundError as error:
        raise OperatorError(
            "the Python package mooncake is not installed",
            "pip install mooncake-transfer-engine-non-cuda (CPU) or mooncake-transfer-engine-npu (Ascend)",
        ) from error
    except ImportError as error:
        reason = str(error)
        library = reason.split(":", 1)[0]
        package = next((deb for prefix, deb in _DEBIAN.items() if library.startswith(prefix)), "")
        fix = f"apt-get install {package}" if package else "install the package that provides it"
        raise OperatorError(f"mooncake cannot be loaded: {reason}", fix) from error
