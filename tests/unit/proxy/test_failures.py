"""What a client gets when an engine misbehaves."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

RETRYABLE = [Fault.HTTP_500, Fault.CLOSE, Fault.GARBAGE, Fault.NO_PARAMS, Fault.WRONG_TRANSFER]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", RETRYABLE)
async def test_a_failed_prefill_is_tried_again_with_a_fresh_transfer_id(
    stack: Stack, fault: Fault, stream: bool
) -> None:
    stack.prefill[0].faults.append(fault)
    status, _ = await stack.chat(stream=stream)
    assert status == 200
    ids = [s.body["kv_transfer_params"]["transfer_id"] for s in stack.prefill[0].seen]
    assert len(ids) == len(set(ids)) == 2


@pytest.mark.parametrize("fault", [Fault.HTTP_500, Fault.CLOSE, Fault.ERROR_FIRST])
async def test_a_decode_that_fails_before_its_first_token_is_tried_again(stack: Stack, fault: Fault) -> None:
    stack.decode[0].faults.append(fault)
    status, body = await stack.chat(stream=True)
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    assert b"error" not in body


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_goes_on_failing_is_a_proper_status(stack: Stack, stream: bool) -> None:
    stack.decode[0].faults.extend([Fault.HTTP_500] * 4)
    status, body = await stack.chat(stream=stream)
    assert status == 502
    assert "scripted 500" in json.loads(body)["error"]["message"]


async def test_an_error_event_first_is_a_status_and_not_a_200(stack: Stack) -> None:
    stack.decode[0].faults.extend([Fault.ERROR_FIRST] * 4)
    status, body = await stack.chat(stream=True)
    assert status == 500
    assert b"[DONE]" not in body
    assert "EngineCore request failed" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("fault", [Fault.ERROR_LATER, Fault.CUT, Fault.CUT_INSIDE])
async def test_an_error_after_the_first_token_ends_the_stream_without_done(
    stack_of: StackOf, fault: Fault
) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.decode[0].faults.append(fault)
        status, body = await stack.chat(stream=True)
    assert status == 200
    events = body.split(b"\n\n")
    assert "error" in json.loads(events[-2].removeprefix(b"data: "))
    assert events[-1] == b""
    assert len(events) == 4
    assert b"[DONE]" not in body
    assert len(stack.decode[0].seen) == 1


async def test_a_client_that_leaves_aborts_the_decode_leg(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.2) as stack:
        async with stack.http.post(
            stack.url + "/v1/chat/completions", json=chat_body(True, max_tokens=100)
        ) as answer:
            await answer.content.readany()
        for _ in range(100):
            if stack.decode[0].seen[0].aborted:
                break
            await asyncio.sleep(0.02)
        assert stack.decode[0].seen[0].aborted
        assert all(i.requests == 0 and i.tokens == 0 for i in stack.app.services.fleet.instances())


async def test_a_client_that_leaves_before_the_first_token_aborts_the_prefill_leg(stack: Stack) -> None:
    stack.prefill[0].faults.append(Fault.HANG)
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.2):
            await stack.chat()
    for _ in range(100):
        if stack.prefill[0].seen[0].aborted:
            break
        await asyncio.sleep(0.02)
    assert stack.prefill[0].seen[0].aborted
    assert not stack.decode[0].seen
