"""W3C trace context through both legs, and spans for an OpenTelemetry collector when one is configured.

Without a collector a client's `traceparent` goes to both engines as it came. With one, a request is a span with a
child per leg, and each engine gets its leg's context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from ascend_pd.errors import OperatorError
from proxy.record import Record
from proxy.settings import ObservabilitySettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span


class Leg(Protocol):
    """One upstream call of a traced request."""

    headers: dict[str, str]

    def end(self, error: str = "") -> None:
        """The call is over."""


class Trace(Protocol):
    """One request."""

    def leg(self, role: str, transfer_id: str) -> Leg:
        """A call begins."""

    def end(self, record: Record) -> None:
        """The request is over."""


class _PassedLeg:
    """Carries what the client sent."""

    __slots__ = ("headers",)

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def end(self, error: str = "") -> None:
        pass


class _PassedTrace:
    __slots__ = ("_leg",)

    def __init__(self, headers: dict[str, str]) -> None:
        self._leg = _PassedLeg(headers)

    def leg(self, role: str, transfer_id: str) -> Leg:
        return self._leg

    def end(self, record: Record) -> None:
        pass


_UNTRACED = _PassedTrace({})


class Tracing:
    """Begins traces; without a provider it only passes contexts on."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("ascend-pd") if provider is not None else None

    def begin(self, path: str, traceparent: str, tracestate: str) -> Trace:
        """A request arrived with this context (empty for none)."""
        headers = {}
        if traceparent:
            headers["traceparent"] = traceparent
            if tracestate:
                headers["tracestate"] = tracestate
        if self._tracer is None:
            return _PassedTrace(headers) if headers else _UNTRACED
        return _SpanTrace(self._tracer, path, headers)

    def close(self) -> None:
        """Send what is left."""
        if self._provider is not None:
            self._provider.shutdown()


class _SpanLeg:
    __slots__ = ("_span", "headers")

    def __init__(self, span: Span, headers: dict[str, str]) -> None:
        self._span = span
        self.headers = headers

    def end(self, error: str = "") -> None:
        from opentelemetry.trace import Status, StatusCode

        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end()


class _SpanTrace:
    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Any, path: str, headers: dict[str, str]) -> None:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        parent = TraceContextTextMapPropagator().extract(headers)
        self._span: Span = tracer.start_span(f"POST {path}", context=parent, kind=SpanKind.SERVER)
        self._context = set_span_in_context(self._span)

    def leg(self, role: str, transfer_id: str) -> Leg:
        from opentelemetry.trace import SpanKind, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        span = self._tracer.start_span(role, context=self._context, kind=SpanKind.CLIENT)
        span.set_attribute("ascend_pd.transfer_id", transfer_id)
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, set_span_in_context(span))
        return _SpanLeg(span, headers)

    def end(self, record: Record) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        span.set_attribute("http.response.status_code", record.status)
        span.set_attribute("gen_ai.request.model", record.model)
        span.set_attribute("ascend_pd.request_id", record.request_id)
        span.set_attribute("ascend_pd.transfer_id", record.transfer_id)
        span.set_attribute("ascend_pd.route", record.route)
        for phase, value in record.phases_ms().items():
            span.set_attribute(f"ascend_pd.phase.{phase}_ms", value)
        if record.error:
            span.set_status(Status(StatusCode.ERROR, record.error))
        span.end()


def make_tracing(settings: ObservabilitySettings) -> Tracing:
    """Spans to the configured collector, or none.

    Raises:
        OperatorError: a collector is configured and OpenTelemetry is not installed.
    """
    if not settings.otlp_endpoint:
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise OperatorError(
            "observability.otlp_endpoint is set, but OpenTelemetry is not installed",
            "pip install 'ascend-pd[otel]'",
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": settings.service_name}))
    endpoint = settings.otlp_endpoint.rstrip("/") + "/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracing(provider)
