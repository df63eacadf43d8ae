"""Trace context reaches both engines; spans are made when a collector is configured."""

from __future__ import annotations

import pytest

from proxy.tracing import Tracing
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, chat_body

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_without_a_collector_the_clients_context_goes_to_both_engines_as_it_came(stack: Stack) -> None:
    await stack.post("/v1/chat/completions", chat_body(), traceparent=PARENT, tracestate="a=b")
    for engine in (stack.prefill[0], stack.decode[0]):
        headers = {k.lower(): v for k, v in engine.seen[0].headers.items()}
        assert (headers["traceparent"], headers["tracestate"]) == (PARENT, "a=b")


async def test_without_a_context_none_is_invented(stack: Stack) -> None:
    await stack.chat()
    assert "traceparent" not in {k.lower() for k in stack.prefill[0].seen[0].headers}


async def test_with_a_collector_each_leg_is_a_child_span(stack: Stack) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    object.__setattr__(stack.app.services, "tracing", Tracing(provider))
    stack.prefill[0].faults.append(Fault.CLOSE)
    status, _ = await stack.post("/v1/chat/completions", chat_body(True), traceparent=PARENT)
    assert status == 200
    spans = {f"{s.name} {s.status.status_code.name}": s for s in memory.get_finished_spans()}
    assert set(spans) == {"prefill ERROR", "prefill UNSET", "decode UNSET", "POST /v1/chat/completions UNSET"}
    whole = spans["POST /v1/chat/completions UNSET"]
    assert f"{whole.context.trace_id:032x}" == PARENT.split("-")[1]
    for name in ("prefill UNSET", "decode UNSET"):
        assert spans[name].parent.span_id == whole.context.span_id
    told = {k.lower(): v for k, v in stack.decode[0].seen[0].headers.items()}["traceparent"].split("-")
    assert told[1] == PARENT.split("-")[1]
    assert told[2] == f"{spans['decode UNSET'].context.span_id:016x}"
    assert "ascend_pd.phase.prefill_ms" in whole.attributes
