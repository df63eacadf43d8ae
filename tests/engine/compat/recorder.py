"""A connector that writes down how vLLM's scheduler uses it, and answers as the test says."""

from __future__ import annotations

from typing import Any

import connectors.compat as compat


class Recorder(compat.ConnectorBase):
    """Loads everything asynchronously for do_remote_prefill; holds the blocks after do_remote_decode."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.calls: list[tuple[Any, ...]] = []

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        self.calls.append(("matched", request.request_id, num_computed_tokens))
        params = compat.kv_params_of(request)
        if not params.get("do_remote_prefill"):
            return 0, False
        return request.num_tokens - num_computed_tokens, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = compat.allocated_block_ids(blocks)
        self.calls.append(("alloc", request.request_id, len(ids[0]), num_external_tokens))
        if num_external_tokens:
            request.kv_transfer_params["do_remote_prefill"] = False
            self.allocated = ids

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return compat.KVConnectorMetadata()

    def update_connector_output(self, connector_output: Any) -> None:
        self.calls.append(("output",))

    def request_ended(self, request: Any, block_ids: compat.BlockIds) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("ended", request.request_id, [len(ids) for ids in block_ids]))
        if compat.kv_params_of(request).get("do_remote_decode"):
            return True, {"remote_block_ids": list(block_ids)}
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]
