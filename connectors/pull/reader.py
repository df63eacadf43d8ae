"""The worker side of the pull connector: P's memory made readable, D's reads, and what vLLM is told of them.

One sink machine per rank. Three kinds of threads: vLLM's own (orders loads, takes results), one lane per prefill
engine (handshake, reads), one clock (deadlines and fences). None waits for another but for the ledger's lock,
which is never held during I/O.
"""

from __future__ import annotations

import logging
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from ascend_pd.errors import AscendPdError, TransferError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.plan import salt_of
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Answer, Done, Reply, Verdict
from connectors.device.base import Device
from connectors.driver import LedgerDriver
from connectors.handoff.actions import (
    AnswerEarly,
    DemandRestart,
    Fence,
    Outcome,
    ReportFinished,
    ReportOverdue,
    SendAbort,
    SendDone,
    SinkAction,
)
from connectors.handoff.sink import SinkLedger
from connectors.handshake import Address
from connectors.lanes import Lanes
from connectors.peers import Peer, PeerDirectory
from connectors.pull.comparison import Comparison
from connectors.pull.metadata import LoadReport, PullLoad
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.base import Transport
from connectors.transport.checksum import Verifier
from connectors.transport.mover import Mover
from connectors.transport.stage_peer import StagedRequest

logger = logging.getLogger(__name__)

_HANDSHAKE_S = 10.0
_ABORT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Load:
    """One load and what is measured of it; times are monotonic seconds."""

    order: PullLoad
    began: float
    deadline: float
    shaken: float = 0.0
    read: float = 0.0
    num_bytes: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)

    @property
    def transfer_id(self) -> str:
        return self.order.handoff.transfer_id

    @property
    def address(self) -> Address:
        return self.order.handoff.remote_host, self.order.handoff.remote_port

    @property
    def tokens(self) -> tuple[int, int]:
        """First and end of what is read."""
        return self.order.num_cached_tokens, self.order.handoff.num_prompt_tokens

    @property
    def source(self) -> EngineRef:
        return EngineRef(self.order.handoff.remote_engine_id, self.order.handoff.remote_epoch)


@dataclass(slots=True)
class LoadResults:
    """What vLLM is told at the end of a step."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    reports: list[LoadReport] = field(default_factory=list)
    unsound: str = ""
    """Why this engine must be restarted."""


class Reader:
    """D's side of one rank.

    Args:
        single_group: the model has one KV cache group, so failed loads are named by their block ids.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        device: Device,
        transport: Transport,
        peers: PeerDirectory,
        client: SideChannelClient,
        *,
        layout: KVLayout,
        single_group: bool,
    ) -> None:
        config = settings.config
        self._settings = settings
        self._transport = transport
        self._peers = peers
        self._client = client
        self._tp_rank = layout.tp_rank
        self._single_group = single_group
        self._ledger = SinkLedger(
            "worker",
            "pull",
            settings.sink_limits(single_group=single_group),
        )
        self._loads: dict[str, _Load] = {}
        self._owners: dict[str, str] = {}
        self._results = LoadResults()
        self._fence_is_due = False
        self._reading: dict[str, str] = {}
        """Transfers whose read has not returned, and the endpoint it began on; a fence spares those of its endpoint
        for a while, and is over only without those it cut."""
        self._mover = Mover(
            device,
            transport,
            client,
            f"{settings.engine_id}/{uuid.uuid4().hex}",
            layout,
            push=False,
            staging_bytes=config.staging_bytes,
        )
        verifier = Verifier(device, client, layout, push=False) if config.checksum else None
        self._comparison = Comparison(verifier, client) if verifier is not None else None
        self._lanes = Lanes(f"pull-r{layout.tp_rank}", device.bind_thread)
        self._driver: LedgerDriver[SinkAction] = LedgerDriver(
            f"pull-clock-r{layout.tp_rank}", self._perform, device.bind_thread
        )
        """Its lock guards everything above."""
        self._driver.open(self._ledger)

    # --- vLLM's thread -----------------------------------------------------------------------------------------

    def start(self, order: PullLoad) -> None:
        """Begin one load; its end shows in `take_results`, exactly once."""
        now = time.monotonic()
        load = _Load(order, began=now, deadline=now + self._settings.config.transfer_seconds)
        with self._driver.changed:
            begun, actions = self._ledger.begin(load.transfer_id, order.request_id, now, source=load.source)
            if not begun:
                self._fail_stranger(order)
                return
            self._loads[load.transfer_id] = load
            self._owners[order.request_id] = load.transfer_id
            if order.refusal:
                actions = actions + self._ledger.refuse(load.transfer_id, order.refusal, now)
            self._driver.perform(actions)
            self._driver.changed.notify_all()
        if not order.refusal and not self._lanes.submit(load.address, lambda: self._run(load)):
            self._refuse(load, "too many transfers wait for this prefill engine")

    def cancel(self, request_id: str) -> None:
        """The request was aborted; its load ends as soon as nothing can land any more."""
        with self._driver.changed:
            transfer_id = self._owners.get(request_id)
        if transfer_id is not None:
            self._driver.tell(partial(self._ledger.cancel, transfer_id))

    def take_results(self) -> LoadResults:
        """What ended since the last call."""
        with self._driver.changed:
            results, self._results = self._results, LoadResults()
            now = time.monotonic()
            for report in results.reports:
                self._driver.perform(self._ledger.reported(report.transfer_id, now))
        return results

    def close(self) -> None:
        """End all threads. The transport is closed by its owner, before this, so that reads return."""
        self._lanes.close()
        self._driver.close()
        self._mover.close()

    # --- a lane's thread ---------------------------------------------------------------------------------------

    def _run(self, load: _Load) -> None:
        try:
            source = self._peers.peer(
                load.address, load.source, min(_HANDSHAKE_S, load.deadline - time.monotonic())
            )
            load.shaken = time.monotonic()
            requests = _requests(load, source)
        except AscendPdError as error:
            self._refuse(load, str(error))
            return
        with self._driver.changed:
            via = self._transport.session
            granted = self._ledger.start_reads(load.transfer_id, uuid.uuid4().hex, len(requests), time.monotonic())
            if granted:
                self._reading[load.transfer_id] = via
        if not granted:
            return
        try:
            self._read(load, source, requests, via)
        finally:
            with self._driver.changed:
                self._reading.pop(load.transfer_id, None)
                self._driver.changed.notify_all()

    def _read(self, load: _Load, source: Peer, requests: dict[int, StagedRequest], via: str) -> None:
        left = len(requests)
        tokens = load.tokens
        try:
            for worker, request in requests.items():
                moved = self._mover.move(source.workers[worker], request, tokens, load.deadline, via)
                if self._comparison is not None:
                    where = load.address, load.transfer_id, source.workers[worker]
                    self._comparison.compare(*where, request, tokens, load.deadline)
                left -= 1
                load.num_bytes += moved
                load.read = time.monotonic()
                self._driver.tell(partial(self._ledger.read_ok, load.transfer_id, bytes_read=moved))
        except AscendPdError as error:
            self._peers.forget(load.address)
            failed = partial(
                self._ledger.read_failed, load.transfer_id, f"reading from {load.source} failed: {error}"
            )
            quiesced = isinstance(error, TransferError) and error.quiesced
            self._driver.tell(partial(failed, quiesced=quiesced))
            for _ in range(left - 1):
                self._driver.tell(partial(failed, quiesced=True))

    def _refuse(self, load: _Load, reason: str) -> None:
        self._driver.tell(lambda now: self._ledger.refuse(load.transfer_id, reason, now))

    # --- the jobs' thread --------------------------------------------------------------------------------------

    def _fence(self) -> None:
        with self._driver.changed:
            self._fence_is_due = False
            generation = self._ledger.fence_begins()
            cut = set(self._reading)
        try:
            former = self._transport.session
            session = self._transport.rotate(
                self._settings.fence_spare_s, lambda: former in list(self._reading.values())
            )
        except AscendPdError as error:
            reason = str(error)
            self._driver.tell(lambda now: self._ledger.fence_failed(reason, now))
            return
        self._wait_for_return(cut)
        self._mover.fenced()
        logger.warning("rank %d: transport endpoint destroyed and opened anew as %s", self._tp_rank, session)
        self._driver.tell(lambda now: self._ledger.fenced(generation, now))

    def _wait_for_return(self, cut: set[str]) -> None:
        """The wire is dead, but a read may still scatter what came before out of its staging slots. Its blocks stay
        in quarantine until it has returned; the ledger's own deadline says when that takes too long."""
        with self._driver.changed:
            while self._reading.keys() & cut and not self._driver.closed:
                self._driver.changed.wait(1.0)

    # --- what the ledger orders --------------------------------------------------------------------------------

    def _perform(self, action: SinkAction) -> None:
        if isinstance(action, SendDone):
            self._send_done(action)
        elif isinstance(action, SendAbort):
            self._send_abort(action)
        elif isinstance(action, AnswerEarly):
            self._results.invalid_block_ids |= self._loaded_blocks(self._loads[action.transfer_id].order)
        elif isinstance(action, ReportFinished):
            self._report(action)
        elif isinstance(action, Fence) and not self._fence_is_due:
            self._fence_is_due = True
            self._driver.later(self._fence)
        elif isinstance(action, ReportOverdue):
            logger.warning("transfer %s: vLLM has not taken its report; is a step stuck?", action.transfer_id)
        elif isinstance(action, DemandRestart):
            self._results.unsound = f"transfer {action.transfer_id}: {action.reason}"

    def _send_done(self, action: SendDone) -> None:
        load = self._loads[action.transfer_id]
        message = Done(
            transfer_id=action.transfer_id,
            source_epoch=action.source.epoch,
            sink=load.order.sink,
            sink_rank=self._tp_rank,
            sink_ranks=self._settings.tp_size,
            read_id=action.read_id,
        )
        future = self._client.submit(load.address, message, max(0.1, load.deadline - time.monotonic()))

        def answered(done: Future[Reply]) -> None:
            if done.cancelled() or done.exception() is not None:
                return  # the deadline decides: P may have vouched
            self._vouch(action, done.result())

        future.add_done_callback(answered)

    def _vouch(self, action: SendDone, reply: Reply) -> None:
        transfer_id, read_id = action.transfer_id, action.read_id
        if isinstance(reply, Answer) and reply.verdict is Verdict.OK:
            self._driver.tell(lambda now: self._ledger.vouched(transfer_id, read_id, now))
            return
        why = reply.reason if isinstance(reply, Answer) else type(reply).__name__
        reason = f"prefill does not vouch for the cache: {why}"
        self._driver.tell(lambda now: self._ledger.disowned(transfer_id, read_id, reason, now))

    def _send_abort(self, action: SendAbort) -> None:
        load = self._loads.get(action.transfer_id)
        if load is None:
            return
        message = Abort(
            transfer_id=action.transfer_id,
            epoch=action.peer.epoch,
            sender=load.order.sink,
            rank=self._tp_rank,
            drained=action.drained,
            reason=action.reason,
        )
        self._client.submit(load.address, message, _ABORT_TIMEOUT_S)

    def _report(self, action: ReportFinished) -> None:
        load = self._loads.pop(action.transfer_id)
        self._owners.pop(action.owner, None)
        received = action.outcome is Outcome.RECEIVED
        self._results.finished.add(action.owner)
        if action.outcome is Outcome.FAILED:
            self._name_failed(load.order)
        if not received:
            logger.warning("transfer %s of request %s: %s", action.transfer_id, action.owner, action.reason)
        self._results.reports.append(
            LoadReport(
                transfer_id=action.transfer_id,
                ok=received,
                reason="" if received else action.reason,
                bytes_moved=load.num_bytes if received else 0,
                timings_ms=_timings(load, time.monotonic()),
            )
        )

    def _name_failed(self, order: PullLoad) -> None:
        if self._single_group:
            self._results.invalid_block_ids |= self._loaded_blocks(order)
        else:
            self._results.failed.add(order.request_id)

    def _loaded_blocks(self, order: PullLoad) -> set[int]:
        skip = order.num_cached_tokens // self._settings.block_size
        return set(order.block_ids[0][skip:])

    def _fail_stranger(self, order: PullLoad) -> None:
        """A second request under one transfer id, after the end of the first."""
        self._results.finished.add(order.request_id)
        self._name_failed(order)
        reason = "this transfer id was used before"
        self._results.reports.append(LoadReport(transfer_id=order.handoff.transfer_id, ok=False, reason=reason))


def _requests(load: _Load, source: Peer) -> dict[int, StagedRequest]:
    """What to read of each of the prefill engine's workers.

    Raises:
        RemoteProtocolError: block ids that do not cover the tokens or do not exist.
    """
    salt = salt_of(load.transfer_id)
    blocks = load.order.handoff.remote_block_ids, load.order.block_ids
    requests: dict[int, StagedRequest] = {}
    for worker, pair in source.plan.pairs(salt).items():
        for _ in pair.resolved(*blocks, *load.tokens):
            pass  # checks the ids, before anything is read
        requests[worker] = StagedRequest(pair, salt, *blocks)
    return requests


def _timings(load: _Load, now: float) -> dict[str, float]:
    marks = {"handshake": (load.began, load.shaken), "read": (load.shaken, load.read), "vouch": (load.read, now)}
    timings = {name: (end - start) * 1e3 for name, (start, end) in marks.items() if start and end}
    return timings | {"transfer": (now - load.began) * 1e3}
