"""A strict stand-in for vLLM with a P/D connector: refuses a malformed handoff and misbehaves on request.

Several engines share a `FakeCluster`, which knows every hold, so that a D can tell whether a handoff is genuine,
fresh and used once. Nothing here knows the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from aiohttp import web

from tests.fakes.answers import error_event, prompt_of, stream_events, whole_answer
from tests.fakes.connectors import CONNECTORS, BadRequest
from tests.fakes.sidechannel import FakeSide


class Fault(Enum):
    """One way to misbehave, used up by one request."""

    HTTP_500 = "500 at once"
    HTTP_400 = "400 at once"
    HTTP_503 = "503 at once"
    HANG = "never answers"
    PUSH_THEN_CLOSE = "P does its part, waits a little and closes the connection"
    CLOSE = "closes the connection without a byte"
    NO_PARAMS = "P answers without kv_transfer_params"
    WRONG_TRANSFER = "P answers for another transfer"
    GARBAGE = "answers 200 with a body that is no JSON"
    ERROR_FIRST = "streams an error event as the first event, then what vLLM sends after one"
    ERROR_LATER = "streams an error event after two tokens, then what vLLM sends after one"
    CUT = "closes the connection after two tokens"
    CUT_INSIDE = "closes the connection inside an event"
    STALL_FIRST = "sends headers, then nothing"
    STALL_LATER = "stalls after two tokens"
    SPLIT = "sends its stream one byte at a time"
    MERGED = "sends its whole stream in one piece"
    CRLF = "ends its lines with carriage returns, too"
    NO_END = "sends its whole stream, but does not end the body"
    PINGS = "sends a comment before every event"


@dataclass
class FakeCluster:
    """What the engines of one test know of each other."""

    holds: dict[str, dict[str, Any]] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why transfers fail, by the role of the engine that knows it."""
    callbacks: list[int] = field(default_factory=list)
    """Statuses with which the proxy answered D's calls."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    events: dict[tuple[str, str], asyncio.Event] = field(default_factory=dict)

    def event(self, what: str, transfer_id: str) -> asyncio.Event:
        return self.events.setdefault((what, transfer_id), asyncio.Event())


@dataclass
class Seen:
    """One request as an engine saw it."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]
    finished: bool = False
    aborted: bool = False


@dataclass
class Passed:
    """One request that carries no tokens, as an engine saw it."""

    path: str
    raw: bytes
    headers: dict[str, str]
    aborted: bool = False


class FakeEngine:
    """One engine on a loopback port. `role` is prefill, decode or union."""

    def __init__(
        self,
        cluster: FakeCluster,
        role: str,
        *,
        token_delay_s: float = 0.0,
        model: str = "fake",
        dialect: str = "pull",
    ) -> None:
        self.connector = CONNECTORS[dialect]()
        self.cluster = cluster
        self.role = role
        self.model = model
        self.token_delay_s = token_delay_s
        self.faults: deque[Fault] = deque()
        self.seen: list[Seen] = []
        self.passed: list[Passed] = []
        self.passing_s = 0.0
        self.running = 0
        self.url = ""
        self.lease_s = 30.0
        self.healthy = True
        self.without_done = False
        """Leaves [DONE] out, as vLLM never does for these paths."""
        self.token_ids: list[list[int] | None] = []
        """P's token ids in handoffs, as chat requests carry them."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> FakeEngine:
        self.side = FakeSide(self.cluster, self.role)
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/chat/completions", self._serve)
        app.router.add_post("/v1/completions", self._serve)
        app.router.add_post("/v1/responses", self._serve)
        app.router.add_post("/v1/messages", self._serve)
        app.router.add_post("/tokenize", self._pass)
        app.router.add_post("/detokenize", self._pass)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/{path:.*}", self._pass)
        app.router.add_get("/health", self._health)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        self.url = f"http://127.0.0.1:{port}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            await self.side.close()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _pass(self, request: web.Request) -> web.Response:
        headers = {name.lower(): value for name, value in request.headers.items()}
        passed = Passed(request.path, await request.read(), headers)
        self.passed.append(passed)
        try:
            await asyncio.sleep(self.passing_s)
        except asyncio.CancelledError:
            passed.aborted = True
            raise
        if not request.path.endswith("tokenize"):
            return web.json_response({"object": "list"})
        return web.json_response({"tokens": list((await request.text()).encode()), "max_model_len": 4096})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen = Seen(request.path, body, dict(request.headers))
        self.seen.append(seen)
        self.running += 1
        try:
            answer = await self._answer(request, body)
            seen.finished = True
            return answer
        except asyncio.CancelledError:
            seen.aborted = True
            raise
        except BadRequest as error:
            return error_response(400, str(error))
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        fault = self.faults.popleft() if self.faults else None
        if fault in (Fault.HTTP_500, Fault.HTTP_400, Fault.HTTP_503):
            status = int(fault.value[:3])
            return error_response(status, f"scripted {status}")
        if fault is Fault.HANG:
            await asyncio.sleep(3600)
        if fault is Fault.CLOSE:
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if fault is Fault.GARBAGE:
            return web.Response(body=b"\x00not json", content_type="application/json")
        check_shape(request.path, body)
        if body.get("model") != self.model:
            return error_response(404, f"The model `{body.get('model')}` does not exist.")
        raw = body.get("kv_transfer_params")
        if self.role == "prefill":
            return await self._prefill(body, raw, fault)
        if raw is not None:
            ids = raw.pop("prompt_token_ids", None)
            self.token_ids.append(ids)
            await self.connector.receive(self, raw, prompt_of(body) if ids is None else bytes(ids).decode())
        if body.get("stream"):
            return await self._stream(request, body, fault)
        await asyncio.sleep(self.token_delay_s)
        return web.json_response(whole_answer(request.path, body, self.model))

    async def _prefill(self, body: dict[str, Any], raw: Any, fault: Fault | None) -> web.Response:
        if raw is None:
            raise BadRequest("this engine only prefills: kv_transfer_params is missing")
        if body.get("max_tokens") != 1 or body.get("stream") is not False or body.get("n", 1) != 1:
            raise BadRequest("prefill wants max_tokens=1, n=1 and no stream")
        wanted = getattr(self.connector, "min_tokens", None)
        if body.get("stream_options") or body.get("min_tokens") != wanted:
            raise BadRequest(f"prefill wants min_tokens={wanted} and no stream_options")
        params = await self.connector.prefill(self, raw, prompt_of(body))
        if fault is Fault.PUSH_THEN_CLOSE:
            await asyncio.sleep(0.2)
            raise ConnectionResetError("scripted")
        answer = whole_answer("/v1/completions", {**body, "max_tokens": 1}, self.model)
        if body.get("return_token_ids"):
            ids = list(prompt_of(body).encode())
            answer["prompt_token_ids"] = ids if "messages" in body else None
            answer["choices"][0]["prompt_token_ids"] = None if "messages" in body else ids
        if fault is not Fault.NO_PARAMS:
            answer["kv_transfer_params"] = params
        if fault is Fault.WRONG_TRANSFER:
            answer["kv_transfer_params"] = {**(params or {}), "transfer_id": "another"}
        return web.json_response(answer)

    async def _stream(self, request: web.Request, body: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        if fault is Fault.STALL_FIRST:
            await asyncio.sleep(3600)
        if fault is Fault.ERROR_FIRST:
            await response.write(error_event(request.path))
            return response
        events = stream_events(request.path, body, self.model)
        if self.without_done:
            events.pop()
        if fault is Fault.CRLF:
            events = [event.replace(b"\n", b"\r\n") for event in events]
        if fault is Fault.PINGS:
            events = [piece for event in events for piece in (b": ping\n\n", event)]
        if fault in (Fault.MERGED, Fault.NO_END):
            await response.write(b"".join(events))
            await asyncio.sleep(3600 if fault is Fault.NO_END else 0)
            return response
        for number, event in enumerate(events):
            if number == 2 and fault is not None and await self._misbehave(request, response, event, fault):
                return response
            for piece in [event[i : i + 1] for i in range(len(event))] if fault is Fault.SPLIT else [event]:
                await response.write(piece)
                if fault is Fault.SPLIT:
                    await asyncio.sleep(0)
            if self.token_delay_s:
                await asyncio.sleep(self.token_delay_s)
        return response

    async def _misbehave(
        self, request: web.Request, response: web.StreamResponse, event: bytes, fault: Fault
    ) -> bool:
        """True when nothing may follow."""
        if fault is Fault.STALL_LATER:
            await asyncio.sleep(3600)
        if fault is Fault.ERROR_LATER:
            await response.write(error_event(request.path))
            return True
        if fault in (Fault.CUT, Fault.CUT_INSIDE):
            if fault is Fault.CUT_INSIDE:
                await response.write(event[:10])
            assert request.transport is not None
            with contextlib.suppress(ConnectionError):
                request.transport.close()
            return True
        return False


def check_shape(path: str, body: dict[str, Any]) -> None:
    """The little of vLLM's validation that a client meets first.

    Raises:
        BadRequest
    """
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = body.get(name)
        if value is not None and (type(value) is not int or not 0 < value < 100_000):
            raise BadRequest(f"{name} must be a positive integer")
    if not isinstance(body.get("stream"), bool | None) or not isinstance(body.get("stream_options"), dict | None):
        raise BadRequest("stream must be a boolean and stream_options an object")
    if path.endswith("completions") and not isinstance(body.get("messages", body.get("prompt")), str | list):
        raise BadRequest("no prompt")


def error_response(status: int, message: str) -> web.Response:
    """An error as vLLM spells it."""
    error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
    return web.json_response({"error": error}, status=status)
