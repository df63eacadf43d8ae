"""Prometheus metrics. Observing costs a few list operations; families are built when somebody scrapes."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.admission import Admission
from proxy.breaker import BreakerState
from proxy.fleet import Fleet
from proxy.record import PHASES, Record

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (1.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)
PASSED = "passed"
"""Route of requests that carry no tokens; the histograms are about those that do."""


class Histogram:
    """Counts by upper bound."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """In Prometheus' form."""
        family = HistogramMetricFamily(name, text)
        self.add_to(family, [])
        return family

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add this series to a family."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), total))
        family.add_metric(labels, buckets, self._sum)


class Metrics(Collector):
    """All series of one process."""

    def __init__(self, fleet: Fleet, admission: Admission) -> None:
        self._fleet = fleet
        self._admission = admission
        self._requests: Counter[tuple[str, str, str]] = Counter()
        self._retries = 0
        self._errors: Counter[str] = Counter()
        self._kv_bytes = 0
        self._prompt_tokens = 0
        self._e2e = Histogram(SECONDS)
        self._ttft = Histogram(SECONDS)
        self._tpot = Histogram(SECONDS)
        self._phases = {name: Histogram(SECONDS) for name in PHASES}
        self._prompts = Histogram(TOKENS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def count(self, record: Record) -> None:
        """One request has ended."""
        if record.route == PASSED:
            # Any path below /v1 is passed on: as labels they would be without bound.
            path = "/v1/*" if record.path.startswith("/v1/") else record.path
            self._requests[(path, str(record.status), record.route)] += 1
            if record.error:
                self._errors[record.error] += 1
            return
        self._requests[(record.path, str(record.status), record.route)] += 1
        self._retries += record.retries
        self._prompt_tokens += record.prompt_tokens
        self._prompts.observe(record.prompt_tokens)
        self._e2e.observe(record.ended_at - record.received_at)
        if record.error:
            self._errors[record.error] += 1
        if record.first_event_at and record.stream:
            self._ttft.observe(record.first_event_at - record.received_at)
            if record.events > 1:
                self._tpot.observe(record.tpot_ms() / 1e3)

    def count_phases(self, record: Record) -> None:
        """The phases of a request whose stories are in."""
        for name, value in record.phases_ms().items():
            self._phases[name].observe(value / 1e3)
        self._kv_bytes += record.bytes_moved()

    def exposition(self) -> bytes:
        """The text that /metrics serves."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Prometheus' own interface."""
        yield from self._counters()
        yield self._e2e.family("ascend_pd_proxy_request_duration_seconds", "From receipt to the last byte")
        yield self._ttft.family("ascend_pd_proxy_time_to_first_token_seconds", "Streams: receipt to first event")
        yield self._tpot.family("ascend_pd_proxy_time_per_output_token_seconds", "Streams: between later events")
        yield self._prompts.family("ascend_pd_proxy_request_prompt_tokens", "Prompt tokens, as far as known")
        phases = HistogramMetricFamily(
            "ascend_pd_proxy_phase_duration_seconds",
            "Phases of sampled requests; they add up to the whole",
            labels=["phase"],
        )
        for name, histogram in self._phases.items():
            histogram.add_to(phases, [name])
        yield phases
        yield from self._gauges()

    def _counters(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "ascend_pd_proxy_requests", "Requests by outcome", labels=["path", "status", "route"]
        )
        for labels, value in self._requests.items():
            requests.add_metric(list(labels), value)
        yield requests
        errors = CounterMetricFamily("ascend_pd_proxy_errors", "Errors told to clients, by kind", labels=["kind"])
        for kind, value in self._errors.items():
            errors.add_metric([kind], value)
        yield errors
        yield CounterMetricFamily("ascend_pd_proxy_retries", "Attempts after the first", value=self._retries)
        yield CounterMetricFamily("ascend_pd_proxy_prompt_tokens", "Prompt tokens", value=self._prompt_tokens)
        yield CounterMetricFamily(
            "ascend_pd_proxy_kv_transfer_bytes", "KV cache moved for sampled requests", value=self._kv_bytes
        )

    def _gauges(self) -> Iterable[Metric]:
        running_now = GaugeMetricFamily(
            "ascend_pd_proxy_requests_running", "Requests under way", value=self._admission.running
        )
        waiting_now = GaugeMetricFamily(
            "ascend_pd_proxy_requests_waiting", "Requests waiting for a place", value=self._admission.queued
        )
        labels = ["instance", "role"]
        up = GaugeMetricFamily("ascend_pd_proxy_instance_available", "1 when it may take new work", labels=labels)
        tokens = GaugeMetricFamily("ascend_pd_proxy_instance_tokens", "Outstanding tokens", labels=labels)
        running = GaugeMetricFamily("ascend_pd_proxy_instance_requests", "Requests on it", labels=labels)
        tripped = GaugeMetricFamily(
            "ascend_pd_proxy_instance_breaker_open", "1 when its breaker is not closed", labels=labels
        )
        now = time.monotonic()
        for instance in self._fleet.instances():
            label = [instance.key, instance.role.value]
            up.add_metric(label, float(instance.available(now)))
            tokens.add_metric(label, instance.tokens)
            running.add_metric(label, instance.requests)
            tripped.add_metric(label, float(instance.breaker.state(now) is not BreakerState.CLOSED))
        return (running_now, waiting_now, up, tokens, running, tripped)
