"""One worker's endpoint and layout on its way to the scheduler side of the same engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from ascend_pd.wire.messages import WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Collected by vLLM after the caches are registered."""

    info: WorkerInfo
