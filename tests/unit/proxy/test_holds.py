"""What the proxy tells engines beside the requests: keep, let go, why."""

from __future__ import annotations

import asyncio
import json

import pytest

from ascend_pd.wire.messages import Release, Renew
from proxy.settings import PolicySettings, ProbeSettings, Role
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body


async def until(condition, within_s: float = 20.0) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_hold_is_released_at_once_when_decode_fails(stack: Stack) -> None:
    stack.decode[0].faults.append(Fault.HTTP_500)
    status, _ = await stack.chat()
    first, second = (s.body["kv_transfer_params"]["transfer_id"] for s in stack.prefill[0].seen)
    assert status == 200
    await until(lambda: stack.cluster.released)
    assert stack.cluster.released == [first]
    assert stack.cluster.consumed == [second]


async def test_a_hold_is_released_at_once_when_the_client_leaves_before_the_first_token(stack: Stack) -> None:
    stack.decode[0].faults.append(Fault.STALL_FIRST)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.3):
            await stack.chat(stream=True)
    await until(lambda: stack.cluster.released and stack.decode[0].seen[0].aborted)
    message = next(m for m in stack.prefill[0].side.received if isinstance(m, Release))
    assert message.epoch == "epoch-1"
    assert message.reason == "the client left"


async def test_both_engines_are_told_when_their_side_channels_are_known(stack_of: StackOf) -> None:
    async with stack_of(sides=True) as stack:
        stack.decode[0].faults.append(Fault.STALL_FIRST)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await stack.chat(stream=True)
        for engine in (stack.prefill[0], stack.decode[0]):
            await until(lambda e=engine: any(isinstance(m, Release) for m in e.side.received))


async def test_a_hold_is_renewed_while_decode_queues(stack: Stack) -> None:
    stack.prefill[0].lease_s = 0.3
    stack.decode[0].faults.append(Fault.HANG)
    asking = asyncio.create_task(stack.chat(stream=True))
    await until(lambda: sum(isinstance(m, Renew) for m in stack.prefill[0].side.received) >= 2)
    asking.cancel()
    await until(lambda: stack.cluster.released)
    await asyncio.sleep(0.6)  # a renewal that was under way may be repeated on a busy machine
    renewals = sum(isinstance(m, Renew) for m in stack.prefill[0].side.received)
    await asyncio.sleep(0.6)
    assert renewals == sum(isinstance(m, Renew) for m in stack.prefill[0].side.received)


@pytest.mark.parametrize("dialect", ["pull", "layerwise"])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
async def test_every_hold_is_released_when_decode_refuses_the_request(
    stack_of: StackOf, dialect: str, fields: dict[str, object]
) -> None:
    async with stack_of(speaks=dialect, sides=True) as stack:
        stack.decode[0].faults.extend([Fault.HTTP_400] * 2)
        status, body = await stack.chat(**fields)
        assert (status, json.loads(body)["error"]["message"]) == (400, "scripted 400")
        ids = {s.body["kv_transfer_params"]["transfer_id"] for s in stack.prefill[0].seen}
        await until(lambda: ids <= set(stack.cluster.released))
        if dialect == "pull":
            assert ids
            told = stack.prefill[0].side.received  # D is told too, and may be the first
            await until(
                lambda: any(isinstance(m, Release) and m.reason == "decode refused the request" for m in told)
            )
        assert not stack.cluster.consumed
        instance = stack.app.services.fleet.instances(Role.DECODE)[0]
        assert (instance.breaker._failures, instance.tokens, instance.requests) == (0, 0, 0)


async def test_a_refusal_after_failures_closes_the_breaker_as_any_answer_does(stack: Stack) -> None:
    stack.decode[0].faults.extend([Fault.HTTP_500, Fault.HTTP_400])
    status, _ = await stack.chat()
    assert status == 400
    assert stack.app.services.fleet.instances(Role.DECODE)[0].breaker._failures == 0


async def test_nothing_is_released_after_a_good_answer(stack: Stack) -> None:
    await stack.chat(stream=True)
    await asyncio.sleep(0.05)
    assert not any(isinstance(m, Release) for m in stack.prefill[0].side.received)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_is_told_the_connectors_reason(stack_of: StackOf, stream: bool) -> None:
    async with stack_of(sides=True, retries=0, policy=PolicySettings(fallback="none")) as stack:
        stack.cluster.reasons["decode"] = "fingerprint differs: kv_cache_dtype"
        stack.decode[0].faults.append(Fault.ERROR_FIRST if stream else Fault.HTTP_500)
        status, body = await stack.chat(stream=stream)
    error = json.loads(body)["error"]
    assert status in (500, 502)
    assert "fingerprint differs: kv_cache_dtype" in error["message"]
    assert error["kind"] == "transfer_failed"


async def test_the_reason_reaches_a_client_whose_stream_has_begun(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.cluster.reasons["prefill"] = "P restarted"
        stack.decode[0].faults.append(Fault.ERROR_LATER)
        status, body = await stack.chat(stream=True)
    assert status == 200
    last = json.loads(body.split(b"\n\n")[-2].removeprefix(b"data: "))
    assert "P restarted" in last["error"]["message"]
    assert last["error"]["kind"] == "transfer_failed"


async def test_a_dead_side_channel_does_not_hold_up_the_clients_error(stack_of: StackOf) -> None:
    async with stack_of(retries=0, sides=True) as stack:
        stack.prefill[0].side.silent = stack.decode[0].side.silent = True
        stack.decode[0].faults.extend([Fault.HTTP_500] * 2)
        async with asyncio.timeout(3):
            status, _ = await stack.chat()
        assert status == 502


async def test_engines_with_different_fingerprints_are_not_paired(
    stack_of: StackOf,
) -> None:
    async with stack_of(sides=True, probes=ProbeSettings(interval_s=60)) as stack:
        stack.decode[0].side.fingerprint = _other_dtype(stack)
        await stack.app.services.probes.probe_all()
        status, body = await stack.post("/v1/chat/completions", chat_body())
        assert status == 503
        message = json.loads(body)["error"]["message"]
        assert "kv_cache_dtype" in message
        assert "float32" in message
        assert "bfloat16" in message
        assert not stack.prefill[0].seen


def _other_dtype(stack: Stack):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(stack.decode[0].side.fingerprint, kv_cache_dtype="bfloat16")


async def test_a_record_has_the_phases_that_add_up_to_the_whole(stack_of: StackOf) -> None:
    async with stack_of(sides=True, token_delay_s=0.005) as stack:
        async with stack.http.post(stack.url + "/v1/chat/completions", json=chat_body(True)) as answer:
            transfer_id = answer.headers["x-ascend-pd-transfer-id"]
            await answer.read()
        async with stack.http.get(stack.url + "/debug/records", params={"transfer_id": transfer_id}) as answer:
            (record,) = (await answer.json())["records"]
    phases = record["phases_ms"]
    assert sum(phases.values()) == pytest.approx(record["e2e_ms"], rel=0.05)
    assert phases["transfer"] == 0.15
    assert phases["d_queue"] == 0.05
    assert phases["prefill"] == 0.1
    assert phases["p_queue"] > 0
    assert record["kv_bytes"] == 4096
    assert record["output_events"] >= 5
