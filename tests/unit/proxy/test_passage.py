"""What is passed on whole obeys the rules of token-carrying requests: keys, limits, journal, a client that leaves."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import aiohttp
import pytest

from proxy.auth import parse_keys
from proxy.passage import media_type
from proxy.services import Secrets
from proxy.settings import AdmissionSettings, TimeoutSettings
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf

KEY = "apd-alice"
ALICE = {"authorization": f"Bearer {KEY}"}
PASSED = ("/tokenize", "/detokenize", "/v1/embeddings", "/v1/audio/speech")


def secrets(limits: str = "") -> Secrets:
    return Secrets(keys=parse_keys(f"alice {hashlib.sha256(KEY.encode()).hexdigest()} {limits}", "keys"))


async def records_of(stack: Stack) -> list[dict[str, Any]]:
    return await stack.app.services.journal.views()


async def journalled(stack: Stack, number: int) -> list[dict[str, Any]]:
    async with asyncio.timeout(5):
        while len(records := await records_of(stack)) < number:
            await asyncio.sleep(0.01)
    return records


@pytest.mark.parametrize("path", PASSED)
@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON",
        "APPLICATION/json;charset=utf-8",
        " application/json",
        "application/vnd.x+json",
        "text/json",
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/mixed",
        "multipart/form-data-not",
        "application/json, multipart/form-data",
        "",
    ],
)
async def test_transfer_params_are_found_whatever_the_body_calls_itself(
    stack_of: StackOf, path: str, content_type: str
) -> None:
    async with stack_of(union=1) as stack:
        for body in (b'{"kv_transfer_params":{}}', b'{"vllm_xargs":{"kv_transfer\\u005fparams":1}}', b"no json"):
            status, _ = await stack.post(path, body, **{"content-type": content_type})
            assert status == 400
        assert not stack.union[0].passed


async def test_a_form_is_passed_on_as_it_came(stack_of: StackOf) -> None:
    async with stack_of(union=1) as stack:
        form = {"content-type": "Multipart/Form-Data; boundary=b"}
        assert (await stack.post("/v1/audio/transcriptions", b"--b\r\n\xff\r\n--b--\r\n", **form))[0] == 200
        [seen] = stack.union[0].passed
        assert (seen.path, seen.raw) == ("/v1/audio/transcriptions", b"--b\r\n\xff\r\n--b--\r\n")
        assert seen.headers["content-type"] == form["content-type"]


@pytest.mark.parametrize(("given", "is_a"), [("A/B ; c=d", "a/b"), ("", ""), (";multipart/form-data", "")])
def test_the_media_type_stands_before_the_parameters(given: str, is_a: str) -> None:
    assert media_type(given) == is_a


@pytest.mark.parametrize("path", PASSED)
async def test_it_needs_a_key_and_counts_against_its_limits(stack_of: StackOf, path: str) -> None:
    async with stack_of(union=1, secrets=secrets("requests_per_minute=2")) as stack:
        statuses = [(await stack.post(path, {}, **ALICE))[0] for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert (await stack.post(path, {}))[0] == 401
        assert [(r["path"], r["key"], r["status"]) for r in await journalled(stack, 4)] == [
            (path, "", 401),
            (path, "alice", 429),
            (path, "alice", 200),
            (path, "alice", 200),
        ]


@pytest.mark.parametrize("path", PASSED)
async def test_it_waits_for_a_place_like_any_request(stack_of: StackOf, path: str) -> None:
    full = AdmissionSettings(max_running=1, max_queued=0)
    async with stack_of(union=1, admission=full) as stack:
        stack.prefill[0].faults.append(Fault.HANG)
        hanging = asyncio.create_task(stack.chat())
        while not stack.prefill[0].seen:
            await asyncio.sleep(0.01)
        assert (await stack.post(path, {}))[0] == 503
        hanging.cancel()
        async with asyncio.timeout(5):
            while (await stack.post(path, {}))[0] != 200:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("path", PASSED)
async def test_a_client_that_leaves_ends_the_engines_work(stack_of: StackOf, path: str) -> None:
    async with stack_of(union=1) as stack:
        stack.union[0].passing_s = 3600
        with pytest.raises(asyncio.TimeoutError):
            await stack.http.post(stack.url + path, json={}, timeout=aiohttp.ClientTimeout(total=0.3))
        [record] = await journalled(stack, 1)
        assert (record["status"], record["error"]) == (499, "client_gone")
        async with asyncio.timeout(5):
            while not stack.union[0].passed[0].aborted:
                await asyncio.sleep(0.01)
        assert stack.app.services.admission.running == 0
        assert all(i.requests == 0 for i in stack.app.services.fleet.instances())


async def test_it_may_not_take_longer_than_a_request_may(stack_of: StackOf) -> None:
    async with stack_of(union=1, timeouts=TimeoutSettings(request_s=0.3, drain_s=1)) as stack:
        stack.union[0].passing_s = 3600
        assert (await stack.post("/v1/embeddings", {}))[0] == 504


async def test_metrics_count_it_without_a_label_per_path(stack_of: StackOf) -> None:
    async with stack_of(union=1) as stack:
        for path in (*PASSED, *(f"/v1/random/{n}" for n in range(20))):
            assert (await stack.post(path, {}))[0] == 200
        await journalled(stack, 24)
        text = stack.app.services.metrics.exposition().decode()
    counted = [line for line in text.splitlines() if line.startswith("ascend_pd_proxy_requests_total")]
    assert sorted(counted) == [
        'ascend_pd_proxy_requests_total{path="/detokenize",route="passed",status="200"} 1.0',
        'ascend_pd_proxy_requests_total{path="/tokenize",route="passed",status="200"} 1.0',
        'ascend_pd_proxy_requests_total{path="/v1/*",route="passed",status="200"} 22.0',
    ]
    assert "ascend_pd_proxy_request_duration_seconds_count 0.0" in text


async def test_an_engines_refusal_and_its_absence_are_told(stack: Stack) -> None:
    assert (await stack.post("/v1/embeddings", {}))[0] == 501
    assert (await stack.post("/v1/..%2fadmin", {}))[0] == 404
    for instance in stack.app.services.fleet.instances():
        instance.healthy = False
    assert (await stack.post("/tokenize", {}))[0] == 503


async def test_records_on_the_public_listener_need_a_key_when_there_are_keys(stack_of: StackOf) -> None:
    for keys, headers, status in ((None, {}, 200), (secrets(), {}, 401), (secrets(), ALICE, 200)):
        async with (
            stack_of(secrets=keys) as stack,
            stack.http.get(stack.url + "/debug/records", headers=headers) as answer,
        ):
            assert answer.status == status
            assert ("records" in await answer.json()) is (status == 200)
