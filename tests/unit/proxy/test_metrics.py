"""What the proxy tells about itself after some traffic."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.journal import AccessLog
from proxy.record import PHASES, Record
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(stack: Stack) -> Series:
    async with stack.http.get(stack.url + "/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
        return {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}


def total(series: Series, name: str, **labels: str) -> float:
    return sum(v for (n, found), v in series.items() if n == name and set(labels.items()) <= set(found))


async def test_requests_are_counted_by_path_status_and_route(stack: Stack) -> None:
    stack.decode[0].faults.append(Fault.HTTP_500)
    await stack.chat(stream=True)
    await stack.chat(model="nobody")
    await stack.chat(kv_transfer_params={})
    await stack.post("/v1/completions", {"model": "fake", "prompt": ["a", "b"], "max_tokens": 2})
    series = await scraped(stack)
    name = "ascend_pd_proxy_requests_total"
    assert total(series, name, path="/v1/chat/completions", status="200", route="disaggregated") == 1
    assert total(series, name, status="404") == 1
    assert total(series, name, status="400") == 1
    assert total(series, name, route="split") == 1
    assert total(series, "ascend_pd_proxy_retries_total") == 1
    assert total(series, "ascend_pd_proxy_errors_total", kind="refused") == 1
    assert total(series, "ascend_pd_proxy_time_to_first_token_seconds_count") == 1
    assert total(series, "ascend_pd_proxy_request_duration_seconds_count") == 4


async def test_instances_show_their_load_and_state(stack: Stack) -> None:
    series = await scraped(stack)
    assert total(series, "ascend_pd_proxy_instance_available") == 2
    stack.app.services.fleet.instances()[0].healthy = False
    assert total(await scraped(stack), "ascend_pd_proxy_instance_available") == 1
    assert total(series, "ascend_pd_proxy_instance_requests") == 0


async def test_phases_of_a_sampled_request_reach_the_histograms(stack_of: StackOf) -> None:
    async with stack_of(sides=True) as stack:
        await stack.chat(stream=True)
        async with stack.http.get(stack.url + "/debug/records") as answer:
            assert (await answer.json())["records"]
        for record in list(stack.app.services.journal._records):
            stack.app.services.metrics.count_phases(record)
        series = await scraped(stack)
        for phase in PHASES:
            assert total(series, "ascend_pd_proxy_phase_duration_seconds_count", phase=phase) >= 1
        assert total(series, "ascend_pd_proxy_kv_transfer_bytes_total") >= 4096


@pytest.mark.parametrize("first", [0.0, 1.25])
async def test_the_access_log_is_one_json_line_per_request(first: float) -> None:
    out = BytesIO()
    log = AccessLog(out)
    for number in range(3):
        log.write(Record(request_id=f"r{number}", received_at=1.0, first_event_at=first, ended_at=2.0, status=200))
    log.flush()
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1", "r2"]
    assert lines[0]["e2e_ms"] == 1000.0
    assert lines[0]["ttft_ms"] == (250.0 if first else None)
