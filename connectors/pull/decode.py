"""The decode engine's scheduler side of the pull connector: which requests are loaded, and keeping P's hold alive.

A request's handoff is used at most once. Whatever comes of it (loaded, failed, preempted and computed again), a
second question by the scheduler is answered with no external tokens, so a recompute cannot loop.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field

from vllm.v1.request import Request as EngineRequest

from ascend_pd.wire.identity import prompt_hash
from ascend_pd.wire.messages import Release, Renew
from ascend_pd.wire.params import PullHandoff
from connectors.compat import BlockIds
from connectors.endpoint import EngineEndpoint
from connectors.pull.metadata import PullLoad, PullReport
from connectors.request_params import params_for

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 5.0
RENEWALS_PER_LEASE = 3
"""A hold outlives two lost renewals."""


@dataclass(slots=True)
class _Handoff:
    """One request's handoff on its way through the scheduler."""

    params: PullHandoff
    next_renewal: float
    arrived: float
    loading: bool = False
    used: bool = False
    reports: int = 0


@dataclass(slots=True)
class _Outbox:
    loads: list[PullLoad] = field(default_factory=list)
    cancels: dict[str, str] = field(default_factory=dict)


class DecodeScheduler:
    """Called by vLLM's scheduler thread; `tick` by the side channel's thread."""

    def __init__(self, endpoint: EngineEndpoint, num_ranks: int) -> None:
        self._endpoint = endpoint
        self._num_ranks = num_ranks
        self._handoffs: dict[str, _Handoff] = {}
        self._by_transfer: dict[str, str] = {}
        self._outbox = _Outbox()
        self._lock = threading.Lock()

    def on_new_request(self, request: EngineRequest) -> None:
        """Note the handoff and begin to renew P's hold: this request may queue for long."""
        params = params_for(request, "do_remote_prefill", PullHandoff, "its prompt is computed here")
        if params is None:
            return
        now = time.monotonic()
        with self._lock:
            if params.transfer_id in self._by_transfer:
                # A second client request, computed here; or vLLM itself saying that it refused or failed the first.
                logger.warning(
                    "transfer %s is under way already: %s gets none of it", params.transfer_id, request.request_id
                )
                return
            self._by_transfer[params.transfer_id] = request.request_id
            self._handoffs[request.request_id] = _Handoff(params, now, now)
        self._endpoint.server.wake()

    def matched_tokens(self, request: EngineRequest, num_computed: int) -> tuple[int, bool]:
        """How many prompt tokens come from P beyond the `num_computed` ones at hand, all asynchronously."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None or handoff.used:
            return 0, False
        external = request.num_prompt_tokens - num_computed
        # The last prompt token is computed here in any case: alone it is not worth a transfer.
        return (external, True) if external > 1 else (0, False)

    def allocated(self, request: EngineRequest, block_ids: BlockIds, num_external: int) -> None:
        """Blocks are there: order the load, or let P go when nothing is wanted of it."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None or handoff.used:
            return
        handoff.used = True
        if num_external == 0:
            self._release(request.request_id, "the decode engine needs none of it")
            return
        handoff.loading = True
        queued_ms = (time.monotonic() - handoff.arrived) * 1e3
        self._endpoint.stories.record(
            handoff.params.transfer_id, "receiving", timings_ms={"decode_queue": queued_ms}
        )
        self._outbox.loads.append(
            PullLoad(
                request_id=request.request_id,
                handoff=handoff.params,
                sink=self._endpoint.ref,
                block_ids=tuple(tuple(ids) for ids in block_ids),
                num_cached_tokens=request.num_prompt_tokens - num_external,
                refusal=_refusal(handoff.params, request),
            )
        )

    def take_outbox(self) -> tuple[list[PullLoad], dict[str, str]]:
        """Loads and cancellations for the workers' next step."""
        outbox, self._outbox = self._outbox, _Outbox()
        return outbox.loads, outbox.cancels

    def report(self, report: PullReport) -> None:
        """Note how loads ended on the workers; a request is over when every rank has reported."""
        for load in report.loads:
            self._endpoint.stories.record(
                load.transfer_id,
                "received" if load.ok else "failed",
                reason=load.reason,
                timings_ms=load.timings_ms,
                bytes_moved=load.bytes_moved,
            )
            with self._lock:
                request_id = self._by_transfer.get(load.transfer_id)
                handoff = self._handoffs.get(request_id or "")
                if handoff is None or request_id is None:
                    continue
                handoff.reports += 1
                if handoff.reports >= self._num_ranks:
                    self._forget(request_id)

    def ended(self, request: EngineRequest) -> None:
        """vLLM finished or aborted the request. A running load is cancelled; vLLM keeps the blocks until then."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        if handoff.loading:
            self._outbox.cancels[request.request_id] = "the request was aborted"
        else:
            self._release(request.request_id, "the request was aborted before its cache was read")

    def tick(self, now: float) -> float | None:
        """Renew what is due; returns when the next renewal is."""
        due: list[PullHandoff] = []
        with self._lock:
            for handoff in self._handoffs.values():
                if handoff.next_renewal <= now:
                    due.append(handoff.params)
                    handoff.next_renewal = now + handoff.params.lease_seconds / RENEWALS_PER_LEASE
            upcoming = min((h.next_renewal for h in self._handoffs.values()), default=None)
        for params in due:
            message = Renew(transfer_id=params.transfer_id, source_epoch=params.remote_epoch)
            timeout_s = params.lease_seconds / RENEWALS_PER_LEASE
            self._endpoint.client.submit((params.remote_host, params.remote_port), message, timeout_s)
        return upcoming

    def _release(self, request_id: str, reason: str) -> None:
        with self._lock:
            params = self._handoffs[request_id].params
            self._forget(request_id)
        message = Release(transfer_id=params.transfer_id, epoch=params.remote_epoch, reason=reason)
        self._endpoint.client.submit((params.remote_host, params.remote_port), message, _RELEASE_TIMEOUT_S)

    def _forget(self, request_id: str) -> None:
        handoff = self._handoffs.pop(request_id)
        self._by_transfer.pop(handoff.params.transfer_id, None)


def _refusal(params: PullHandoff, request: EngineRequest) -> str:
    count = request.num_prompt_tokens
    if params.num_prompt_tokens != count:
        return f"the prompt differs: prefill computed {params.num_prompt_tokens} tokens, decode has {count}"
    if params.prompt_hash != prompt_hash(request.prompt_token_ids or ()):
        return "the prompt differs: equal length, other token ids (tokenizer or chat template)"
    return ""
