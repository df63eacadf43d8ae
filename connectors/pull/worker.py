"""One rank's worker side: its cache registered and described, and on D the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.wire.identity import Fingerprint
from ascend_pd.wire.messages import WorkerInfo
from connectors.compat import cache_groups
from connectors.device import create_device
from connectors.device.kv_layout import tensors_of
from connectors.memory import describe_worker
from connectors.pull.metadata import PullMetadata
from connectors.pull.peers import PeerDirectory
from connectors.pull.reader import LoadResults, Reader
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.transport import create


class PullWorker:
    """Owns the rank's transport endpoint, its side-channel client and, on D, its reader.

    Raises:
        OperatorError: the transport cannot be opened.
    """

    def __init__(
        self, settings: ConnectorSettings, fingerprint: Fingerprint, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._device = create_device(settings.config.hardware)
        self._device.bind_thread()
        self._transport = create(settings.config)
        self._client: SideChannelClient | None = None
        self._reader: Reader | None = None
        self._info: WorkerInfo | None = None

    @property
    def info(self) -> WorkerInfo:
        """What peers must know of this rank; there once the caches are registered."""
        if self._info is None:
            raise RuntimeError("register_kv_caches comes first")
        return self._info

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Make the cache reachable and describe it.

        Raises:
            OperatorError: a cache that cannot be transferred.
        """
        layout = describe_worker(
            self._vllm_config, self._kv_cache_config, kv_caches, self._settings.config.hardware
        )
        self._transport.register(
            self._device.adopt(tensor for cache in kv_caches.values() for tensor in tensors_of(cache))
        )
        self._info = WorkerInfo(
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            transport=self._transport.name,
            session=self._transport.session,
            layout=layout,
        )
        settings = self._settings
        if settings.is_consumer:
            self._client = SideChannelClient(settings.secret, f"{settings.engine_id}/r{layout.tp_rank}")
            peers = PeerDirectory(
                self._client, self._fingerprint, layout, self._transport.name, settings.config.peer_tp_size
            )
            self._reader = Reader(
                settings,
                self._device,
                self._transport,
                peers,
                self._client,
                tp_rank=layout.tp_rank,
                single_group=len(cache_groups(self._kv_cache_config)) == 1,
            )

    def start(self, metadata: PullMetadata) -> None:
        """Begin this step's loads and cancel those of aborted requests."""
        if self._reader:
            for order in metadata.loads:
                self._reader.start(order)
            for request_id in metadata.cancels:
                self._reader.cancel(request_id)

    def take_results(self) -> LoadResults:
        """Loads that ended since the last call."""
        return self._reader.take_results() if self._reader else LoadResults()

    def close(self) -> None:
        """Close endpoint, client and threads. Safe to repeat."""
        self._transport.close()
        if self._reader:
            self._reader.close()
        if self._client:
            self._client.close()
