"""The floor for a pulling decode engine: a connector whose cache comes from the engine's own memory.

It claims every prompt token, copies as many bytes as a transfer would move inside the process, and reports the
load finished. What is decoded is nonsense; the time it takes is what no transfer can beat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from connectors.compat import (
    ConnectorBase,
    KVConnectorMetadata,
    KVConnectorRole,
    TransferResults,
    allocated_block_ids,
    kv_params_of,
)


@dataclass(slots=True)
class FreeCopyMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Request id → its blocks."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class FreeCopyConnector(ConnectorBase):
    """A request with `kv_transfer_params: {"free_copy": true}` gets its cache from this process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._loads: dict[str, list[int]] = {}
        self._used: set[str] = set()
        self._finished: set[str] = set()
        self._caches: list[Any] = []

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, FreeCopyMetadata):
            for request_id, block_ids in metadata.loads.items():
                for cache in self._caches:
                    last = cache.shape[0] - 1
                    for block in block_ids:
                        cache[block].copy_(cache[last - block])
                self._finished.add(request_id)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        finished, self._finished = self._finished, set()
        return TransferResults(finished_recving=finished)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not kv_params_of(request).get("free_copy") or request.request_id in self._used:
            return 0, False
        return request.num_prompt_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._used.add(request.request_id)
        if num_external_tokens:
            self._loads[request.request_id] = list(allocated_block_ids(blocks)[0])

    def build_connector_meta(self, scheduler_output: Any) -> FreeCopyMetadata:
        loads, self._loads = self._loads, {}
        return FreeCopyMetadata(loads)
