"""`MooncakeConnector`: D reads the cache of a finished prefill out of P's blocks. Only glue to vLLM is here."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ascend_pd.wire.messages import WorkerInfo
from connectors.compat import (
    ConnectorBase,
    KVConnectorMetadata,
    KVConnectorRole,
    TransferResults,
    allocated_block_ids,
)
from connectors.fingerprint import fingerprint_of
from connectors.logs import follow_vllm
from connectors.pull.metadata import PullMetadata, PullReport
from connectors.pull.scheduler import PullScheduler
from connectors.pull.worker import PullWorker
from connectors.settings import load_settings
from connectors.worker_handshake import WorkerHandshake

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)


class MooncakeConnector(ConnectorBase):
    """Registered by `kv_connector_module_path: connectors`."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        follow_vllm()
        settings = load_settings(vllm_config)
        fingerprint = fingerprint_of(vllm_config, kv_cache_config, settings.config.hardware)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = PullScheduler(settings, fingerprint)
            self._close = self._scheduler.close
        else:
            self._worker = PullWorker(settings, fingerprint, vllm_config, kv_cache_config)
            self._close = self._worker.close
        self._invalid_block_ids: set[int] = set()
        self._report: PullReport | None = None

    # --- worker side -------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> WorkerHandshake:
        return WorkerHandshake(self._worker.rank.info)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        if isinstance(metadata, PullMetadata):
            self._worker.start(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def transfer_results(self, finished_request_ids: set[str]) -> TransferResults:
        results = self._worker.take_results()
        self._invalid_block_ids |= results.invalid_block_ids
        if results.reports or results.unsound:
            self._report = PullReport(results.reports, results.unsound)
        metadata = self._connector_metadata
        released = metadata.released if isinstance(metadata, PullMetadata) else set()
        return TransferResults(
            finished_sending=set(released), finished_recving=results.finished, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> PullReport | None:
        report, self._report = self._report, None
        return report

    # --- scheduler side ----------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], WorkerHandshake]) -> None:
        workers: tuple[WorkerInfo, ...] = tuple(metadata[key].info for key in sorted(metadata))
        self._scheduler.publish(workers)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, WorkerHandshake]) -> None:
        self._scheduler.publish(tuple(metadata[rank].info for rank in sorted(metadata)))

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, allocated_block_ids(blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._scheduler.build_metadata()

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, PullReport):
            self._scheduler.report(report)

    def request_ended(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.ended(request, block_ids)

    # --- both --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        self._close()
