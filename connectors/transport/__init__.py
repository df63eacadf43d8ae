"""Moving bytes between workers: the port (`base`), its implementations, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ascend_pd.errors import OperatorError
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Placement:
    """What a transport must know of the process it is opened in."""

    role: str
    """`prefill`, `decode` or `union`."""
    device_index: int
    """Of this rank's NPU; 0 on CPU."""


def _mooncake(config: ConnectorConfig, placement: Placement) -> Transport:
    from connectors.transport.mooncake import MooncakeTransport

    return MooncakeTransport(config.host, config.protocol)


def _memfabric(config: ConnectorConfig, placement: Placement) -> Transport:
    from connectors.transport.memfabric import MemFabricTransport

    return MemFabricTransport(
        config.host, config.protocol, config.memfabric_store, placement.role, placement.device_index
    )


TRANSPORTS: dict[str, Callable[[ConnectorConfig, Placement], Transport]] = {
    "mooncake": _mooncake,
    "memfabric": _memfabric,
}


def create(config: ConnectorConfig, placement: Placement = Placement("union", 0)) -> Transport:
    """The transport that the cluster file names, opened.

    Raises:
        OperatorError: it is unknown, its library is missing, or it cannot open an endpoint.
    """
    factory = TRANSPORTS.get(config.transport)
    if factory is None:
        raise OperatorError(
            f"unknown transport {config.transport!r}", f"use one of {', '.join(sorted(TRANSPORTS))}"
        )
    return factory(config, placement)
