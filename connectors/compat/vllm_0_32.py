"""vLLM 0.32: the CPU engine's series."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults as TransferResults
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from ascend_pd.errors import OperatorError
from connectors.compat.features import BlockIds, Features
from connectors.compat.groups import group_of
from connectors.device.kv_layout import CacheGroup

FEATURES = Features(
    fails_by_request=True,
    saves_on_empty_steps=True,
    loads_after_forward=True,
    local_hit_block_aligned=True,
    defers_block_free=True,
    steps_for_pending_push=True,
    drops_output_of_preempted=True,
    one_kv_storage=True,
    generate_reads_kv_params=True,
    cpu_block_multiple=32,
)


class ConnectorBase(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connectors' base class; see `connectors.compat`."""

    _cache_hit_source = CacheHitSource.P2P

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        return TransferResults()

    def request_ended(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_transfer_results(self, finished_req_ids: set[str]) -> TransferResults:
        return self.transfer_results(finished_req_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(self._kv_cache_config.transfer_group_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_ended(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        return self.request_ended(request, block_ids)


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """All KV cache groups, in the order of their lists in `BlockIds`.

    Raises:
        OperatorError: vLLM keeps a group of this model out of transfers (HiSparse).
    """
    groups = kv_cache_config.kv_cache_groups
    if len(kv_cache_config.transfer_group_ids) != len(groups):
        raise OperatorError("this model has a KV cache that vLLM keeps out of transfers", "serve it without P/D")
    return tuple(group_of(group) for group in groups)


def cpu_attention_isa(vllm_config: Any, spec: Any) -> str:
    """How this machine's CPU attention packs K inside a block (`vec`, `amx`, …); empty for MLA, whose rows are
    plain. Ask on the CPU platform only."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    if isinstance(spec, MLAAttentionSpec):
        return ""
    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype
    )
    return isa


__all__ = [
    "FEATURES",
    "ConnectorBase",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "TransferResults",
    "cache_groups",
    "cpu_attention_isa",
]
