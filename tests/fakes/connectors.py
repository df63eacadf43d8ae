"""What each kind of connector demands of a request and gives in return, as strictly as the real ones ought to."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from ascend_pd.errors import RemoteProtocolError
from ascend_pd.wire.params import (
    LayerwiseDecode,
    LayerwisePrefill,
    PullHandoff,
    PullPrefill,
    parse_params,
    to_dict,
)

if TYPE_CHECKING:
    from tests.fakes.engine import FakeEngine


class BadRequest(Exception):
    """What vLLM would answer 400 to."""


class Connector(Protocol):
    """`prefill` returns P's kv_transfer_params; `receive` returns when D has the cache."""

    async def prefill(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> dict[str, Any] | None: ...

    async def receive(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None: ...


def demand(holds: bool, message: str) -> None:
    if not holds:
        raise BadRequest(message)


class PullConnector:
    """Ours."""

    async def prefill(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> dict[str, Any]:
        params = parsed(raw)
        if not isinstance(params, PullPrefill):
            raise BadRequest("prefill wants do_remote_decode")
        demand(params.transfer_id not in engine.cluster.holds, "transfer_id used twice")
        handoff = PullHandoff(
            transfer_id=params.transfer_id,
            remote_engine_id=f"engine-{id(engine):x}",
            remote_epoch="epoch-1",
            remote_host="127.0.0.1",
            remote_port=engine.side.port,
            remote_block_ids=[[1, 2, 3]],
            remote_block_size=128,
            remote_tp_size=1,
            num_prompt_tokens=len(prompt),
            prompt_hash=hashlib.sha256(prompt.encode()).hexdigest(),
            lease_seconds=engine.lease_s,
        )
        engine.cluster.holds[params.transfer_id] = to_dict(handoff)
        return to_dict(handoff)

    async def receive(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        params = parsed(raw)
        if not isinstance(params, PullHandoff):
            raise BadRequest("decode wants do_remote_prefill")
        demand(engine.cluster.holds.get(params.transfer_id) == raw, "this handoff is not what any P answered")
        demand(params.transfer_id not in engine.cluster.consumed, "this handoff was used before")
        demand(params.prompt_hash == hashlib.sha256(prompt.encode()).hexdigest(), "another prompt")
        engine.cluster.consumed.append(params.transfer_id)


class LayerwiseConnector:
    """Ours: D waits until P has pushed; P waits for D's reservation."""

    async def prefill(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        params = parsed(raw)
        if not isinstance(params, LayerwisePrefill):
            raise BadRequest("prefill wants do_remote_decode and a metaserver")
        await engine.cluster.event("reserved", params.transfer_id).wait()
        engine.cluster.event("pushed", params.transfer_id).set()

    async def receive(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        params = parsed(raw)
        if not isinstance(params, LayerwiseDecode):
            raise BadRequest("decode wants do_remote_prefill and a metaserver")
        engine.cluster.event("reserved", params.transfer_id).set()
        await engine.cluster.event("pushed", params.transfer_id).wait()
        engine.cluster.consumed.append(params.transfer_id)


class NixlConnector:
    """vLLM's."""

    min_tokens: int | None = None

    async def prefill(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> dict[str, Any]:
        demand(raw.get("do_remote_decode") is True, "prefill wants do_remote_decode")
        demand(raw.get("remote_engine_id", 0) is None, "remote_engine_id must be null")
        request = uuid.uuid4().hex
        handoff = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2]],
            "remote_engine_id": "nixl",
            "remote_request_id": request,
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
        engine.cluster.holds[request] = handoff
        return handoff

    async def receive(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        request = raw.get("remote_request_id", "")
        demand(raw.get("do_remote_prefill") is True, "decode wants do_remote_prefill")
        demand(engine.cluster.holds.get(request) == raw, "this handoff is not what any P answered")
        demand(request not in engine.cluster.consumed, "this handoff was used before")
        engine.cluster.consumed.append(request)


class AscendPullConnector(NixlConnector):
    """vllm-ascend's MooncakeConnectorV1: P must end by length."""

    min_tokens = 1


class AscendLayerwiseConnector:
    """vllm-ascend's MooncakeLayerwiseConnector: D calls back with its reservation and waits for the push."""

    min_tokens = 1

    async def prefill(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        key = raw.get("remote_request", "")
        demand("remote_cached_tokens" in raw, "remote_cached_tokens is missing")
        demand(engine.cluster.holds.get(key) == raw, "no D reserved this")
        engine.cluster.event("pushed", key).set()

    async def receive(self, engine: FakeEngine, raw: dict[str, Any], prompt: str) -> None:
        demand(raw.get("do_remote_prefill") is True and bool(raw.get("metaserver")), "decode wants a metaserver")
        key = uuid.uuid4().hex
        message = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_block_ids": [[4, 5]],
            "remote_engine_id": "d",
            "remote_host": "127.0.0.1",
            "remote_port": 7000,
            "remote_cached_tokens": 0,
            "remote_request": key,
        }
        engine.cluster.holds[key] = message

        async def call_back() -> None:
            async with aiohttp.ClientSession() as session, session.post(raw["metaserver"], json=message) as answer:
                engine.cluster.callbacks.append(answer.status)

        calling = asyncio.create_task(call_back())
        try:
            await engine.cluster.event("pushed", key).wait()
            engine.cluster.consumed.append(key)
        finally:
            engine.cluster.tasks.append(calling)


CONNECTORS: dict[str, type[Connector]] = {
    "pull": PullConnector,
    "layerwise": LayerwiseConnector,
    "nixl": NixlConnector,
    "ascend-pull": AscendPullConnector,
    "ascend-layerwise": AscendLayerwiseConnector,
}


def parsed(raw: dict[str, Any]) -> object:
    try:
        return parse_params(raw)
    except RemoteProtocolError as error:
        raise BadRequest(str(error)) from error
