"""Moving bytes between workers: the port (`base`), its implementations, and how one is chosen."""

from __future__ import annotations

from collections.abc import Callable

from ascend_pd.errors import OperatorError
from ascend_pd.wire.connector_config import ConnectorConfig
from connectors.transport.base import Transport


def _mooncake(config: ConnectorConfig) -> Transport:
    from connectors.transport.mooncake import MooncakeTransport

    return MooncakeTransport(config.host, config.protocol)


TRANSPORTS: dict[str, Callable[[ConnectorConfig], Transport]] = {
    "mooncake": _mooncake,
}


def create(config: ConnectorConfig) -> Transport:
    """The transport that the cluster file names, opened.

    Raises:
        OperatorError: it is unknown, its library is missing, or it cannot open an endpoint.
    """
    factory = TRANSPORTS.get(config.transport)
    if factory is None:
        raise OperatorError(
            f"unknown transport {config.transport!r}", f"use one of {', '.join(sorted(TRANSPORTS))}"
        )
    return factory(config)
