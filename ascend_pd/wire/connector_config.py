"""`kv_connector_extra_config`: what the launcher tells a connector, and the only keys a connector reads."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ascend_pd.errors import OperatorError


class ConnectorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's connector settings; the port is `kv_port` of vLLM's own KVTransferConfig.

    All durations are seconds.
    """

    transport: Literal["mooncake", "memfabric"] = "mooncake"
    protocol: Literal["tcp", "rdma", "ascend", "device_sdma", "device_rdma"] = "tcp"
    host: str = "127.0.0.1"
    """The address under which peers reach this process: the side channel of the scheduler, the data path and the
    service of workers. Differs between the hosts of an engine that has several."""
    hardware: Literal["cpu", "A2", "A3"] = "cpu"
    lease_seconds: float = 30.0
    max_hold_seconds: float = 600.0
    """No renewal extends a hold past this."""
    transfer_seconds: float = 60.0
    """D's deadline from admission to the cache being there."""
    quarantine_seconds: float = 10.0
    """Bound on waiting for drained acknowledgements before D fences its own endpoint."""
    secret_file: str = ""
    metaserver: str = ""
    max_unreserved_blocks: int = 0
    """Layer-wise P: finished blocks without a reservation that may be kept; 0 means a quarter of the pool."""
    staging_bytes: int = 64 << 20
    """Staging memory per peer."""
    checksum: bool = False
    """Compare what was received with what was sent; both sides must say the same."""
    peer_tp_size: int = 0
    """When the operator names the other side's TP, a difference is an error; 0 means learn it."""
    memfabric_store: str = ""


def parse_connector_config(raw: dict[str, Any]) -> ConnectorConfig:
    """Read the extra config.

    Raises:
        OperatorError: unknown key or wrong type, naming it.
    """
    try:
        return msgspec.convert(raw, ConnectorConfig)
    except msgspec.ValidationError as error:
        raise OperatorError(f"kv_connector_extra_config: {error}", "see docs/reference for the keys") from error
