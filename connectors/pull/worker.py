"""One rank's worker side: its cache registered and described, and on D the reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.wire.identity import Fingerprint
from connectors.peers import PeerDirectory
from connectors.pull.metadata import PullMetadata
from connectors.pull.reader import LoadResults, Reader
from connectors.rank import Rank
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient


class PullWorker:
    """Owns the rank's transport endpoint and, on D, its side-channel client and its reader.

    Raises:
        OperatorError: the transport cannot be opened.
    """

    def __init__(
        self, settings: ConnectorSettings, fingerprint: Fingerprint, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self.rank = Rank(settings, vllm_config, kv_cache_config)
        self._client: SideChannelClient | None = None
        self._reader: Reader | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Make the cache reachable and describe it; on D, get ready to read.

        Raises:
            OperatorError: a cache that cannot be transferred.
        """
        self.rank.register(kv_caches)
        if self._settings.is_producer:
            self.rank.serve_peers()
        if not self._settings.is_consumer:
            return
        settings, layout, transport = self._settings, self.rank.info.layout, self.rank.transport
        self._client = SideChannelClient(
            settings.secret, f"{settings.engine_id}/r{layout.tp_rank}", faults=settings.faults
        )
        peers = PeerDirectory(
            self._client,
            self._fingerprint,
            layout,
            transport.name,
            settings.config.peer_tp_size,
            push=False,
            checksum=settings.config.checksum,
        )
        self._reader = Reader(
            settings,
            self.rank.device,
            transport,
            peers,
            self._client,
            layout=layout,
            single_group=self.rank.single_group,
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
        self.rank.close()
        if self._reader:
            self._reader.close()
        if self._client:
            self._client.close()
