"""One client request from selection to the last byte: performs the steps of `proxy.flow`, decides on retries."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from typing import Any

from ascend_pd.errors import LocalProtocolError, RemoteProtocolError
from ascend_pd.wire.identity import transfer_id_from
from proxy.attempt import Attempt
from proxy.dialects import Order
from proxy.dialects.ascend_layerwise import checked_reservation
from proxy.downstream import AsgiDownstream, Downstream
from proxy.errors import LegFailed, Refused
from proxy.fleet import Instance, Load, NoInstance
from proxy.flow import (
    Call,
    CallOutcome,
    Flow,
    Keep,
    PassThrough,
    Relay,
    RelayBoth,
    RelayCalledBack,
    Select,
    Step,
    called_back_flow,
    layerwise_flow,
    prefill_error,
    pull_flow,
    whole_flow,
)
from proxy.legs import prefill_body
from proxy.policy import BLOCK_TOKENS, Work
from proxy.record import Record
from proxy.relay import EngineError
from proxy.relay import Relay as AnswerRelay
from proxy.request import CHAT, COMPLETIONS, ClientRequest, Route, prefix_hashes
from proxy.services import Services
from proxy.settings import Role
from proxy.tracing import Leg, Trace
from proxy.upstream import Answer

_log = logging.getLogger("proxy.exchange")


class Exchange:
    """Serves one request; `run` either answers the client or raises ProxyError."""

    def __init__(
        self,
        services: Services,
        request: ClientRequest,
        down: Downstream,
        headers: dict[str, str],
        record: Record,
        trace: Trace,
        session: str = "",
    ) -> None:
        self._services = services
        self._request = request
        self._down = down
        self._headers = headers
        self._record = record
        self._trace = trace
        self._avoid: set[str] = set()
        self._whole: Role | None = None
        self._dialect = services.dialects[services.settings.dialect or services.settings.mode]
        self._session = session
        wanted = services.fleet.wants_prefix()
        self._prefix = prefix_hashes(request.body, BLOCK_TOKENS) if wanted else ()

    async def run(self) -> None:
        """Attempts until one reaches the client.

        Raises:
            ProxyError: no attempt did; or the stream broke after its start, for the caller to write as an event.
        """
        settings = self._services.settings
        self._whole = self._whole_role()
        try:
            await self._tries(settings.retries + 1)
        except (LegFailed, NoInstance) as error:
            retryable = isinstance(error, NoInstance) or error.retryable
            role = self._fallback_role()
            if self._down.started or not retryable or self._whole is not None or role is None:
                raise
            if not any(i.available() for i in self._services.fleet.instances(role)):
                raise
            _log.warning("request %s: %s serves it alone: %.500r", self._record.request_id, role, error.message)
            self._whole = role
            self._record.route = "fallback"
            self._record.retries += 1
            await self._tries(1)

    async def _tries(self, most: int) -> None:
        for number in range(most):
            self._record.attempts += 1
            self._record.retries += number > 0
            try:
                await self._attempt()
                return
            except LegFailed as error:
                if number == most - 1 or self._down.started or not error.retryable:
                    raise

    def _whole_role(self) -> Role | None:
        """Who serves this request by itself; None when it goes through P and D.

        Raises:
            Refused: it must be served whole, and nobody may do that.
        """
        request = self._request
        services = self._services
        if request.route is not Route.WHOLE and services.fleet.instances(Role.PREFILL):
            below = services.settings.policy.local_prefill_below_tokens
            pays = below == 0 or services.fleet.uncached_on_decode(self._work(0)) >= below
            return None if pays else Role.DECODE
        role = services.fleet.whole_role(services.settings.policy.fallback)
        if role is not None:
            return role
        if request.why_whole.startswith("/"):
            raise Refused(f"{request.why_whole} needs a union instance, and this cluster has none", status=501)
        raise Refused(
            f"{request.why_whole or 'this request'} needs a union instance, and this cluster has none",
            param=request.why_whole or None,
        )

    def _fallback_role(self) -> Role | None:
        return self._services.fleet.fallback_role(self._services.settings.policy.fallback)

    async def _attempt(self) -> None:
        attempt = Attempt(transfer_id_from(os.urandom(16)), self._services.holds)
        self._record.transfer_id = attempt.transfer_id
        if isinstance(self._down, AsgiDownstream):
            self._down.extra = [(b"x-ascend-pd-transfer-id", attempt.transfer_id.encode())]
        flow = self._flow(attempt)
        reason = "the client left"
        try:
            step: Step = next(flow)
            while True:
                step = flow.send(await self._perform(step, attempt))
        except StopIteration:
            reason = ""
        except EngineError as error:
            explained = await self._explained(error, attempt)
            reason = explained.message
            raise explained from error
        except LegFailed as error:
            reason = error.message
            raise
        finally:
            flow.close()
            if attempt.callback is not None:
                self._services.callbacks.end(attempt.callback)
            self._record.prefill_side = attempt.side(Role.PREFILL) if attempt.transferring else ""
            self._record.decode_side = attempt.side(Role.DECODE) if attempt.transferring else ""
            attempt.close("decode refused the request" if attempt.refused else reason)

    def _flow(self, attempt: Attempt) -> Flow:
        services = self._services
        transfer_id = attempt.transfer_id
        if self._whole is not None:
            return whole_flow(self._request, self._whole)
        self._dialect = services.dialects[services.fleet.choose_dialect(self._avoid)]
        if self._dialect.order is Order.CALLED_BACK:
            callback = attempt.callback = services.callbacks.expect()
            url = f"{services.settings.metaserver.rstrip('/')}/v1/metaserver/{callback.token}"
            return called_back_flow(self._request, self._dialect, transfer_id, url)
        if self._dialect.order is Order.DECODE_FIRST:
            attempt.metaserver = services.settings.metaserver
            return layerwise_flow(self._request, self._dialect, transfer_id, services.settings.metaserver)
        reuse = services.settings.policy.reuse_prompt_tokens
        return pull_flow(self._request, self._dialect, transfer_id, reuse)

    async def _perform(self, step: Step, attempt: Attempt) -> CallOutcome | None:
        match step:
            case Select(role):
                attempt.loads[role] = self._select(role, attempt)
            case Call(body):
                return await self._call(body, attempt)
            case Keep(handoff):
                attempt.loads[Role.PREFILL].close()
                attempt.keep(handoff.hold)
                self._record.prompt_tokens = handoff.prompt_tokens or self._record.prompt_tokens
            case Relay(role, body):
                await self._relay(role, body, attempt)
            case RelayBoth(decode, prefill):
                await self._relay_both(decode, prefill, attempt)
            case RelayCalledBack(decode):
                await self._relay_called_back(decode, attempt)
            case PassThrough(outcome):
                attempt.transferring = False
                await self._down.whole(outcome.status, outcome.body, outcome.content_type)
        return None

    def _work(self, output_tokens: int) -> Work:
        return Work(self._request.prompt_tokens + output_tokens, self._prefix, self._session)

    def _select(self, role: Role, attempt: Attempt) -> Load:
        request = self._request
        fleet = self._services.fleet
        chosen = {r: load.instance for r, load in attempt.loads.items()}
        if role is Role.PREFILL:
            if not any(i.available() for i in fleet.instances(Role.DECODE)):
                raise NoInstance(Role.DECODE)  # before P computes for nobody
            load = fleet.select_prefiller(self._work(0), self._avoid, chosen.get(Role.DECODE), self._dialect.name)
            self._record.prefill = load.instance.key
            return load
        work = self._work(request.output_tokens)
        if role is Role.DECODE:
            load = fleet.select_decoder(
                work, self._avoid, chosen.get(Role.PREFILL), self._dialect.name if self._whole is None else ""
            )
        else:
            load = fleet.select_union(work, self._avoid)
        self._record.decode = load.instance.key
        return load

    async def _call(self, body: bytes, attempt: Attempt) -> CallOutcome:
        instance = attempt.loads[Role.PREFILL].instance
        timeout_s = self._services.settings.timeouts.prefill_s
        attempt.transferring = True
        self._record.prefill_sent_at = time.monotonic()
        leg = self._trace.leg(instance.role, attempt.transfer_id)
        error_text = ""
        try:
            answer = await self._post(instance, body, attempt, timeout_s, leg)
            outcome = CallOutcome(answer.status, await answer.read(timeout_s), answer.content_type)
        except LegFailed as error:
            error_text = error.message
            self._blame(instance, error)
            raise
        finally:
            leg.end(error_text)
        self._record.prefill_done_at = time.monotonic()
        if outcome.status < 500:
            instance.breaker.succeeded()
        else:
            instance.breaker.failed(time.monotonic())
            self._avoid.add(instance.key)
        return outcome

    async def _post(self, instance: Instance, body: bytes, attempt: Attempt, timeout_s: float, leg: Leg) -> Answer:
        headers = {**self._headers, **leg.headers} if leg.headers else self._headers
        if instance.settings.dp_rank is not None:
            headers = {**headers, "x-data-parallel-rank": str(instance.settings.dp_rank)}
        answer = await self._services.upstream.post(
            instance.settings.url, self._request.path, body, headers, instance.role, timeout_s
        )
        attempt.answers.append(answer)
        return answer

    async def _relay(self, role: Role, body: bytes, attempt: Attempt) -> None:
        timeouts = self._services.settings.timeouts
        first_s = timeouts.first_event_s if self._request.stream else timeouts.request_s
        instance = attempt.loads[role].instance
        self._record.decode_sent_at = time.monotonic()

        def first_event() -> None:
            attempt.first_event()
            instance.breaker.succeeded()
            self._record.first_event_at = time.monotonic()

        leg = self._trace.leg(instance.role, attempt.transfer_id)
        error_text = ""
        try:
            answer = await self._post(instance, body, attempt, first_s, leg)
            if 400 <= answer.status < 500:
                instance.breaker.succeeded()
                attempt.refused = True
            says_done = self._request.path in (CHAT, COMPLETIONS)
            relay = AnswerRelay(answer, self._down, timeouts, instance.role, says_done, first_event)
            try:
                await relay.run(first_s)
            finally:
                self._record.events = relay.events
        except LegFailed as error:
            error_text = error.message
            self._blame(instance, error)
            raise
        finally:
            leg.end(error_text)

    async def _relay_called_back(self, decode: bytes, attempt: Attempt) -> None:
        await self._relay_beside(self._prefill_when_called(attempt), decode, attempt)

    async def _prefill_when_called(self, attempt: Attempt) -> CallOutcome | None:
        callback = attempt.callback
        if callback is None:
            raise LocalProtocolError("nobody was to call back")
        try:
            params = checked_reservation(await callback.message)
        except RemoteProtocolError as error:
            raise LegFailed(f"decode: {error}", kind="bad_handoff") from error
        attempt.loads[Role.PREFILL] = self._select(Role.PREFILL, attempt)
        body = prefill_body(self._request, params, self._dialect.prefill_fields)
        outcome = await self._prefill_for_push(body, attempt)
        callback.outcome.set_result(outcome is None)
        return outcome

    async def _relay_both(self, decode: bytes, prefill: bytes, attempt: Attempt) -> None:
        await self._relay_beside(self._prefill_for_push(prefill, attempt), decode, attempt)

    async def _relay_beside(
        self, prefilling: Coroutine[Any, Any, CallOutcome | None], decode: bytes, attempt: Attempt
    ) -> None:
        """Relay D's answer while P's leg runs; a failure of either ends both."""
        computing = asyncio.create_task(prefilling)
        relaying = asyncio.create_task(self._relay(Role.DECODE, decode, attempt))
        try:
            await asyncio.wait([computing, relaying], return_when=asyncio.FIRST_COMPLETED)
            if computing.done() and not relaying.done() and not attempt.delivered:
                refusal = computing.result()
                if refusal is not None and not self._down.started:
                    await self._down.whole(refusal.status, refusal.body, refusal.content_type)
                    return
            await relaying
        finally:
            for task in (computing, relaying):
                task.cancel()
            await asyncio.gather(computing, relaying, return_exceptions=True)

    async def _prefill_for_push(self, body: bytes, attempt: Attempt) -> CallOutcome | None:
        """P's leg beside a waiting D; the outcome is P's refusal (a 4xx), if it refused."""
        outcome = await self._call(body, attempt)
        attempt.loads[Role.PREFILL].close()
        if 400 <= outcome.status < 500:
            return outcome
        if outcome.status != 200:
            raise prefill_error(outcome)
        return None

    def _blame(self, instance: Instance, error: LegFailed) -> None:
        if error.retryable:
            self._avoid.add(instance.key)
        if error.blame and not isinstance(error, EngineError):
            instance.breaker.failed(time.monotonic())

    async def _explained(self, error: EngineError, attempt: Attempt) -> LegFailed:
        """The engine's error with the reason that a connector kept for this transfer, if one did.

        A failed transfer is nobody's breaker's business: it may be the other engine's fault.
        """
        reason = ""
        if attempt.transferring:
            sides = (attempt.side(Role.DECODE), attempt.side(Role.PREFILL))
            reason = await self._services.holds.reason(sides, attempt.transfer_id)
        if not reason:
            load = attempt.loads.get(Role.DECODE) or attempt.loads.get(Role.UNION)
            if error.blame and load is not None:
                load.instance.breaker.failed(time.monotonic())
            return error
        return LegFailed(
            f"KV transfer {attempt.transfer_id} failed: {reason}",
            error.status if error.status in (500, 502, 504) else 502,
            kind="transfer_failed",
            retryable=error.retryable,
            blame=False,
        )
