"""P's ledger: all transfers of one engine (pull) or of one worker rank (layer-wise).

Pure: `now` is an argument, in seconds of a monotonic clock; a driver holds one lock around every call, carries
out the actions it gets back, and calls `tick` when `next_deadline` has come. The life of a transfer is decided by
the table `SOURCE` alone; this file only says which event a message or call is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import inf

from msgspec.structs import replace

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Answer, Ask, Done, Release, Renew, Story, Verdict
from connectors.handoff.actions import (
    CloseSession,
    DemandRestart,
    FreeBlocks,
    Replan,
    SendAbort,
    SendPushed,
    SourceAction,
    StopSubmitting,
)
from connectors.handoff.machine import Kind
from connectors.handoff.source_record import SourceTransfer, classify_done
from connectors.handoff.source_table import (
    SOURCE,
    SOURCE_FINAL,
    SourceEffect,
    SourceEvent,
    SourceState,
    SourceTable,
)
from connectors.handoff.timers import Timers

S, E, F = SourceState, SourceEvent, SourceEffect


@dataclass(frozen=True, slots=True)
class SourceLimits:
    """Durations in seconds; the defaults are those of `ConnectorConfig`."""

    lease_s: float = 30.0
    max_hold_s: float = 600.0
    """Bound on a whole transfer, computing included; no renewal goes past it."""
    push_s: float = 60.0
    """Layer-wise: from the grant to the last acknowledged write."""
    drain_s: float = 10.0
    """From giving up to closing the session, and from there to asking for a restart."""
    tombstone_s: float = 600.0
    max_tombstones: int = 4096


class SourceLedger:
    """See the module. Not safe from several threads by itself."""

    def __init__(
        self,
        epoch: str,
        limits: SourceLimits | None = None,
        *,
        table: SourceTable = SOURCE,
        timers: Timers | None = None,
    ) -> None:
        self.epoch = epoch
        self.limits = limits or SourceLimits()
        self.refusals = 0
        """Calls and messages that a cell refused, e.g. a second request under one transfer id."""
        self.transfers: dict[str, SourceTransfer] = {}
        self._table = table
        self._timers = Timers() if timers is None else timers
        self._tombstones: dict[str, None] = {}
        self._live_ids: dict[str, None] = {}

    # --- calls of the connector --------------------------------------------------------------------------------

    def begin(self, transfer_id: str, owner: str, now: float, sink: EngineRef | None = None) -> bool:
        """vLLM has request `owner`. False: given up already, or another request has this id; hand nothing off."""
        known = self._get(transfer_id)
        fresh = replace(known, owner=owner, sink=sink, hold_until=now + self.limits.max_hold_s)
        record, kind, _ = self._apply(fresh if known.state in (S.UNKNOWN, S.REVOKED) else known, E.BEGIN, now)
        return kind is Kind.ALLOWED and record.state is S.PREPARING

    def hold(self, transfer_id: str, owner: str, now: float) -> bool:
        """Pull: vLLM finished `owner`; True: defer the free until `FreeBlocks`, D has `lease_s` from now on."""
        known = self._get(transfer_id)
        if known.owner != owner or not owner:
            self.refusals += 1
            return False
        deferred = replace(known, deferred=True)
        record, kind, _ = self._apply(deferred, E.HOLD, now, unless_refused=known)
        return kind is Kind.ALLOWED and record.state is S.HELD

    def finished(self, transfer_id: str, owner: str, now: float) -> list[SourceAction]:
        """Layer-wise: vLLM finished `owner` and deferred its free; `FreeBlocks` follows now or later."""
        known = self._get(transfer_id)
        if known.owner not in ("", owner):
            self.refusals += 1
            return [FreeBlocks(transfer_id, owner, "another request holds this transfer id")]
        return self._apply(replace(known, owner=owner, deferred=True), E.FINISHED, now)[2]

    def granted(self, transfer_id: str, sink: EngineRef, now: float) -> list[SourceAction]:
        """Layer-wise: D answered the claim with OK."""
        known = self._get(transfer_id)
        return self._apply(replace(known, sink=sink), E.GRANTED, now)[2]

    def denied(self, transfer_id: str, reason: str, now: float) -> list[SourceAction]:
        """Layer-wise: D refused the claim."""
        return self._apply(self._get(transfer_id), E.DENIED, now, reason)[2]

    def submit(self, transfer_id: str, now: float) -> bool:
        """Layer-wise: may one write be submitted now? True counts it as in flight."""
        known = self._get(transfer_id)
        if self._table[E.WRITE][known.state].kind is not Kind.ALLOWED:
            self.refusals += 1
            return False
        self.transfers[transfer_id] = replace(known, inflight=known.inflight + 1)
        return True

    def all_submitted(self, transfer_id: str, now: float) -> list[SourceAction]:
        """Layer-wise: no write of this transfer will follow."""
        known = self._get(transfer_id)
        return self._settle(self._put(replace(known, all_submitted=True)), now)

    def write_ok(self, transfer_id: str, now: float) -> list[SourceAction]:
        """Layer-wise: one write is applied at D."""
        return self._settle(self._one_less(transfer_id), now)

    def write_failed(self, transfer_id: str, reason: str, now: float, *, quiesced: bool) -> list[SourceAction]:
        """Layer-wise: one write returned an error; `quiesced` when nothing of it was submitted."""
        record = self._one_less(transfer_id)
        event = E.CANCEL if quiesced else E.WRITE_ERROR
        actions = self._apply(record, event, now, reason)[2]
        return actions + self._settle(self._get(transfer_id), now)

    def preempted(self, transfer_id: str, now: float) -> list[SourceAction]:
        """vLLM takes the blocks away. Wait (bounded) for `inflight == 0`, else call `drain_overdue`."""
        return self._apply(self._get(transfer_id), E.PREEMPTED, now)[2]

    def resumed(self, transfer_id: str, now: float) -> list[SourceAction]:
        """vLLM computes the request again, with another block list."""
        known = self._get(transfer_id)
        if known.inflight:  # the blocks under these writes are long somebody else's
            return self.drain_overdue(transfer_id, now)
        return self._apply(replace(known, all_submitted=False), E.RESUMED, now)[2]

    def drain_overdue(self, transfer_id: str, now: float) -> list[SourceAction]:
        """The writes in flight did not end within the caller's bound."""
        event = E.DRAIN_OVERDUE if self._get(transfer_id).inflight else E.DRAINED
        return self._apply(self._get(transfer_id), event, now, "writes did not end in time")[2]

    def session_closed(self, now: float, spared: Collection[str] = ()) -> list[SourceAction]:
        """This rank's transport session is closed: nothing reads its blocks any more. What was sent before may still
        be applied by D's transport (seen over TCP: 1.2 MB), so this is no promise to D.

        Args:
            spared: transfers that write through another session.
        """
        actions: list[SourceAction] = []
        for record in self._live():
            if record.transfer_id in spared:
                continue
            if record.inflight or record.state is S.CLOSING:
                closed = replace(record, inflight=0, dirty=True)
                actions += self._apply(closed, E.SESSION_CLOSED, now, "transport session closed")[2]
        return actions

    def close_failed(self, transfer_id: str, reason: str, now: float) -> list[SourceAction]:
        """The transport session could not be closed."""
        return self._apply(self._get(transfer_id), E.CLOSE_FAILED, now, reason)[2]

    def told(self, transfer_id: str, now: float) -> list[SourceAction]:
        """Layer-wise: D answered Pushed."""
        return self._apply(self._get(transfer_id), E.TOLD, now)[2]

    def cancel(self, transfer_id: str, reason: str, now: float) -> list[SourceAction]:
        """vLLM aborted the request, or P gives it up (an unreserved prefill over the cap)."""
        return self._apply(self._get(transfer_id), E.CANCEL, now, reason)[2]

    # --- messages ----------------------------------------------------------------------------------------------

    def handle(
        self, message: Done | Renew | Release | Abort | Ask, now: float
    ) -> tuple[Answer | Story, list[SourceAction]]:
        """Answer one side-channel message. Repeating a message changes nothing and gets the same answer."""
        if isinstance(message, Ask):
            return self.story(message.transfer_id), []
        epoch = message.source_epoch if isinstance(message, Done | Renew) else message.epoch
        if epoch != self.epoch and not (isinstance(message, Release) and not epoch):
            return Answer(verdict=Verdict.EPOCH, reason=f"this engine lives epoch {self.epoch}"), []
        record, event = self._classify(message)
        reason = message.reason if isinstance(message, Release | Abort) else ""
        record, kind, actions = self._apply(
            record, event, now, reason, unless_refused=self._get(message.transfer_id)
        )
        if kind is Kind.REFUSED:
            return Answer(verdict=Verdict.GONE, reason=record.reason or f"transfer is {record.state}"), actions
        lease_s = max(0.0, self._deadline(record, now) - now) if isinstance(message, Renew) else 0.0
        drained = isinstance(message, Abort) and record.state in SOURCE_FINAL and not record.dirty
        return Answer(verdict=Verdict.OK, lease_seconds=lease_s, drained=drained), actions

    def _classify(self, message: Done | Renew | Release | Abort) -> tuple[SourceTransfer, SourceEvent]:
        record = self._get(message.transfer_id)
        if isinstance(message, Done):
            return classify_done(record, message)
        if isinstance(message, Renew):
            return record, E.RENEW
        return record, E.RELEASE if isinstance(message, Release) else E.PEER_ABORT

    def story(self, transfer_id: str) -> Story:
        """What is known of a transfer, also after its end."""
        record = self.transfers.get(transfer_id)
        return (
            Story(known=False) if record is None else Story(known=True, state=record.state, reason=record.reason)
        )

    # --- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `tick` has something to do; `inf` when never."""
        return self._timers.next()

    def tick(self, now: float) -> list[SourceAction]:
        """Let every deadline that has passed take effect."""
        actions: list[SourceAction] = []
        for transfer_id in self._timers.take(now):
            record = self._get(transfer_id)
            reason = "lease expired" if record.state is S.HELD else f"deadline passed while {record.state}"
            actions += self._apply(record, E.DEADLINE, now, reason)[2]
        return actions

    def in_flight(self, transfer_id: str) -> int:
        """Writes of this transfer that have not returned."""
        return self._get(transfer_id).inflight

    def num_held(self) -> int:
        """Transfers whose blocks vLLM does not have back."""
        return sum(1 for record in self._live() if record.deferred and not record.freed)

    def _live(self) -> list[SourceTransfer]:
        """Transfers that are no tombstones; those are many, and nothing is left to do for them."""
        return [self.transfers[transfer_id] for transfer_id in self._live_ids]

    # --- the table at work -------------------------------------------------------------------------------------

    def _get(self, transfer_id: str) -> SourceTransfer:
        return self.transfers.get(transfer_id) or SourceTransfer(transfer_id)

    def _put(self, record: SourceTransfer) -> SourceTransfer:
        if record.transfer_id in self.transfers:
            self.transfers[record.transfer_id] = record
        return record

    def _one_less(self, transfer_id: str) -> SourceTransfer:
        known = self._get(transfer_id)
        return self._put(replace(known, inflight=max(0, known.inflight - 1)))

    def _settle(self, record: SourceTransfer, now: float) -> list[SourceAction]:
        """Nothing in flight is an event: the end of a push, or of an abort's wait."""
        if record.inflight or record.transfer_id not in self.transfers:
            return []
        event = E.WRITES_DONE if record.all_submitted and record.state is S.PUSHING else E.DRAINED
        if self._table[event][record.state].kind is Kind.IGNORED:
            return []
        return self._apply(record, event, now)[2]

    def _apply(
        self,
        record: SourceTransfer,
        event: SourceEvent,
        now: float,
        reason: str = "",
        unless_refused: SourceTransfer | None = None,
    ) -> tuple[SourceTransfer, Kind, list[SourceAction]]:
        cell = self._table[event][record.state]
        if cell.kind is Kind.REFUSED:
            self.refusals += 1
            return unless_refused or record, cell.kind, []
        if not cell.effects and cell.next is None and event not in _REARMING:
            if record.state is not S.UNKNOWN:
                self.transfers[record.transfer_id] = record
            return record, cell.kind, []
        if cell.next is not None:
            record = replace(record, state=cell.next, reason=record.reason or reason)
        actions: list[SourceAction] = []
        for effect in cell.effects:
            record = _carry_out(record, effect, actions)
        renewed = event is E.RENEW and cell.kind is Kind.ALLOWED
        self._store(record, now, rearm=cell.next is not None or event is E.DEADLINE or renewed)
        if cell.next is S.ABORTING and not record.inflight:
            record, _, more = self._apply(record, E.DRAINED, now)
            told = any(isinstance(action, SendAbort) for action in more)
            actions = [a for a in actions if not (told and isinstance(a, SendAbort))] + more
        return record, cell.kind, actions

    def _store(self, record: SourceTransfer, now: float, *, rearm: bool) -> None:
        transfer_id = record.transfer_id
        if record.state is S.UNKNOWN:
            self.transfers.pop(transfer_id, None)
            self._tombstones.pop(transfer_id, None)
            self._live_ids.pop(transfer_id, None)
            self._timers.set(transfer_id, inf)
            return
        self.transfers[transfer_id] = record
        if not rearm:
            return
        self._timers.set(transfer_id, self._deadline(record, now))
        if record.state not in SOURCE_FINAL:
            self._live_ids[transfer_id] = None
        else:
            self._live_ids.pop(transfer_id, None)
            self._tombstones[transfer_id] = None
            if len(self._tombstones) > self.limits.max_tombstones:
                self._forget(next(iter(self._tombstones)))

    def _forget(self, transfer_id: str) -> None:
        del self._tombstones[transfer_id]
        del self.transfers[transfer_id]
        self._timers.set(transfer_id, inf)

    def _deadline(self, record: SourceTransfer, now: float) -> float:
        limits = self.limits
        if record.state is S.HELD:
            return min(now + limits.lease_s, record.hold_until)
        if record.state in (S.PUSHING, S.PAUSED):
            return min(now + limits.push_s, record.hold_until)
        if record.state in (S.ABORTING, S.CLOSING):
            return now + limits.drain_s
        if record.state in (S.PREPARING, S.PARKED):
            return record.hold_until
        return now + (limits.drain_s if record.state is S.CONFIRMED else limits.tombstone_s)


def _free(record: SourceTransfer) -> SourceAction | None:
    wanted = record.deferred and not record.freed
    return FreeBlocks(record.transfer_id, record.owner, record.reason) if wanted else None


_REARMING = frozenset({E.DEADLINE, E.RENEW})
_EFFECTS: dict[SourceEffect, Callable[[SourceTransfer], SourceAction | None]] = {
    F.FREE_BLOCKS: _free,
    F.STOP_SUBMITTING: lambda r: StopSubmitting(r.transfer_id),
    F.SEND_PUSHED: lambda r: SendPushed(r.transfer_id, r.sink) if r.sink else None,
    F.SEND_ABORT: lambda r: SendAbort(r.transfer_id, r.sink, False, r.reason) if r.sink else None,
    F.SEND_DRAINED: lambda r: SendAbort(r.transfer_id, r.sink, not r.dirty, r.reason) if r.sink else None,
    F.CLOSE_SESSION: lambda r: CloseSession(r.transfer_id),
    F.REPLAN: lambda r: Replan(r.transfer_id),
    F.DEMAND_RESTART: lambda r: DemandRestart(r.transfer_id, r.reason),
}


def _carry_out(record: SourceTransfer, effect: SourceEffect, actions: list[SourceAction]) -> SourceTransfer:
    action = _EFFECTS[effect](record)
    if action is not None:
        actions.append(action)
        if effect is F.FREE_BLOCKS:
            return replace(record, freed=True)
    return record
