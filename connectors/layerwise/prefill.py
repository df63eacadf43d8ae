"""The prefill engine's scheduler side of the layer-wise connector: which tokens each step makes final, and when
blocks go back.

The source machines live in the workers, which reserve, claim and write. Here is only what the scheduler knows:
block lists, chunks, preemptions, ends; and what arrives on this engine's side channel, passed on with the next
step. A finished prefill keeps its blocks until every rank reports finished_sending.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from ascend_pd.wire.identity import prompt_hash
from ascend_pd.wire.messages import Abort, Answer, Release, Reply, Request, Verdict
from ascend_pd.wire.params import LayerwisePrefill
from connectors.compat import BlockIds
from connectors.endpoint import EngineEndpoint
from connectors.handoff.unreserved import UnreservedCap
from connectors.layerwise.metadata import LayerwiseMetadata, LayerwiseReport, PushBegin, PushChunk
from connectors.layerwise.settled import BlockTables
from connectors.request_params import params_for

logger = logging.getLogger(__name__)

_ABORTED = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)
MAX_REVOKED = 4096


@dataclass(slots=True)
class _Prefill:
    """One request that is to be pushed."""

    request: EngineRequest
    params: LayerwisePrefill
    announced: bool = False
    granted: bool = False
    dropped: bool = False
    finished_at: float = 0.0
    num_blocks: int = 0


class PrefillScheduler:
    """Called by vLLM's scheduler thread; `handle` by the side channel's thread.

    Args:
        max_unreserved_blocks: finished prefills that D has not reserved for may hold this many while others wait
            for room, so that a full P and a full D never wait for each other.
        patience_s: and no longer than this.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        max_unreserved_blocks: int,
        patience_s: float,
        metaserver: str,
        block_size: int,
    ) -> None:
        self._metaserver = metaserver
        self._endpoint = endpoint
        self._max_unreserved_blocks = max_unreserved_blocks
        self._patience_s = patience_s
        self._tables = BlockTables(block_size)
        self._prefills: dict[str, _Prefill] = {}
        self._transfers: dict[str, str] = {}
        self._revoked: dict[str, str] = {}
        self._messages: list[Abort | Release] = []
        self._finished: dict[str, str] = {}
        self._cancels: dict[str, str] = {}
        self._lock = threading.Lock()
        """Guards `_transfers`, `_revoked` and `_messages`, which the side channel's thread uses as well."""

    def on_new_request(self, request: EngineRequest) -> None:
        """Note which transfer this request computes for."""
        params = params_for(request, "do_remote_decode", LayerwisePrefill, "it is computed without a push")
        if params is None:
            return
        with self._lock:
            used = params.transfer_id in self._transfers or params.transfer_id in self._revoked
            if not used:
                self._transfers[params.transfer_id] = request.request_id
        if used:
            logger.warning("transfer %s: used already or given up; no push", params.transfer_id)
            return
        self._prefills[request.request_id] = _Prefill(request, params)
        self._endpoint.stories.record(params.transfer_id, "preparing")

    def describe_step(self, output: SchedulerOutput, metadata: LayerwiseMetadata) -> None:
        """Fill in what the workers have to know about this step."""
        metadata.side_address = self._endpoint.address
        with self._lock:
            metadata.messages, self._messages = self._messages, []
        for request_id in output.preempted_req_ids or ():
            prefill = self._prefills.get(request_id)
            if prefill is not None and prefill.announced:
                metadata.preempted.append(prefill.params.transfer_id)
        self._tables.step(output)
        self._describe_new(output, metadata)
        self._describe_cached(output, metadata)
        self._drop_unreserved()
        metadata.finished, self._finished = self._finished, {}
        metadata.cancels, self._cancels = self._cancels, {}

    def report(self, report: LayerwiseReport) -> None:
        """Note what the workers say of their pushes."""
        for push in report.pushes:
            with self._lock:
                request_id = self._transfers.get(push.transfer_id, "")
            prefill = self._prefills.get(request_id)
            if prefill is not None and push.state == "granted":
                prefill.granted = True
            self._endpoint.stories.record(
                push.transfer_id,
                push.state,
                reason=push.reason,
                timings_ms=push.timings_ms,
                bytes_moved=push.bytes_moved,
            )

    def released(self, request_ids: set[str]) -> None:
        """Every rank has let go of these requests' blocks."""
        for request_id in request_ids:
            self._forget(request_id)

    def ended(self, request: EngineRequest, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """vLLM finished or aborted the request; True keeps its blocks until the workers let go of them."""
        prefill = self._prefills.get(request.request_id)
        if prefill is None:
            return False, None
        transfer_id = prefill.params.transfer_id
        if not prefill.announced:
            self._forget(request.request_id)
            return False, None
        if request.status in _ABORTED:
            self._cancels[transfer_id] = "the prefill was aborted"
        self._finished[transfer_id] = request.request_id
        prefill.finished_at = time.monotonic()
        prefill.num_blocks = sum(map(len, block_ids))
        return True, None

    def handle(self, request: Request) -> Reply:
        """Pass a message about a transfer on to the workers, with the next step.

        The answer never promises that P has drained: only the ranks know, and each says so itself.
        """
        if not isinstance(request, Abort | Release):
            return Answer(verdict=Verdict.REFUSED, reason="this engine pushes (prefill, layer-wise)")
        epoch = self._endpoint.ref.epoch
        if request.epoch != epoch and not (isinstance(request, Release) and not request.epoch):
            return Answer(verdict=Verdict.EPOCH, reason=f"this engine lives epoch {epoch}")
        with self._lock:
            known = request.transfer_id in self._transfers
            if known:
                self._messages.append(request)
            else:
                self._revoked[request.transfer_id] = request.reason
                while len(self._revoked) > MAX_REVOKED:
                    del self._revoked[next(iter(self._revoked))]
        # Of a transfer that never began here nothing can be in flight, and nothing will be.
        return Answer(verdict=Verdict.OK, drained=not known)

    def has_news(self) -> bool:
        """Whether the workers should hear something although no request is computed."""
        return bool(self._messages or self._finished or self._cancels)

    def _describe_new(self, output: SchedulerOutput, metadata: LayerwiseMetadata) -> None:
        for new in output.scheduled_new_reqs:
            prefill = self._prefills.get(new.req_id)
            if prefill is None:
                continue
            prefill.announced = True
            request = prefill.request
            metadata.begins.append(
                PushBegin(
                    request_id=new.req_id,
                    transfer_id=prefill.params.transfer_id,
                    # A configured metaserver is the one: what a request names is not taken on trust.
                    metaserver=self._metaserver or prefill.params.metaserver,
                    num_prompt_tokens=request.num_prompt_tokens,
                    prompt_hash=prompt_hash(request.prompt_token_ids or ()),
                )
            )
            scheduled = output.num_scheduled_tokens[new.req_id]
            chunk = self._chunk(prefill, new.block_ids, True, new.num_computed_tokens, scheduled)
            metadata.chunks.append(chunk)

    def _describe_cached(self, output: SchedulerOutput, metadata: LayerwiseMetadata) -> None:
        cached = output.scheduled_cached_reqs
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            prefill = self._prefills.get(request_id)
            if prefill is None:
                continue
            resumed = request_id in cached.resumed_req_ids
            scheduled = output.num_scheduled_tokens[request_id]
            metadata.chunks.append(self._chunk(prefill, block_ids or (), resumed, computed, scheduled))

    def _chunk(
        self, prefill: _Prefill, block_ids: BlockIds, replaces: bool, computed: int, scheduled: int
    ) -> PushChunk:
        return PushChunk(
            transfer_id=prefill.params.transfer_id,
            new_block_ids=block_ids,
            replaces=replaces,
            settled_token=self._tables.settled(block_ids, computed) if replaces else computed,
            end_token=min(computed + scheduled, prefill.request.num_prompt_tokens),
        )

    def _drop_unreserved(self) -> None:
        """Give up what D has not reserved for within a lease; and earlier, newest first, what is over the cap while
        another prefill waits for room."""
        waiting = [p for p in self._prefills.values() if p.finished_at and not (p.granted or p.dropped)]
        overdue = time.monotonic() - self._patience_s
        for prefill in waiting:
            if prefill.finished_at <= overdue:
                self._drop(prefill, "decode did not reserve for them within a lease")
        if all(prefill.announced for prefill in self._prefills.values()):
            return
        cap = UnreservedCap(self._max_unreserved_blocks)
        by_transfer = {prefill.params.transfer_id: prefill for prefill in waiting}
        for prefill in sorted(waiting, key=lambda p: p.finished_at):
            for transfer_id in cap.add(prefill.params.transfer_id, prefill.num_blocks):
                self._drop(by_transfer[transfer_id], "decode had not reserved for them and prefill needs room")

    def _drop(self, prefill: _Prefill, why: str) -> None:
        if not prefill.dropped:
            prefill.dropped = True
            self._cancels[prefill.params.transfer_id] = f"prefill gave its finished blocks up: {why}"

    def _forget(self, request_id: str) -> None:
        prefill = self._prefills.pop(request_id, None)
        if prefill is not None:
            with self._lock:
                self._transfers.pop(prefill.params.transfer_id, None)
