"""One rank's worker side of the layer-wise connector: P pushes; D's memory is written to and can be fenced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ascend_pd.errors import AscendPdError
from ascend_pd.wire.identity import Fingerprint
from connectors.device.kv_layout import layer_index
from connectors.layerwise.metadata import FenceReport, LayerwiseMetadata, LayerwiseReport
from connectors.layerwise.pusher import Pusher
from connectors.layerwise.writer import Writer
from connectors.peers import PeerDirectory
from connectors.rank import Rank
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.sidechannel.rendezvous import RendezvousClient

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class StepResults:
    """What vLLM is told at the end of a step."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    report: LayerwiseReport | None = None


class LayerwiseWorker:
    """Owns the rank's endpoint and, on P, its pusher.

    Raises:
        OperatorError: the transport cannot be opened.
    """

    def __init__(
        self, settings: ConnectorSettings, fingerprint: Fingerprint, vllm_config: Any, kv_cache_config: Any
    ) -> None:
        self._settings = settings
        self._fingerprint = fingerprint
        self.rank = Rank(settings, vllm_config, kv_cache_config)
        self._pusher: Pusher | None = None
        self._clients: list[SideChannelClient | RendezvousClient] = []
        self._metadata: LayerwiseMetadata | None = None
        self._receiving = False
        self._fences: list[FenceReport] = []
        self._fence_lock = threading.Lock()
        self._fence_thread: threading.Thread | None = None

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Make the cache reachable and describe it; on P, get ready to push.

        Raises:
            OperatorError: a cache that cannot be transferred.
        """
        self.rank.register(kv_caches)
        if self._settings.is_consumer:
            self.rank.serve_peers()
        if self._settings.is_producer:
            self._pusher = self._make_pusher()

    def begin_step(self, metadata: LayerwiseMetadata) -> None:
        """The first thing of a step."""
        self._metadata = metadata
        self._receiving = metadata.receiving
        if self._pusher:
            self._pusher.begin_step(metadata)
        if metadata.fence is not None:
            self._begin_fence(metadata.fence)

    def preempt(self, metadata: LayerwiseMetadata) -> None:
        """Blocks of these transfers are about to be overwritten."""
        if self._pusher and metadata.preempted:
            self._pusher.preempt(metadata.preempted)

    def save_layer(self, layer_name: str) -> None:
        """The attention of one layer is computed, its cache written."""
        # Hybrid models call this without a name for layers that have no cache of their own: see `end_step`.
        if self._pusher and layer_name:
            self._pusher.save_layer(layer_index(layer_name))

    def end_step(self) -> None:
        """After the forward."""
        if self._pusher:
            self._pusher.end_step()

    def take_results(self) -> StepResults:
        """What ended since the last call, together with what the scheduler side wants said."""
        results = StepResults()
        report = LayerwiseReport()
        if self._pusher:
            results.finished_sending, report.pushes, report.unsound = self._pusher.take_results()
        metadata = self._metadata
        if metadata is not None:
            results.finished_recving = set(metadata.received)
            results.failed_recving = set(metadata.failed)
            results.invalid_block_ids = set(metadata.invalid_block_ids)
            self._metadata = None
        with self._fence_lock:
            report.fences, self._fences = self._fences, []
        if report.pushes or report.fences or report.unsound:
            results.report = report
        return results

    def close(self) -> None:
        """Close endpoint, clients and threads. Safe to repeat."""
        self.rank.close()
        if self._fence_thread:
            self._fence_thread.join(5.0)
        if self._pusher:
            self._pusher.close()
        for client in self._clients:
            client.close()

    def _make_pusher(self) -> Pusher:
        settings, rank = self._settings, self.rank
        layout = rank.info.layout
        name = f"{settings.engine_id}/r{layout.worker}"
        client = SideChannelClient(settings.secret, name, faults=settings.faults)
        rendezvous = RendezvousClient(settings.secret, name)
        self._clients = [client, rendezvous]
        sinks = PeerDirectory(
            client,
            self._fingerprint,
            layout,
            rank.transport.name,
            settings.config.peer_tp_size,
            push=True,
            checksum=settings.config.checksum,
        )
        return Pusher(
            settings,
            rank.device,
            rank.transport,
            Writer(settings, rank.device, rank.transport, client, layout),
            sinks,
            client,
            rendezvous,
            layout=layout,
            num_ranks=settings.tp_size,
        )

    def _begin_fence(self, generation: int) -> None:
        self._fence_thread = threading.Thread(
            target=self._fence, args=(generation,), name=f"fence-{generation}", daemon=True
        )
        self._fence_thread.start()

    def _fence(self, generation: int) -> None:
        self.rank.device.bind_thread()
        failure = "the endpoint could not be destroyed"
        try:
            session = self.rank.transport.rotate(self._settings.fence_spare_s, lambda: self._receiving)
            self.rank.fenced()
            logger.warning("transport endpoint destroyed and opened anew as %s", session)
            failure = ""
        except AscendPdError as error:
            failure = str(error)
        finally:
            with self._fence_lock:
                self._fences.append(FenceReport(generation, self.rank.info, failure))
