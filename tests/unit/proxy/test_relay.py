"""What a client gets when all goes well."""

from __future__ import annotations

import json

import msgspec
import pytest

from proxy.settings import PolicySettings
from tests.fakes.answers import prompt_of, stream_events, whole_answer
from tests.fakes.engine import Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body


async def test_chat_goes_through_both_engines_and_returns_decodes_answer(stack: Stack) -> None:
    status, body = await stack.chat()
    assert status == 200
    assert json.loads(body) == whole_answer("/v1/chat/completions", chat_body(), "fake")
    assert len(stack.prefill[0].seen) == 1
    assert len(stack.cluster.consumed) == 1


@pytest.mark.parametrize("fault", [None, Fault.SPLIT, Fault.MERGED])
async def test_a_stream_arrives_byte_for_byte_however_it_was_split(stack: Stack, fault: Fault | None) -> None:
    if fault:
        stack.decode[0].faults.append(fault)
    status, body = await stack.chat(stream=True, stream_options={"include_usage": True})
    wanted = stream_events("/v1/chat/completions", chat_body(True, stream_options={"include_usage": True}), "fake")
    assert status == 200
    assert body == b"".join(wanted)


async def test_the_prefill_leg_asks_for_one_token_and_keeps_the_prompt(stack: Stack) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await stack.chat(stream=True, min_tokens=3, tools=tools, unknown_field=7, max_completion_tokens=9)
    leg = stack.prefill[0].seen[0].body
    assert (leg["max_tokens"], leg["max_completion_tokens"], leg["stream"]) == (1, 1, False)
    assert leg["tools"] == tools
    assert leg["unknown_field"] == 7
    assert "min_tokens" not in leg


async def test_the_decode_leg_is_the_clients_own_bytes_and_the_handoff(stack: Stack) -> None:
    raw = msgspec.json.encode(chat_body())[:-1] + b',"big": 123456789012345678901234567890, "f": 1.10 }  \n'
    status, _ = await stack.post("/v1/chat/completions", raw)
    assert status == 200
    leg = stack.decode[0].seen[0].body
    assert leg.pop("kv_transfer_params")["do_remote_prefill"] is True
    assert leg == json.loads(raw)


async def test_both_legs_carry_one_fresh_transfer_id_that_the_client_is_told(stack: Stack) -> None:
    ids = set()
    for _ in range(2):
        async with stack.http.post(stack.url + "/v1/chat/completions", json=chat_body()) as answer:
            told = answer.headers["x-ascend-pd-transfer-id"]
        p, d = stack.prefill[0].seen[-1], stack.decode[0].seen[-1]
        assert p.body["kv_transfer_params"]["transfer_id"] == told
        assert d.body["kv_transfer_params"]["transfer_id"] == told
        ids.add(told)
    assert len(ids) == 2


@pytest.mark.parametrize("prompt", ["hello", [1, 2, 3]])
async def test_completions_take_text_and_token_ids(stack: Stack, prompt: object) -> None:
    status, body = await stack.post("/v1/completions", {"model": "fake", "prompt": prompt, "max_tokens": 3})
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 3
    assert len(stack.cluster.consumed) == 1


async def test_prompt_tokens_of_prefill_are_reused_when_configured(stack_of: StackOf) -> None:
    async with stack_of(policy=PolicySettings(reuse_prompt_tokens=True)) as stack:
        assert (await stack.chat(return_token_ids=False))[0] == 200
        assert bytes(stack.decode[0].token_ids[0] or b"").decode() == prompt_of(chat_body())
        assert stack.decode[0].seen[0].body["return_token_ids"] is False
    async with stack_of(policy=PolicySettings(reuse_prompt_tokens=True, fallback="none"), retries=0) as stack:
        await stack.post("/v1/completions", {"model": "fake", "prompt": "hello", "max_tokens": 3})
        assert stack.decode[0].seen[0].body["prompt"] == list(b'"hello"')


async def test_models_and_health_answer(stack: Stack) -> None:
    async with stack.http.get(stack.url + "/v1/models") as answer:
        assert (await answer.json())["data"][0]["id"] == "fake"
    async with stack.http.get(stack.url + "/health") as answer:
        assert answer.status == 200
