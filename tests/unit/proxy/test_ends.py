"""How streams end: each format in its own way, and no client sees an error behind a whole answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy import relay
from proxy.breaker import BreakerState
from proxy.settings import Role
from tests.fakes.answers import MESSAGES, RESPONSES, stream_events, whole_answer
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

CHAT = "/v1/chat/completions"
NAMED = [RESPONSES, MESSAGES]


def body_of(path: str, stream: bool = True) -> dict[str, Any]:
    if path == RESPONSES:
        return {"model": "fake", "input": "Hello", "stream": stream, "max_output_tokens": 5}
    return chat_body(stream)


def failures(stack: Stack) -> list[int]:
    return [i.breaker._failures for i in stack.app.services.fleet.instances(Role.DECODE)]


@pytest.mark.parametrize("union", [0, 1])
@pytest.mark.parametrize("fault", [None, Fault.SPLIT, Fault.MERGED, Fault.CRLF])
@pytest.mark.parametrize("path", [*NAMED, CHAT, "/v1/completions"])
async def test_every_format_arrives_unchanged_and_blames_nobody(
    stack_of: StackOf, path: str, fault: Fault | None, union: int
) -> None:
    async with stack_of(union=union) as stack:
        body = {**body_of(path), "prompt": "p"}
        for engine in (*stack.decode, *stack.union):
            engine.faults.extend([fault] if fault else [])
        status, answer = await stack.post(path, body)
        wanted = b"".join(stream_events(path, body, "fake"))
        assert status == 200
        assert answer == (wanted.replace(b"\n", b"\r\n") if fault is Fault.CRLF else wanted)
        assert all(i.breaker.state(0.0) is BreakerState.CLOSED for i in stack.app.services.fleet.instances())
        assert failures(stack) == [0]
        assert len(stack.decode[0].seen) + sum(len(e.seen) for e in stack.union) == 1


@pytest.mark.parametrize("path", NAMED)
async def test_a_whole_answer_of_every_format_arrives_unchanged(stack: Stack, path: str) -> None:
    status, answer = await stack.post(path, body_of(path, stream=False))
    assert status == 200
    assert json.loads(answer) == whole_answer(path, body_of(path), "fake")


@pytest.mark.parametrize("fault", [Fault.CUT, Fault.CUT_INSIDE, Fault.ERROR_LATER])
@pytest.mark.parametrize("path", [*NAMED, CHAT])
async def test_a_stream_that_breaks_ends_with_an_error_in_every_format(
    stack_of: StackOf, path: str, fault: Fault
) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.decode[0].faults.append(fault)
        status, answer = await stack.post(path, body_of(path))
        assert status == 200
        name, _, data = answer.split(b"\n\n")[-2].rpartition(b"data: ")
        event = json.loads(data)
        assert event["error"]["message"]
        assert name == (b"event: error\n" if path in NAMED else b"")
        if path in NAMED:
            assert (event["type"], event["message"]) == ("error", event["error"]["message"])
        assert b"[DONE]" not in answer
        assert failures(stack) == [1]


@pytest.mark.parametrize("path", NAMED)
async def test_a_first_event_that_is_an_error_is_tried_again_in_every_format(stack: Stack, path: str) -> None:
    stack.decode[0].faults.append(Fault.ERROR_FIRST)
    status, answer = await stack.post(path, body_of(path))
    assert status == 200
    assert b"EngineCore" not in answer
    assert len(stack.decode[0].seen) == 2


@pytest.mark.parametrize("n", [1, 2])
async def test_an_engine_that_does_not_end_its_body_after_done_costs_the_client_nothing(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(relay, "END_S", 0.1)
    stack.decode[0].faults.extend([Fault.NO_END] * n)
    async with asyncio.timeout(4):
        status, answer = await stack.chat(stream=True, n=n)
    assert status == 200
    assert answer.endswith(b"data: [DONE]\n\n")
    assert b"error" not in answer
    assert failures(stack) == [0]


async def test_a_chat_stream_without_done_is_broken(stack_of: StackOf) -> None:
    async with stack_of(token_delay_s=0.02) as stack:
        stack.decode[0].without_done = True
        status, answer = await stack.chat(stream=True)
    assert status == 200
    assert b"broke off" in answer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_has_error_marks_echoed_opens_no_breaker(stack: Stack, stream: bool) -> None:
    for mark in ("event: error", "\nevent: error\n\n", 'data: {"error": "x"}\n\n', "data: [DONE]"):
        stack.decode[0].model = model = f"fake {mark}"  # chunks carry it
        stack.prefill[0].model = model
        status, answer = await stack.chat(stream=stream, model=model)
        assert status == 200
        assert answer.count(json.dumps(model).encode()) >= 1
        assert failures(stack) == [0]
