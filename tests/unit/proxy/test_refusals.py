"""What the proxy does not let through."""

from __future__ import annotations

import json

import pytest

from proxy.settings import AdmissionSettings, PolicySettings
from tests.unit.proxy.conftest import Stack, StackOf, chat_body


@pytest.mark.parametrize(
    "extra",
    [
        {"kv_transfer_params": {"do_remote_prefill": True}},
        {"kv_transfer_params": None},
        {"ec_transfer_params": {}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
)
async def test_a_clients_own_transfer_params_are_refused(stack: Stack, extra: dict[str, object]) -> None:
    status, body = await stack.chat(**extra)
    assert status == 400
    assert json.loads(body)["error"]["type"] == "BadRequestError"
    assert not stack.prefill[0].seen
    assert not stack.decode[0].seen


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
async def test_a_body_that_is_no_object_is_a_400(stack: Stack, raw: bytes) -> None:
    status, body = await stack.post("/v1/chat/completions", raw)
    assert status == 400
    assert json.loads(body)["error"]["code"] == 400


async def test_an_engines_400_reaches_the_client_unchanged(stack: Stack) -> None:
    status, body = await stack.chat(model="nobody")
    assert status == 404
    assert json.loads(body)["error"]["message"] == "The model `nobody` does not exist."
    assert not stack.decode[0].seen


async def test_a_body_over_the_limit_is_a_413(stack_of: StackOf) -> None:
    async with stack_of(admission=AdmissionSettings(max_body_bytes=1000)) as stack:
        status, _ = await stack.chat(messages=[{"role": "user", "content": "x" * 2000}])
        assert status == 413


async def test_what_pd_cannot_give_is_computed_by_one_engine_alone(stack: Stack) -> None:
    status, _ = await stack.post("/v1/chat/completions", chat_body(prompt_logprobs=1))
    assert status == 200
    assert not stack.prefill[0].seen
    assert "kv_transfer_params" not in stack.decode[0].seen[0].body


async def test_without_a_union_instance_the_refusal_names_the_field(stack_of: StackOf) -> None:
    async with stack_of(policy=PolicySettings(fallback="union")) as stack:
        status, body = await stack.post("/v1/chat/completions", chat_body(prompt_logprobs=1))
    assert status == 400
    assert json.loads(body)["error"]["param"] == "prompt_logprobs"


@pytest.mark.parametrize("fallback", ["local", "union", "none"])
async def test_a_union_instance_serves_what_pd_cannot_give_whatever_the_fallback(
    stack_of: StackOf, fallback: str
) -> None:
    async with stack_of(union=1, policy=PolicySettings(fallback=fallback)) as stack:
        status, _ = await stack.post("/v1/chat/completions", chat_body(prompt_logprobs=1))
        assert status == 200
        assert stack.union[0].seen and not stack.prefill[0].seen and not stack.decode[0].seen


@pytest.mark.parametrize("header", ["x-data-parallel-rank", "x-ascend-pd-anything", "x-prefiller-host-port"])
async def test_internal_headers_are_refused(stack: Stack, header: str) -> None:
    status, _ = await stack.post("/v1/chat/completions", chat_body(), **{header: "1"})
    assert status == 400
    assert not stack.prefill[0].seen
