"""One client request from selection to the last byte: performs the steps of `proxy.flow`, decides on retries."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from ascend_pd.wire.identity import transfer_id_from
from proxy.dialects import Dialect
from proxy.downstream import Downstream
from proxy.errors import LegFailed, ProxyError
from proxy.fleet import Fleet, Instance, Load
from proxy.flow import Call, CallOutcome, Flow, Keep, PassThrough, Relay, Select, Step, pull_flow, whole_flow
from proxy.policy import Work
from proxy.request import ClientRequest, Route
from proxy.settings import Role, Settings
from proxy.sse import STREAM_END, EventCutter, has_error, read_error, split_at_error
from proxy.upstream import Answer, Upstream


@dataclass(slots=True)
class Services:
    """What all exchanges of a process share."""

    settings: Settings
    fleet: Fleet
    upstream: Upstream
    dialect: Dialect


@dataclass(slots=True)
class Attempt:
    """What one attempt holds and must give back."""

    transfer_id: str
    loads: dict[Role, Load] = field(default_factory=dict)
    answers: list[Answer] = field(default_factory=list)

    def close(self) -> None:
        """Drop connections that are still open (the engine aborts) and give the load back."""
        for answer in self.answers:
            answer.close()
        for load in self.loads.values():
            load.close()


class Exchange:
    """Serves one request; `run` either answers the client or raises ProxyError before a byte was sent."""

    def __init__(
        self, services: Services, request: ClientRequest, down: Downstream, headers: dict[str, str]
    ) -> None:
        self._services = services
        self._request = request
        self._down = down
        self._headers = headers
        self._avoid: set[str] = set()

    async def run(self) -> None:
        """Attempts until one reaches the client.

        Raises:
            ProxyError: no attempt did; or the stream broke after its start, for the caller to write as an event.
        """
        settings = self._services.settings
        async with asyncio.timeout(settings.timeouts.request_s):
            for attempt_number in range(settings.retries + 1):
                try:
                    await self._attempt()
                    return
                except LegFailed as error:
                    last = attempt_number == settings.retries
                    if last or self._down.started or not error.retryable:
                        raise

    async def _attempt(self) -> None:
        attempt = Attempt(transfer_id_from(os.urandom(16)))
        self._down.extra = [(b"x-ascend-pd-transfer-id", attempt.transfer_id.encode())]
        flow = self._flow(attempt.transfer_id)
        try:
            step: Step = next(flow)
            while True:
                step = flow.send(await self._perform(step, attempt))
        except StopIteration:
            return
        finally:
            flow.close()
            attempt.close()

    def _flow(self, transfer_id: str) -> Flow:
        fleet = self._services.fleet
        if self._request.route is Route.WHOLE or not fleet.instances(Role.PREFILL):
            return whole_flow(self._request, Role.UNION if fleet.instances(Role.UNION) else Role.DECODE)
        return pull_flow(self._request, self._services.dialect, transfer_id)

    async def _perform(self, step: Step, attempt: Attempt) -> CallOutcome | None:
        match step:
            case Select(role):
                attempt.loads[role] = self._select(role)
            case Call(body):
                return await self._call(body, attempt)
            case Keep():
                attempt.loads[Role.PREFILL].close()
            case Relay(role, body):
                await self._relay(attempt.loads[role].instance, body, attempt)
            case PassThrough(outcome):
                await self._down.whole(outcome.status, outcome.body, outcome.content_type)
        return None

    def _select(self, role: Role) -> Load:
        request = self._request
        fleet = self._services.fleet
        if role is Role.PREFILL:
            return fleet.select_prefiller(Work(request.prompt_tokens), self._avoid)
        work = Work(request.prompt_tokens + request.output_tokens)
        if role is Role.DECODE:
            return fleet.select_decoder(work, self._avoid)
        return fleet.select_union(work, self._avoid)

    async def _call(self, body: bytes, attempt: Attempt) -> CallOutcome:
        instance = attempt.loads[Role.PREFILL].instance
        timeout_s = self._services.settings.timeouts.prefill_s
        answer = await self._post(instance, body, attempt, timeout_s)
        try:
            return CallOutcome(answer.status, await answer.read(timeout_s), answer.content_type)
        except LegFailed:
            self._avoid.add(instance.key)
            raise

    async def _post(self, instance: Instance, body: bytes, attempt: Attempt, timeout_s: float) -> Answer:
        headers = {**self._headers, "content-type": "application/json", "x-request-id": attempt.transfer_id}
        if instance.settings.dp_rank is not None:
            headers["x-data-parallel-rank"] = str(instance.settings.dp_rank)
        try:
            answer = await self._services.upstream.post(
                instance.settings.url + self._request.api, body, headers, instance.role, timeout_s
            )
        except LegFailed:
            self._avoid.add(instance.key)
            raise
        attempt.answers.append(answer)
        return answer

    async def _relay(self, instance: Instance, body: bytes, attempt: Attempt) -> None:
        timeouts = self._services.settings.timeouts
        first_s = timeouts.first_event_s if self._request.stream else timeouts.request_s
        answer = await self._post(instance, body, attempt, first_s)
        if answer.status == 200 and answer.streaming:
            await self._stream(answer, instance, first_s)
            return
        whole = await answer.read(timeouts.inter_token_s)
        if answer.status >= 500:
            self._avoid.add(instance.key)
            raise LegFailed(self._reason(instance, read_error(whole)[1]), kind="decode_failed")
        await self._down.whole(answer.status, whole, answer.content_type)

    async def _stream(self, answer: Answer, instance: Instance, first_s: float) -> None:
        cutter = EventCutter()
        timeout_s = first_s
        events = b""
        while piece := await answer.piece(timeout_s):
            whole = cutter.feed(piece)
            if not whole:
                continue
            events = whole
            timeout_s = self._services.settings.timeouts.inter_token_s
            if has_error(events):
                await self._stream_error(events, instance)
            if not self._down.started:
                await self._down.start_stream()
            await self._down.events(events)
        if cutter.rest() or not events.endswith(STREAM_END):
            self._avoid.add(instance.key)
            raise LegFailed(f"{instance.role} broke off its answer", kind="connection_lost")
        await self._down.end()

    async def _stream_error(self, events: bytes, instance: Instance) -> None:
        good, status, message = split_at_error(events)
        if good and self._down.started:
            await self._down.events(good)
        if status < 500:
            raise ProxyError(message, status)
        self._avoid.add(instance.key)
        raise LegFailed(self._reason(instance, message), status, kind="decode_failed")

    def _reason(self, instance: Instance, message: str) -> str:
        return f"{instance.role}: {message}" if message else f"{instance.role} failed"
