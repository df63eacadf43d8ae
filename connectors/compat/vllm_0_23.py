"""vLLM 0.23: the series that vllm-ascend 0.23.0 runs on."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from ascend_pd.errors import OperatorError
from connectors.compat.features import BlockIds, Features
from connectors.compat.features import StandInResults as TransferResults
from connectors.compat.groups import group_of
from connectors.device.kv_layout import CacheGroup

FEATURES = Features(
    fails_by_request=False,
    saves_on_empty_steps=False,
    loads_after_forward=False,
    local_hit_block_aligned=False,
    defers_block_free=False,
    steps_for_pending_push=False,
    drops_output_of_preempted=False,
    one_kv_storage=False,
    generate_reads_kv_params=False,
    cpu_block_multiple=16,
)


class ConnectorBase(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """The connectors' base class; see `connectors.compat`."""

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        return TransferResults()

    def request_ended(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        # vLLM 0.32 clips the lists to the computed tokens itself; 0.23 gives everything that is allocated.
        groups = self._kv_cache_config.kv_cache_groups
        clipped = tuple(
            _computed(ids, group.kv_cache_spec, request.num_computed_tokens)
            for ids, group in zip(block_ids, groups, strict=True)
        )
        return self.request_ended(request, clipped)


def _computed(ids: list[int], spec: Any, num_computed_tokens: int) -> list[int]:
    from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec

    if not isinstance(spec, AttentionSpec) or isinstance(spec, CrossAttentionSpec | EncoderOnlyAttentionSpec):
        return ids
    return ids[: -(-num_computed_tokens // spec.block_size)]


def cache_groups(kv_cache_config: Any) -> tuple[CacheGroup, ...]:
    """All KV cache groups, in the order of their lists in `BlockIds`.

    Raises:
        OperatorError: there are several, and this series cannot be told of a failed load then.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) > 1:
        raise OperatorError(
            f"this model has {len(groups)} KV cache groups, and vLLM 0.23 cannot be told of a failed load then",
            "start the engine with --disable-hybrid-kv-cache-manager, or use vLLM 0.32",
        )
    return tuple(group_of(group) for group in groups)


def cpu_attention_isa(vllm_config: Any, spec: Any) -> str:
    """How this machine's CPU attention packs K inside a block (`vec`, `amx`, …); empty for MLA, whose rows are
    plain. Ask on the CPU platform only."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    if isinstance(spec, MLAAttentionSpec):
        return ""
    # 0.23 packs by the cache's block size, not by the group's.
    isa: str = _get_attn_isa(
        vllm_config.model_config.dtype,
        vllm_config.cache_config.block_size,
        spec.head_size,
        vllm_config.cache_config.cache_dtype,
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
