"""The metaserver's Prometheus metrics, one registry per app."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest


class Metrics:
    """What `/metrics` shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        prefix = "ascend_pd_metaserver"
        self.reservations = Gauge(f"{prefix}_reservations", "Live reservations.", registry=self.registry)
        self.reservation_bytes = Gauge(
            f"{prefix}_reservation_bytes", "Size of live reservations as posted.", registry=self.registry
        )
        self.expired = Gauge(
            f"{prefix}_expired_reservations", "Reservations that ended by their deadline.", registry=self.registry
        )
        self.waits = Gauge(f"{prefix}_waits", "Requests waiting for a reservation.", registry=self.registry)
        self.engines = Gauge(f"{prefix}_engines", "Live engines.", ["role"], registry=self.registry)
        self.posts = Counter(f"{prefix}_posts", "Posted reservations.", ["outcome"], registry=self.registry)
        self.lookups = Counter(
            f"{prefix}_lookups", "Requests for a reservation.", ["outcome"], registry=self.registry
        )
        self.lookup_seconds = Histogram(
            f"{prefix}_lookup_seconds",
            "Time until a reservation that was asked for was there.",
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 30, 60),
            registry=self.registry,
        )
        self.refused = Counter(f"{prefix}_refused", "Refused requests.", ["status"], registry=self.registry)

    def text(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)
