"""P's side of one rank: reserve, claim and write each layer as it becomes final, without a network call on vLLM's
thread.

One source machine per rank. vLLM's thread notes what a step computes and wakes lanes; one lane per decode engine
shakes hands, claims and writes; the rendezvous client's thread brings reservations; the driver's thread keeps
deadlines and closes the endpoint. What is ready when a lane looks goes in one call, so that while one write is on
the wire the next layers gather.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from ascend_pd.errors import AscendPdError, LocalProtocolError, TransferError
from ascend_pd.layout.description import KVLayout
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Answer, Reply, Verdict
from ascend_pd.wire.params import Reservation
from connectors.device.base import Device, Event
from connectors.driver import LedgerDriver
from connectors.handoff.actions import (
    CloseSession,
    DemandRestart,
    FreeBlocks,
    SendAbort,
    SendPushed,
    SourceAction,
    StopSubmitting,
)
from connectors.handoff.source import SourceLedger, SourceLimits
from connectors.handshake import Address
from connectors.lanes import Lanes
from connectors.layerwise.claiming import ClaimDenied, claim
from connectors.layerwise.metadata import LayerwiseMetadata, PushBegin, PushChunk, PushReport
from connectors.layerwise.progress import Batch, PushProgress
from connectors.layerwise.push import Push
from connectors.layerwise.session_closer import SessionCloser
from connectors.layerwise.writer import Writer
from connectors.peers import PeerDirectory
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.sidechannel.rendezvous import RendezvousClient
from connectors.transport.base import Transport

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0
_MAX_ADDRESSES = 8192
PREEMPTION_DRAIN_S = 5.0
"""How long vLLM's thread waits for writes out of blocks that are about to be overwritten."""


class Pusher:
    """P's side of one rank."""

    def __init__(
        self,
        settings: ConnectorSettings,
        device: Device,
        transport: Transport,
        writer: Writer,
        sinks: PeerDirectory,
        client: SideChannelClient,
        rendezvous: RendezvousClient,
        *,
        layout: KVLayout,
        num_ranks: int,
    ) -> None:
        config = settings.config
        self._device = device
        self._transport = transport
        self._sinks = sinks
        self._client = client
        self._rendezvous = rendezvous
        self._rank = layout.worker
        self._num_ranks = num_ranks
        self._layers = tuple(sorted({region.layer for region in layout.regions}))
        self._writer = writer
        self._patience_s = config.transfer_seconds
        self._limits = SourceLimits(
            lease_s=config.lease_seconds,
            max_hold_s=config.max_hold_seconds,
            push_s=config.transfer_seconds,
            drain_s=config.quarantine_seconds,
        )
        self._ledger: SourceLedger | None = None
        self._engine = EngineRef("", "")
        self._side_address = ("", 0)
        self._pushes: dict[str, Push] = {}
        self._addresses: OrderedDict[str, Address] = OrderedDict()
        """Whom to tell of a transfer, also after its end."""
        self._step: list[tuple[Push, int]] = []
        """What the running step computes: (push, tokens final at its end)."""
        self._freed: set[str] = set()
        self._reports: list[PushReport] = []
        self._unsound = ""
        self._claims = Lanes(f"claim-r{layout.worker}", device.bind_thread)
        """Apart from the writes: a claim that waits behind them would look like no reservation."""
        self._lanes = Lanes(f"push-r{layout.worker}", device.bind_thread)
        self._driver: LedgerDriver[SourceAction] = LedgerDriver(
            f"push-clock-r{layout.worker}", self._perform, device.bind_thread
        )
        """Its lock guards everything above."""
        self._closer = SessionCloser(
            self._rank, transport, self._driver, closed=self._session_closed, failed=self._close_failed
        )

    # --- vLLM's thread -----------------------------------------------------------------------------------------

    def begin_step(self, metadata: LayerwiseMetadata) -> None:
        """Before the forward: take in what the scheduler says of this step."""
        # The device may still be at work on earlier steps.
        before = self._device.record() if metadata.chunks else None
        with self._driver.changed:
            ledger = self._opened(metadata)
            now = time.monotonic()
            for message in metadata.messages:
                self._driver.perform(ledger.handle(message, now)[1])
            for order in metadata.begins:
                self._begin(order, now)
            self._step = []
            for chunk in metadata.chunks:
                self._plan_chunk(chunk, now, before)
            for transfer_id, reason in metadata.cancels.items():
                self._driver.perform(ledger.cancel(transfer_id, reason, now))
            for transfer_id, owner in metadata.finished.items():
                self._driver.perform(ledger.finished(transfer_id, owner, now))
            self._driver.changed.notify_all()

    def preempt(self, transfer_ids: Sequence[str]) -> None:
        """Before blocks are overwritten: no write may read them any more, at whatever price."""
        deadline = time.monotonic() + PREEMPTION_DRAIN_S
        with self._driver.changed:
            if self._ledger is None:
                return
            for transfer_id in transfer_ids:
                self._driver.perform(self._ledger.preempted(transfer_id, time.monotonic()))
                push = self._pushes.get(transfer_id)
                if push is not None:
                    push.preempted = True
                    push.progress.rewind()
            overdue = [t for t in transfer_ids if not self._drained_by(t, deadline)]
            for transfer_id in overdue:
                self._driver.perform(self._ledger.drain_overdue(transfer_id, time.monotonic()))
        if overdue:
            self._closer.run()

    def save_layer(self, layer: int) -> None:
        """A layer's cache of this step is written: its final blocks may go."""
        if not self._step:
            return
        event = self._device.record()
        with self._driver.changed:
            for push, end in self._step:
                push.progress.compute(layer, end, event)
                self._wake(push)

    def end_step(self) -> None:
        """After the forward: layers without a hook are final as well."""
        if not self._step:
            return
        event = self._device.record()
        with self._driver.changed:
            for push, end in self._step:
                for layer in self._layers:
                    push.progress.compute(layer, end, event)
                if push.progress.computed:
                    push.computed_at = time.monotonic()
                self._wake(push)
            self._step = []

    def take_results(self) -> tuple[set[str], list[PushReport], str]:
        """Requests whose blocks this rank lets go of, each once; news for the scheduler; why to restart, if so."""
        with self._driver.changed:
            freed, self._freed = self._freed, set()
            reports, self._reports = self._reports, []
            unsound, self._unsound = self._unsound, ""
        return freed, reports, unsound

    def close(self) -> None:
        """End all threads. The transport is closed before this, so that writes return."""
        self._claims.close()
        self._lanes.close()
        self._driver.close()
        self._writer.close()

    # --- taking in a request -----------------------------------------------------------------------------------

    def _opened(self, metadata: LayerwiseMetadata) -> SourceLedger:
        if self._ledger is None:
            self._engine = metadata.engine
            self._side_address = metadata.side_address
            self._ledger = SourceLedger(metadata.engine.epoch, self._limits)
            self._driver.open(self._ledger)
        return self._ledger

    @property
    def _book(self) -> SourceLedger:
        if self._ledger is None:
            raise LocalProtocolError("no step has begun")
        return self._ledger

    def _begin(self, order: PushBegin, now: float) -> None:
        if not self._book.begin(order.transfer_id, order.request_id, now):
            return
        progress = PushProgress(self._layers, order.num_prompt_tokens)
        push = self._pushes[order.transfer_id] = Push(order, progress, now)
        push.wait = self._rendezvous.wait_for(order.metaserver, order.transfer_id, self._patience_s)
        push.wait.add_done_callback(lambda future: self._reserved(push, future))

    def _plan_chunk(self, chunk: PushChunk, now: float, before: Event | None) -> None:
        push = self._pushes.get(chunk.transfer_id)
        if push is None:
            return
        if chunk.replaces:
            push.block_ids = [list(ids) for ids in chunk.new_block_ids]
            push.preempted = push.sealed = False
            self._driver.perform(self._book.resumed(chunk.transfer_id, now))
        else:
            for known, new in zip(push.block_ids, chunk.new_block_ids, strict=False):
                known += new
        push.progress.compute_all(chunk.settled_token, before)
        self._step.append((push, chunk.end_token))
        self._wake(push)

    def _drained_by(self, transfer_id: str, deadline: float) -> bool:
        while self._book.in_flight(transfer_id):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            self._driver.changed.wait(remaining)
        return True

    # --- the rendezvous' thread --------------------------------------------------------------------------------

    def _reserved(self, push: Push, future: Future[Reservation]) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if error is not None:
            self._driver.tell(partial(self._book.cancel, push.transfer_id, f"no reservation: {error}"))
            return
        reservation = future.result()
        with self._driver.changed:
            push.reservation = reservation
            self._addresses[push.transfer_id] = push.address
            while len(self._addresses) > _MAX_ADDRESSES:
                self._addresses.popitem(last=False)
            ended = push.ended
        if ended is None:
            self._claims.submit(push.address, lambda: self._claim(push))
            return
        engine = EngineRef(reservation.sink_engine_id, reservation.sink_epoch)
        self._send_abort(push.address, push.transfer_id, engine, drained=True, reason=ended)

    # --- a lane's thread ---------------------------------------------------------------------------------------

    def _claim(self, push: Push) -> None:
        reservation = push.reserved
        engine = EngineRef(reservation.sink_engine_id, reservation.sink_epoch)
        try:
            sink = claim(
                push,
                self._engine,
                self._num_ranks,
                self._side_address,
                sinks=self._sinks,
                client=self._client,
                given_up=lambda: push.ended is not None,
            )
        except AscendPdError as error:
            give_up = self._book.denied if isinstance(error, ClaimDenied) else self._book.cancel
            self._driver.tell(partial(give_up, push.transfer_id, str(error)))
            # D need not wait for its deadline, nor for this rank: nothing of it is, or will be, in flight.
            self._send_abort(push.address, push.transfer_id, engine, drained=True, reason=str(error))
            return
        with self._driver.changed:
            push.sink = sink
            push.progress.reserve(reservation.num_cached_tokens, sink.plan.unit_tokens)
            self._driver.perform(self._book.granted(push.transfer_id, engine, time.monotonic()))
            self._reports.append(PushReport(push.transfer_id, "granted"))
            self._wake(push)

    def _pump(self, push: Push) -> None:
        """Write whatever is ready until nothing is."""
        while True:
            with self._driver.changed:
                batches = push.progress.take()
                if not batches or not self._book.submit(push.transfer_id, time.monotonic()):
                    push.pumping = False
                    self._seal(push)
                    return
                push.via = self._transport.session
            self._write(push, batches, push.via)

    def _seal(self, push: Push) -> None:
        if push.progress.complete and not push.sealed:
            push.sealed = True
            self._driver.perform(self._book.all_submitted(push.transfer_id, time.monotonic()))

    def _write(self, push: Push, batches: list[Batch], via: str) -> None:
        deadline = time.monotonic() + self._patience_s
        started = time.monotonic()
        failed = partial(self._book.write_failed, push.transfer_id)
        try:
            self._writer.write(push, batches, deadline, via)
        except TransferError as error:
            self._sinks.forget(push.address)
            self._driver.tell(partial(failed, f"writing to decode failed: {error}", quiesced=error.quiesced))
            return
        except AscendPdError as error:
            self._driver.tell(partial(failed, str(error), quiesced=True))
            return
        push.write_s += time.monotonic() - started
        self._driver.tell(partial(self._book.write_ok, push.transfer_id))

    def _wake(self, push: Push) -> None:
        if push.sink is not None and not push.pumping:
            push.pumping = self._lanes.submit(push.address, lambda: self._pump(push))

    # --- what the ledger orders --------------------------------------------------------------------------------

    def _perform(self, action: SourceAction) -> None:
        if isinstance(action, FreeBlocks):
            self._freed.add(action.owner)
            self._end(action.transfer_id, action.reason)
        elif isinstance(action, SendPushed):
            self._send_pushed(action)
        elif isinstance(action, SendAbort):
            address = self._addresses.get(action.transfer_id)
            if address is not None:
                self._send_abort(
                    address, action.transfer_id, action.peer, drained=action.drained, reason=action.reason
                )
        elif isinstance(action, CloseSession):
            push = self._pushes.get(action.transfer_id)
            self._closer.order(push.via if push is not None else "")
        elif isinstance(action, StopSubmitting):
            return  # `submit` refuses by itself
        elif isinstance(action, DemandRestart):
            self._unsound = f"transfer {action.transfer_id}: {action.reason}"

    def _session_closed(self, opened: set[str]) -> None:
        now = time.monotonic()
        spared = {push.transfer_id for push in self._pushes.values() if push.via in opened}
        self._writer.session_closed()
        self._driver.perform(self._book.session_closed(now, spared))

    def _close_failed(self, reason: str) -> None:
        for transfer_id in list(self._pushes):
            self._driver.perform(self._book.close_failed(transfer_id, reason, time.monotonic()))

    def _send_pushed(self, action: SendPushed) -> None:
        push = self._pushes[action.transfer_id]
        message = push.pushed(self._engine, self._rank, action.sink)
        future = self._client.submit(push.address, message, _ANSWER_S)
        future.add_done_callback(lambda done: self._told(push, done))

    def _told(self, push: Push, done: Future[Reply]) -> None:
        if done.cancelled() or done.exception() is not None:
            return  # the ledger's deadline frees the blocks: every write is acknowledged
        answer = done.result()
        with self._driver.changed:
            if isinstance(answer, Answer) and answer.verdict is not Verdict.OK:
                # The writes are over all the same: the blocks are free.
                reason = f"decode did not take it: {answer.reason}"
                self._reports.append(PushReport(push.transfer_id, "failed", reason=reason))
            else:
                self._reports.append(push.report(time.monotonic()))
        self._driver.tell(partial(self._book.told, push.transfer_id))

    def _send_abort(
        self, address: Address, transfer_id: str, peer: EngineRef, *, drained: bool, reason: str
    ) -> None:
        message = Abort(
            transfer_id=transfer_id,
            epoch=peer.epoch,
            sender=self._engine,
            rank=self._rank,
            drained=drained,
            reason=reason,
        )
        self._client.submit(address, message, _ANSWER_S)

    def _end(self, transfer_id: str, reason: str) -> None:
        push = self._pushes.pop(transfer_id, None)
        if push is None:
            return
        push.ended = reason or "prefill is through with this transfer"
        if reason:
            self._reports.append(PushReport(transfer_id, "failed", reason=reason))
