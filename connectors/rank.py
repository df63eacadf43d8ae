"""What every worker of either connector owns: its device, its transport endpoint, its registered cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.errors import LocalProtocolError
from ascend_pd.layout.description import KVLayout
from ascend_pd.wire.messages import WorkerInfo
from connectors.compat import cache_groups
from connectors.device import create_device
from connectors.device.kv_layout import tensors_of
from connectors.memory import describe_worker
from connectors.settings import ConnectorSettings
from connectors.transport import Placement, create
from connectors.transport.base import Transport
from connectors.transport.faulty import FaultyTransport
from connectors.transport.worker_service import WorkerService


class Rank:
    """One worker process.

    Raises:
        OperatorError: the device or the transport cannot be opened.
    """

    def __init__(self, settings: ConnectorSettings, vllm_config: Any, kv_cache_config: Any) -> None:
        self._settings = settings
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._layout: KVLayout | None = None
        self._service: WorkerService | None = None
        self.device = create_device(settings.config.hardware)
        self.device.bind_thread()
        self.transport: Transport = create(settings.config, Placement(settings.role, self.device.index))
        if settings.faults is not None:
            self.transport = FaultyTransport(self.transport, settings.faults)

    @property
    def single_group(self) -> bool:
        """The model has one KV cache group, so failed loads are named by their block ids."""
        return len(cache_groups(self._kv_cache_config)) == 1

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Make the cache reachable and describe it.

        Raises:
            OperatorError: a cache that cannot be transferred.
        """
        hardware = self._settings.config.hardware
        self._layout = describe_worker(self._vllm_config, self._kv_cache_config, kv_caches, hardware)
        tensors = (tensor for cache in kv_caches.values() for tensor in tensors_of(cache))
        self.transport.register(self.device.adopt(tensors))

    def serve_peers(self) -> None:
        """Gather or scatter small pieces and add up what was moved, for peers that ask: called once, after
        `register`, where peers read from here or write to.

        Raises:
            OperatorError: the host's address cannot be listened on.
        """
        config = self._settings.config
        if config.staging_bytes or config.checksum:
            self._service = WorkerService(
                self.device,
                self.transport,
                self.info.layout,
                host=config.host,
                secret=self._settings.secret,
                staging_bytes=config.staging_bytes,
                checksums=config.checksum,
                idle_s=2 * config.max_hold_seconds,
            )

    def fenced(self) -> None:
        """The transport was rotated: what peers ordered to be scattered before is not carried out any more."""
        if self._service:
            self._service.fenced()

    @property
    def info(self) -> WorkerInfo:
        """What peers must know of this rank now.

        Raises:
            LocalProtocolError: no cache is registered yet.
        """
        layout = self._layout
        if layout is None:
            raise LocalProtocolError("register_kv_caches comes first")
        service = self._service
        return WorkerInfo(
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            transport=self.transport.name,
            session=self.transport.session,
            service_host=self._settings.config.host if service else "",
            service_port=service.port if service else 0,
            service_life=service.life if service else "",
            stages=service is not None and service.stages,
            checksums=service is not None and service.checksums,
            layout=layout,
        )

    def close(self) -> None:
        """Close the endpoint and the service for peers. Safe to repeat."""
        if self._service:
            self._service.close()
        self.transport.close()
