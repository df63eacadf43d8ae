"""Instances come, drain and go while the proxy serves; breakers and probes keep work away from the sick."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from proxy.admin import create_admin_app
from proxy.auth import parse_keys
from proxy.breaker import Breaker, BreakerState
from proxy.services import Secrets
from proxy.settings import PolicySettings, ProbeSettings, Role, Settings
from tests.fakes.engine import FakeEngine, Fault
from tests.unit.proxy.conftest import Stack, StackOf

KEY = "apd-admin"
ADMIN = {"authorization": f"Bearer {KEY}"}
SECRETS = Secrets(admin_keys=parse_keys(f"ops {hashlib.sha256(KEY.encode()).hexdigest()}", "admin keys"))


@asynccontextmanager
async def admin_of(
    stack: Stack, reload: Callable[[], Settings] | None = None, **headers: str
) -> AsyncIterator[httpx.AsyncClient]:
    app = create_admin_app(stack.app, SECRETS, reload)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://admin", headers=headers or ADMIN) as client:
        yield client


async def test_without_the_admin_key_nothing_is_shown_or_changed(stack: Stack) -> None:
    async with admin_of(stack, authorization="Bearer wrong") as admin:
        assert (await admin.get("/instances")).status_code == 401
        assert (await admin.post("/instances/remove", json={"role": "decode", "url": "x"})).status_code == 401
        assert (await admin.get("/debug/records")).status_code == 401
    assert len(stack.app.services.fleet.instances()) == 2


async def test_a_drained_instance_gets_no_new_work_and_comes_back_when_added(stack_of: StackOf) -> None:
    async with stack_of(decode=2) as stack, admin_of(stack) as admin:
        gone = {"role": "decode", "url": stack.decode[0].url}
        assert (await admin.post("/instances/drain", json=gone)).json()["draining"] is True
        for _ in range(3):
            assert (await stack.chat())[0] == 200
        assert not stack.decode[0].seen
        assert (await admin.post("/instances", json=gone)).status_code == 201
        for _ in range(4):
            await stack.chat()
        assert stack.decode[0].seen


async def test_instances_are_added_and_removed_live(stack: Stack) -> None:
    extra = await FakeEngine(stack.cluster, "decode").start()
    change = {"role": "decode", "url": extra.url, "side": extra.side.address}
    async with admin_of(stack) as admin:
        added = (await admin.post("/instances", json=change)).json()
        assert added["available"] is True
        assert added["fingerprint"]["architecture"] == "Fake"
        old = {"role": "decode", "url": stack.decode[0].url}
        assert (await admin.post("/instances/remove", json=old)).status_code == 200
        assert (await stack.chat())[0] == 200
        assert (await admin.post("/instances/remove", json=old)).status_code == 404
    assert len(extra.seen) == 1
    await extra.stop()


@pytest.mark.parametrize(
    "body", [{}, {"role": "chef", "url": "http://x"}, {"role": "decode", "url": "ftp://x"}, {"role": "decode"}]
)
async def test_what_is_no_instance_is_a_400(stack: Stack, body: dict[str, str]) -> None:
    async with admin_of(stack) as admin:
        assert (await admin.post("/instances", json=body)).status_code == 400


async def test_a_probe_takes_an_instance_out_and_back(stack_of: StackOf) -> None:
    async with stack_of(prefill=2, probes=ProbeSettings(interval_s=0, failures=2)) as stack:
        probes = stack.app.services.probes
        await probes.probe_all()
        stack.prefill[0].healthy = False
        await probes.probe_all()
        assert all(i.available() for i in stack.app.services.fleet.instances())
        await probes.probe_all()
        for _ in range(3):
            assert (await stack.chat())[0] == 200
        assert not stack.prefill[0].seen
        stack.prefill[0].healthy = True
        await probes.probe_all()
        for _ in range(2):
            await stack.chat()
        assert stack.prefill[0].seen


async def test_an_instance_that_never_answered_is_out_after_one_probe(stack: Stack) -> None:
    stack.prefill[0].healthy = False
    await stack.app.services.probes.probe_all()
    assert not stack.app.services.fleet.instances(Role.PREFILL)[0].available()


async def test_an_engine_that_must_be_restarted_gets_no_new_work_however_healthy_it_answers(
    stack_of: StackOf,
) -> None:
    async with stack_of(decode=2, sides=True) as stack:
        probes = stack.app.services.probes
        stack.decode[0].side.unsound = "blocks in quarantine"
        for _ in range(2):
            await probes.probe_all()
            assert (await stack.chat())[0] == 200
        assert not stack.decode[0].seen
        stack.decode[0].side.unsound = ""
        await probes.probe_all()
        for _ in range(2):
            await stack.chat()
        assert stack.decode[0].seen


async def test_without_any_decode_instance_prefill_does_not_compute_in_vain(stack: Stack) -> None:
    stack.app.services.fleet.instances(Role.DECODE)[0].healthy = False
    assert (await stack.chat())[0] == 503
    assert (await stack.chat(prompt_logprobs=1))[0] == 503
    assert not stack.prefill[0].seen


async def test_a_breaker_keeps_work_from_an_instance_that_fails_and_a_4xx_never_trips_it(
    stack_of: StackOf,
) -> None:
    async with stack_of(prefill=2, retries=3) as stack:
        sick = stack.prefill[0]
        sick.faults.extend([Fault.HTTP_400] * 8)
        for _ in range(16):
            await stack.chat()
        instance = stack.app.services.fleet.instances()[0]
        assert instance.breaker.allows(0.0)
        sick.faults.extend([Fault.CLOSE] * 50)
        for _ in range(20):
            assert (await stack.chat())[0] == 200
        before = len(sick.seen)
        for _ in range(5):
            assert (await stack.chat())[0] == 200
        assert len(sick.seen) == before


async def test_without_any_prefill_instance_decode_computes_alone_or_the_client_is_told(stack_of: StackOf) -> None:
    for fallback, wanted in (("local", 200), ("none", 503)):
        async with stack_of(policy=PolicySettings(fallback=fallback)) as stack:
            stack.app.services.fleet.instances()[0].healthy = False
            async with stack.http.post(
                stack.url + "/v1/chat/completions", json={"model": "fake", "messages": [], "max_tokens": 2}
            ) as answer:
                assert answer.status == wanted
                assert wanted == 200 or answer.headers["retry-after"]


def test_the_breaker_opens_waits_tries_once_and_closes() -> None:
    breaker = Breaker(threshold=2, first_pause_s=10)
    breaker.failed(0.0)
    assert breaker.state(0.0) is BreakerState.CLOSED
    breaker.failed(1.0)
    assert not breaker.allows(5.0)
    assert breaker.state(11.5) is BreakerState.HALF_OPEN
    breaker.begin(11.5)
    assert not breaker.allows(11.6)
    breaker.failed(12.0)
    assert not breaker.allows(31.0)
    assert breaker.allows(32.5)
    breaker.begin(32.5)
    breaker.abandoned()
    assert breaker.allows(32.6)
    breaker.succeeded()
    assert breaker.state(32.7) is BreakerState.CLOSED


async def test_draining_refuses_new_requests_and_finishes_open_streams(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.05) as stack:
        open_stream = asyncio.create_task(stack.chat(stream=True, max_tokens=10))
        while not stack.decode[0].seen:
            await asyncio.sleep(0.01)
        stack.app.services.admission.draining = True
        assert (await stack.chat())[0] == 503
        status, body = await open_stream
        assert status == 200
        assert body.endswith(b"[DONE]\n\n")
