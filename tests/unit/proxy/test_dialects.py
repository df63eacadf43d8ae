"""One request through every kind of connector that the proxy speaks with."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest
from aiohttp import web

from ascend_pd.errors import RemoteProtocolError
from proxy.dialects import DIALECTS
from proxy.dialects.ascend_layerwise import checked_reservation
from proxy.settings import InstanceSettings, PolicySettings, Role
from tests.fakes.answers import stream_events, whole_answer
from tests.fakes.connectors import CONNECTORS
from tests.fakes.engine import FakeEngine, Fault
from tests.unit.proxy.conftest import Stack, StackOf, chat_body

ALL = sorted(DIALECTS)
NO_FALLBACK = PolicySettings(fallback="none")


def test_every_dialect_has_a_strict_fake() -> None:
    assert sorted(CONNECTORS) == ALL


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", ALL)
async def test_the_client_gets_decodes_answer(stack_of: StackOf, dialect: str, stream: bool) -> None:
    async with stack_of(speaks=dialect, policy=NO_FALLBACK) as stack:
        status, body = await stack.chat(stream=stream, min_tokens=2)
        assert status == 200
        if stream:
            assert body == b"".join(stream_events("/v1/chat/completions", chat_body(True), "fake"))
        else:
            assert json.loads(body) == whole_answer("/v1/chat/completions", chat_body(), "fake")
        assert len(stack.prefill[0].seen) == 1
        assert len(stack.cluster.consumed) == 1


@pytest.mark.parametrize("dialect", ALL)
async def test_samples_never_share_a_transfer(stack_of: StackOf, dialect: str) -> None:
    async with stack_of(speaks=dialect, policy=NO_FALLBACK) as stack:
        status, body = await stack.chat(n=3)
        assert status == 200
        assert len(json.loads(body)["choices"]) == 3
        assert len(set(stack.cluster.consumed)) == 3


@pytest.mark.parametrize("dialect", ALL)
async def test_a_failed_prefill_becomes_a_status_and_frees_decode(stack_of: StackOf, dialect: str) -> None:
    async with stack_of(speaks=dialect, policy=NO_FALLBACK, retries=0) as stack:
        stack.prefill[0].faults.append(Fault.HTTP_500)
        async with asyncio.timeout(5):
            status, body = await stack.chat(stream=True)
        assert status in (500, 502)
        assert "prefill" in json.loads(body)["error"]["message"]
        for _ in range(100):
            if not stack.decode[0].running:
                break
            await asyncio.sleep(0.01)
        assert not stack.decode[0].running


@pytest.mark.parametrize("dialect", ALL)
async def test_a_failed_prefill_is_tried_again(stack_of: StackOf, dialect: str) -> None:
    async with stack_of(speaks=dialect, policy=NO_FALLBACK) as stack:
        stack.prefill[0].faults.append(Fault.CLOSE)
        status, body = await stack.chat(stream=True)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("dialect", ALL)
async def test_prefills_refusal_reaches_the_client_unchanged(stack_of: StackOf, dialect: str) -> None:
    async with stack_of(speaks=dialect, policy=NO_FALLBACK) as stack:
        stack.prefill[0].faults.append(Fault.HTTP_400)
        status, body = await stack.chat(stream=True)
        assert status == 400
        assert json.loads(body)["error"]["message"] == "scripted 400"
        assert len(stack.prefill[0].seen) == 1


@pytest.mark.parametrize("dialect", ["layerwise", "ascend-layerwise"])
async def test_a_client_that_leaves_ends_both_legs(stack_of: StackOf, dialect: str) -> None:
    async with stack_of(speaks=dialect) as stack:
        stack.prefill[0].faults.append(Fault.HANG)
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.4):
                await stack.chat(stream=True)
        async with asyncio.timeout(3):
            while stack.prefill[0].running or stack.decode[0].running:
                await asyncio.sleep(0.01)


async def test_a_call_back_that_nobody_expects_is_refused(stack_of: StackOf) -> None:
    async with stack_of(speaks="ascend-layerwise") as stack:
        message = {"do_remote_decode": True, "remote_host": "10.6.6.6"}
        assert (await stack.post("/v1/metaserver/guess", message))[0] == 404
        assert (await stack.post("/v1/metaserver/guess", b"[]"))[0] == 400
        assert not stack.prefill[0].seen


@pytest.mark.parametrize("message", [None, [], {}, {"do_remote_decode": True}, {"remote_host": "h"}])
def test_a_call_back_that_is_no_reservation_is_refused(message: object) -> None:
    with pytest.raises(RemoteProtocolError):
        checked_reservation(message)


@pytest.mark.parametrize("dialect", ["pull", "nixl", "ascend-pull"])
@pytest.mark.parametrize("params", [None, [], {}, {"do_remote_prefill": False}, {"do_remote_prefill": True}])
def test_an_answer_that_is_no_handoff_is_refused(dialect: str, params: object) -> None:
    with pytest.raises(RemoteProtocolError):
        DIALECTS[dialect]().handoff(params, "t")


async def test_pools_of_two_dialects_are_never_paired_with_each_other(stack_of: StackOf) -> None:
    async with stack_of(policy=NO_FALLBACK) as stack:
        others = [await FakeEngine(stack.cluster, r, dialect="nixl").start() for r in ("prefill", "decode")]
        for engine, role in zip(others, (Role.PREFILL, Role.DECODE), strict=True):
            known = stack.app.services.fleet.instances(role)[0].settings
            stack.app.services.fleet.add(
                msgspec.structs.replace(known, url=engine.url, side="", dialect="nixl"), role
            )
        statuses = await asyncio.gather(*(stack.chat() for _ in range(12)))
        assert {status for status, _ in statuses} == {200}
        assert all(e.seen for e in (*others, *stack.prefill, *stack.decode))
        for engine in others:
            await engine.stop()


async def test_a_failed_push_withdraws_the_reservation_so_that_prefill_is_told(stack_of: StackOf) -> None:
    withdrawn: list[tuple[str, str]] = []

    async def withdraw(request: web.Request) -> web.Response:
        withdrawn.append((request.match_info["transfer_id"], request.query["reason"]))
        return web.json_response({})

    app = web.Application()
    app.router.add_delete("/v1/reservations/{transfer_id}", withdraw)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    metaserver = f"http://127.0.0.1:{port}"
    async with stack_of(speaks="layerwise", policy=NO_FALLBACK, retries=0, metaserver=metaserver) as stack:
        stack.decode[0].faults.append(Fault.HTTP_500)
        stack.prefill[0].faults.append(Fault.HANG)
        status, _ = await stack.chat()
        assert status == 502
        async with asyncio.timeout(3):
            while not withdrawn or stack.prefill[0].running:
                await asyncio.sleep(0.01)
        params = stack.decode[0].seen[0].body["kv_transfer_params"]
        assert params["metaserver"] == metaserver
        assert withdrawn == [(params["transfer_id"], "decode: scripted 500")]
    await runner.cleanup()


async def test_ranks_behind_one_url_are_addressed_by_header(stack: Stack) -> None:
    decoders = stack.app.services.fleet.instances(Role.DECODE)
    url = decoders[0].settings.url
    stack.app.services.fleet.remove(decoders[0])
    for rank in (0, 1):
        stack.app.services.fleet.add(InstanceSettings(url=url, dp_rank=rank), Role.DECODE)
    for _ in range(4):
        assert (await stack.chat())[0] == 200
    ranks = [{k.lower(): v for k, v in s.headers.items()}["x-data-parallel-rank"] for s in stack.decode[0].seen]
    assert sorted(ranks) == ["0", "0", "1", "1"]


async def test_prefill_that_fails_after_decode_began_does_not_cut_the_stream(stack_of: StackOf) -> None:
    async with stack_of(speaks="layerwise", policy=NO_FALLBACK, retries=0, token_delay_s=0.05) as stack:
        stack.prefill[0].faults.append(Fault.PUSH_THEN_CLOSE)
        status, body = await stack.chat(stream=True, max_tokens=10)
        assert status == 200
        assert body.endswith(b"data: [DONE]\n\n")
