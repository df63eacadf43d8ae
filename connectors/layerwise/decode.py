"""The decode engine's scheduler side of the layer-wise connector: reservations, the one writer, and the fence.

The sink machine of the whole engine lives here, driven by the side channel's thread: claims, completions and
aborts are answered without a step of the engine. What vLLM is told travels with the next step through the workers,
so that it arrives as vLLM's contract wants it.
"""

from __future__ import annotations

import logging
import threading
import time

import msgspec
from vllm.v1.request import Request as EngineRequest

from ascend_pd.wire.identity import prompt_hash
from ascend_pd.wire.messages import Abort, Answer, Claim, Pushed, Release, Reply, Request, Verdict, WorkerInfo
from ascend_pd.wire.params import LayerwiseDecode, Reservation
from connectors.compat import BlockIds
from connectors.endpoint import EngineEndpoint
from connectors.handoff.actions import (
    AnswerEarly,
    DemandRestart,
    Fence,
    Outcome,
    ReportFinished,
    ReportOverdue,
    SendAbort,
    SinkAction,
)
from connectors.handoff.sink import SinkLedger
from connectors.layerwise.metadata import FenceReport, LayerwiseMetadata
from connectors.layerwise.reserved import Reserved, ReservedBook
from connectors.request_params import params_for
from connectors.settings import ConnectorSettings
from connectors.sidechannel.rendezvous import RendezvousClient

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0


class DecodeScheduler:
    """Called by vLLM's scheduler thread; `handle` and `tick` by the side channel's thread."""

    def __init__(
        self,
        settings: ConnectorSettings,
        endpoint: EngineEndpoint,
        rendezvous: RendezvousClient,
        *,
        single_group: bool,
    ) -> None:
        self._settings = settings
        self._endpoint = endpoint
        self._rendezvous = rendezvous
        self._single_group = single_group
        self._ledger = SinkLedger(
            endpoint.ref.epoch,
            "layerwise",
            settings.sink_limits(single_group=single_group),
        )
        self._book = ReservedBook()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._delivered: list[str] = []
        self._fence_wanted = False
        self._fencing: int | None = None
        self._fence_reports: list[FenceReport] = []
        self._lock = threading.RLock()

    # --- vLLM's thread -----------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest) -> None:
        """Note that this request's cache is to be pushed."""
        params = params_for(request, "do_remote_prefill", LayerwiseDecode, "its prompt is computed here")
        if params is None:
            return
        # A configured metaserver is the one: what a request names is not taken on trust.
        params = msgspec.structs.replace(params, metaserver=self._settings.config.metaserver or params.metaserver)
        with self._lock:
            if not self._book.expect(request.request_id, params):
                logger.warning("transfer %s is used already; its prompt is computed here", params.transfer_id)

    def matched_tokens(self, request: EngineRequest, num_computed: int) -> tuple[int, bool]:
        """How many prompt tokens P is to push beyond the `num_computed` ones at hand."""
        if request.request_id not in self._book.expected:
            return 0, False
        external = request.num_prompt_tokens - num_computed
        # The last prompt token is computed here in any case: alone it is not worth a transfer.
        return (external, True) if external > 1 else (0, False)

    def allocated(self, request: EngineRequest, block_ids: BlockIds, num_external: int) -> None:
        """Blocks are there: reserve them for P, or say that P is not needed."""
        params = self._book.expected.get(request.request_id)
        if params is None:
            return
        if num_external == 0:
            self._decline(request.request_id, "decode has the whole prompt in its cache")
            return
        num_cached = request.num_prompt_tokens - num_external
        digest = prompt_hash(request.prompt_token_ids or ())
        host, port = self._endpoint.address
        with self._lock:
            reserved = self._book.reserve(request.request_id, block_ids, num_cached, time.monotonic())
            begun, actions = self._ledger.begin(
                params.transfer_id,
                request.request_id,
                time.monotonic(),
                prompt_hash=digest,
                num_tokens=request.num_prompt_tokens,
            )
            self._perform(actions)
            if not begun:
                self._book.end(params.transfer_id)
                self._tell_failed(reserved)
                self._received.add(reserved.request_id)
                return
        self._endpoint.stories.record(params.transfer_id, "reserved")
        self._endpoint.server.wake()
        reservation = Reservation(
            transfer_id=params.transfer_id,
            sink_engine_id=self._endpoint.ref.engine_id,
            sink_epoch=self._endpoint.ref.epoch,
            sink_host=host,
            sink_port=port,
            block_ids=[list(ids) for ids in block_ids],
            block_size=self._settings.block_size,
            tp_size=self._settings.tp_size,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=num_cached,
            prompt_hash=digest,
            endpoints=self._endpoint.endpoints,
            deadline_seconds=self._settings.config.transfer_seconds,
        )
        self._rendezvous.announce(params.metaserver, reservation)

    def ended(self, request: EngineRequest) -> None:
        """vLLM finished or aborted the request; reserved blocks stay until nothing can land in them."""
        if request.request_id in self._book.expected:
            self._decline(request.request_id, "the request was aborted before its blocks were reserved")
            return
        with self._lock:
            reserved = self._book.by_request.get(request.request_id)
            if reserved is not None:
                self._perform(self._ledger.cancel(reserved.transfer_id, time.monotonic()))
        self._endpoint.server.wake()

    def fill(self, metadata: LayerwiseMetadata) -> None:
        """What the workers tell vLLM, or do, in this step."""
        with self._lock:
            metadata.received, self._received = self._received, set()
            metadata.failed, self._failed = self._failed, set()
            metadata.invalid_block_ids, self._invalid_block_ids = self._invalid_block_ids, set()
            now = time.monotonic()
            delivered, self._delivered = self._delivered, []
            for transfer_id in delivered:
                self._perform(self._ledger.reported(transfer_id, now))
            metadata.receiving = self._ledger.num_receiving() > 0
            if self._fence_wanted and self._fencing is None:
                self._fence_wanted = False
                self._fencing = metadata.fence = self._ledger.fence_begins()

    def report_fences(self, reports: list[FenceReport]) -> None:
        """A fence is over when every rank's is; one rank's failure is the engine's."""
        with self._lock:
            self._fence_reports += [report for report in reports if report.generation == self._fencing]
            if self._fencing is None or len(self._fence_reports) < self._settings.tp_size:
                return
            done, self._fence_reports = self._fence_reports, []
            generation, self._fencing = self._fencing, None
            failures = [report.failure for report in done if report.failure]
            infos: list[WorkerInfo] = [report.info for report in done]
            self._endpoint.renew(infos)
            now = time.monotonic()
            if failures:
                self._perform(self._ledger.fence_failed("; ".join(failures), now))
            else:
                self._perform(self._ledger.fenced(generation, now))

    # --- the side channel's thread -----------------------------------------------------------------------------

    def handle(self, request: Request) -> Reply:
        """Answer a message about a transfer."""
        if not isinstance(request, Claim | Pushed | Release | Abort):
            return Answer(verdict=Verdict.REFUSED, reason="this engine holds nothing for others (decode)")
        with self._lock:
            if isinstance(request, Claim) and self._must_wait(request):
                return Answer(verdict=Verdict.LATER, reason="decode renews its transport endpoint")
            answer, actions = self._ledger.handle(request, time.monotonic())
            granted = isinstance(request, Claim) and isinstance(answer, Answer) and answer.verdict is Verdict.OK
            reserved = self._book.by_transfer.get(request.transfer_id)
            if granted and isinstance(request, Claim) and reserved is not None:
                reserved.source_address = (request.source_host, request.source_port)
                self._settle(reserved)
            if isinstance(request, Pushed) and reserved is not None:
                reserved.num_bytes += request.bytes_sent
            self._perform(actions)
        return answer

    def _must_wait(self, claim: Claim) -> bool:
        """A fence would cut what is granted now: let P come again, with the sessions of after the fence."""
        reserved = self._book.by_transfer.get(claim.transfer_id)
        if reserved is None or claim.sink_epoch != self._endpoint.ref.epoch:
            return False
        renewing = self._fence_wanted or self._fencing is not None
        # What was granted before a fence does not outlive it: a further rank may still join until then.
        return claim.endpoints < self._endpoint.endpoints or (renewing and reserved.source_address is None)

    def tick(self, now: float) -> float | None:
        """Let deadlines take effect; returns when to look again."""
        with self._lock:
            self._perform(self._ledger.tick(now))
            upcoming = self._ledger.next_deadline()
        return upcoming if upcoming < float("inf") else None

    def knows(self, transfer_id: str) -> bool:
        """Whether this engine reserved for the transfer."""
        with self._lock:
            return transfer_id in self._book.by_transfer

    def has_news(self) -> bool:
        """Whether vLLM should be told something, or the workers."""
        return bool(self._received or self._invalid_block_ids or self._delivered or self._fence_wanted)

    # --- what the ledger orders --------------------------------------------------------------------------------

    def _perform(self, actions: list[SinkAction]) -> None:
        for action in actions:
            if isinstance(action, ReportFinished):
                self._finish(action)
            elif isinstance(action, AnswerEarly):
                self._invalid_block_ids |= self._book.by_transfer[action.transfer_id].pushed_blocks(
                    self._settings.block_size
                )
            elif isinstance(action, SendAbort):
                self._send_abort(action)
            elif isinstance(action, Fence):
                self._fence_wanted = True
            elif isinstance(action, ReportOverdue):
                logger.warning("transfer %s: vLLM has not taken its report; is a step stuck?", action.transfer_id)
            elif isinstance(action, DemandRestart):
                self._endpoint.declare_unsound(f"transfer {action.transfer_id}: {action.reason}")

    def _finish(self, action: ReportFinished) -> None:
        reserved = self._book.end(action.transfer_id)
        self._settle(reserved)
        self._received.add(action.owner)
        self._delivered.append(action.transfer_id)
        received = action.outcome is Outcome.RECEIVED
        if action.outcome is Outcome.FAILED:
            self._tell_failed(reserved)
        if not received:
            logger.warning("transfer %s of request %s: %s", action.transfer_id, action.owner, action.reason)
            self._rendezvous.withdraw(reserved.metaserver, action.transfer_id, action.reason)
        self._endpoint.stories.record(
            action.transfer_id,
            "received" if received else "failed",
            reason="" if received else action.reason,
            timings_ms={"transfer": (time.monotonic() - reserved.since) * 1e3},
            bytes_moved=reserved.num_bytes if received else 0,
        )

    def _tell_failed(self, reserved: Reserved) -> None:
        if self._single_group:
            self._invalid_block_ids |= reserved.pushed_blocks(self._settings.block_size)
        else:
            self._failed.add(reserved.request_id)

    def _send_abort(self, action: SendAbort) -> None:
        reserved = self._book.by_transfer.get(action.transfer_id)
        address = reserved.source_address if reserved is not None else None
        if address is None or not address[1]:
            return
        message = Abort(
            transfer_id=action.transfer_id,
            epoch=action.peer.epoch,
            sender=self._endpoint.ref,
            drained=action.drained,
            reason=action.reason,
        )
        self._endpoint.client.submit(address, message, _ABORT_TIMEOUT_S)

    def _settle(self, reserved: Reserved) -> None:
        if not reserved.settled:
            reserved.settled = True
            self._rendezvous.settle(reserved.transfer_id)

    def _decline(self, request_id: str, reason: str) -> None:
        with self._lock:
            params = self._book.decline(request_id)
        self._rendezvous.withdraw(params.metaserver, params.transfer_id, reason)
