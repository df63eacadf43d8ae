"""What all requests of one process share, put together once."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass

from ascend_pd.metaserver_client import MetaserverClient
from proxy.admission import Admission
from proxy.auth import Key, Keyring
from proxy.callbacks import Callbacks
from proxy.dialects import DIALECTS, Dialect
from proxy.fleet import Fleet
from proxy.holds import Holds
from proxy.journal import Journal
from proxy.metrics import Metrics
from proxy.probes import Probes
from proxy.settings import Settings
from proxy.sidechannel import SideChannel
from proxy.tracing import Tracing, make_tracing
from proxy.upstream import Upstream


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the loader read from the files that the settings name. Never logged."""

    side_channel: bytes = b""
    keys: tuple[Key, ...] = ()
    admin_keys: tuple[Key, ...] = ()
    engine_key: str = ""

    def __repr__(self) -> str:
        return f"Secrets({len(self.keys)} keys, {len(self.admin_keys)} admin keys)"


@dataclass(frozen=True, slots=True)
class Services:
    """Owned by the event loop that made it."""

    settings: Settings
    fleet: Fleet
    upstream: Upstream
    dialects: dict[str, Dialect]
    holds: Holds
    callbacks: Callbacks
    admission: Admission
    keyring: Keyring
    metrics: Metrics
    journal: Journal
    probes: Probes
    tracing: Tracing
    engine_headers: dict[str, str]

    @staticmethod
    def now() -> float:
        """The monotonic clock that breakers and records use."""
        return time.monotonic()

    async def close(self) -> None:
        """End what runs, let releases go out, close connections."""
        await self.probes.close()
        await self.holds.close()
        await self.upstream.close()
        self.journal.close()
        self.tracing.close()


def make_services(settings: Settings, secrets: Secrets) -> Services:
    """Called inside the running loop."""
    tls = ssl.create_default_context(cafile=settings.listener.engine_ca) if settings.listener.engine_ca else None
    fleet = Fleet(settings)
    upstream = Upstream(settings.timeouts, tls)
    channel = SideChannel(secrets.side_channel)
    holds = Holds(channel, MetaserverClient(secrets.side_channel))
    admission = Admission(settings.admission)
    metrics = Metrics(fleet, admission)
    services = Services(
        settings=settings,
        fleet=fleet,
        upstream=upstream,
        dialects={name: make() for name, make in DIALECTS.items()},
        holds=holds,
        callbacks=Callbacks(),
        admission=admission,
        keyring=Keyring(secrets.keys),
        metrics=metrics,
        journal=Journal(settings.observability, metrics, holds),
        probes=Probes(settings.probes, fleet, upstream, channel),
        tracing=make_tracing(settings.observability),
        engine_headers={"authorization": f"Bearer {secrets.engine_key}"} if secrets.engine_key else {},
    )
    services.probes.start()
    return services
