"""`MooncakeLayerwiseConnector`: P writes each layer into D's reserved blocks as it finishes. Only glue to vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from connectors.compat import (
    ConnectorBase,
    KVConnectorMetadata,
    KVConnectorRole,
    TransferResults,
    allocated_block_ids,
    cache_groups,
)
from connectors.fingerprint import fingerprint_of
from connectors.layerwise.metadata import LayerwiseMetadata, LayerwiseReport
from connectors.layerwise.scheduler import LayerwiseScheduler
from connectors.layerwise.worker import LayerwiseWorker
from connectors.logs import follow_vllm
from connectors.settings import load_settings
from connectors.worker_handshake import WorkerHandshake

if TYPE_CHECKING:
    import torch


class MooncakeLayerwiseConnector(ConnectorBase):
    """Registered by `kv_connector_module_path: connectors`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        follow_vllm()
        settings = load_settings(vllm_config)
        fingerprint = fingerprint_of(vllm_config, kv_cache_config, settings.config.hardware)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = LayerwiseScheduler(
                settings,
                fingerprint,
                num_blocks=kv_cache_config.num_blocks,
                single_group=len(cache_groups(kv_cache_config)) == 1,
            )
            self._close = self._scheduler.close
        else:
            self._worker = LayerwiseWorker(settings, fingerprint, vllm_config, kv_cache_config)
            self._close = self._worker.close
        self._invalid_block_ids: set[int] = set()
        self._report: LayerwiseReport | None = None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # The layer hooks are Python and would be skipped inside a replayed graph.
        return True

    # --- worker side -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerHandshake:
        return WorkerHandshake(self._worker.rank.info)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, LayerwiseMetadata):
            self._worker.preempt(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # In every series this is the first call of a step; start_load_kv comes after the layer hooks in 0.32.
        if isinstance(connector_metadata, LayerwiseMetadata):
            self._worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        # Requests and blocks come from our own metadata: what attn_metadata is differs between backends.
        self._worker.save_layer(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        results = self._worker.take_results()
        self._invalid_block_ids |= results.invalid_block_ids
        self._report = results.report
        return TransferResults(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> LayerwiseReport | None:
        report, self._report = self._report, None
        return report

    # --- scheduler side ----------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], WorkerHandshake]) -> None:
        self._scheduler.publish(tuple(metadata[key].info for key in sorted(metadata)))

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerHandshake]) -> None:
        self._scheduler.publish(tuple(metadata[rank].info for rank in sorted(metadata)))

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, allocated_block_ids(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, LayerwiseReport):
            self._scheduler.report(report)
        self._scheduler.released(set(connector_output.finished_sending or ()))

    def request_ended(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.ended(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_news()

    # --- both --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._close()
