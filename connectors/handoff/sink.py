"""D's ledger: all transfers of one worker rank (pull) or of one engine (layer-wise).

Pure: `now` is an argument, in seconds of a monotonic clock, and so are fresh ids; a driver holds one lock around
every call, carries out the actions it gets back, and calls `tick` when `next_deadline` has come. The life of a
transfer is decided by the table `SINK` alone; this file only says which event a message or call is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Literal

from msgspec.structs import replace

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Answer, Ask, Claim, Pushed, Release, Story, Verdict
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
from connectors.handoff.machine import Kind
from connectors.handoff.sink_record import (
    SinkTransfer,
    classify_abort,
    classify_claim,
    classify_pushed,
    with_drained,
)
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkEffect, SinkEvent, SinkState, SinkTable
from connectors.handoff.timers import Timers

S, E, F = SinkState, SinkEvent, SinkEffect


@dataclass(frozen=True, slots=True)
class SinkLimits:
    """Durations in seconds; the defaults are those of `ConnectorConfig`."""

    transfer_s: float = 60.0
    """From `begin` to the cache being there."""
    quarantine_s: float = 10.0
    """From giving up to the fence, from the fence to asking for a restart, and between two wake-ups."""
    answer_early: bool = False
    """Policy `fail` and one KV cache group: vLLM lets the failed block ids go out before the blocks are free."""
    tombstone_s: float = 600.0
    max_tombstones: int = 4096


class SinkLedger:
    """See the module. Not safe from several threads by itself."""

    def __init__(
        self,
        epoch: str,
        mode: Literal["pull", "layerwise"],
        limits: SinkLimits | None = None,
        *,
        table: SinkTable = SINK,
        timers: Timers | None = None,
    ) -> None:
        self.epoch = epoch
        self.limits = limits or SinkLimits()
        self.refusals = 0
        """Calls and messages that a cell refused, e.g. a second request under one transfer id."""
        self.generation = 0
        self.transfers: dict[str, SinkTransfer] = {}
        self._pull = mode == "pull"
        self._table = table
        self._timers = Timers() if timers is None else timers
        self._tombstones: dict[str, None] = {}
        self._live_ids: dict[str, None] = {}

    # --- calls of the connector --------------------------------------------------------------------------------

    def begin(
        self,
        transfer_id: str,
        owner: str,
        now: float,
        *,
        source: EngineRef | None = None,
        prompt_hash: str = "",
        num_tokens: int = 0,
    ) -> tuple[bool, list[SinkAction]]:
        """vLLM allocated blocks for request `owner`.

        True: go on; or the transfer was given up before, and its `ReportFinished` is among the actions. False:
        another request holds this id, which the ledger leaves alone. `source` is P (pull). `prompt_hash` and
        `num_tokens` are compared with what P claims and pushes (layer-wise); empty and 0 skip that.
        """
        known = self._get(transfer_id)
        if known.state in (S.UNKNOWN, S.REVOKED):
            known = replace(
                known, owner=owner, begun=True, source=source, prompt_hash=prompt_hash, num_tokens=num_tokens
            )
        _, kind, actions = self._apply(known, E.BEGIN, now)
        return kind is Kind.ALLOWED, actions

    def start_reads(self, transfer_id: str, read_id: str, count: int, now: float) -> bool:
        """Pull: may `count` reads be submitted now? True counts them as in flight; `read_id` must be fresh."""
        known = self._get(transfer_id)
        record = replace(known, read_id=read_id, reads=known.reads + count, generation=self.generation)
        return self._apply(record, E.READ, now)[1] is Kind.ALLOWED

    def read_ok(self, transfer_id: str, now: float, bytes_read: int = 0) -> list[SinkAction]:
        """Pull: one read has succeeded."""
        record = self._one_less(transfer_id, bytes_read)
        return [] if record.reads or record.errored else self._apply(record, E.READS_OK, now)[2]

    def read_failed(self, transfer_id: str, reason: str, now: float, *, quiesced: bool) -> list[SinkAction]:
        """Pull: one read returned an error; `quiesced` when nothing of it was submitted."""
        record = self._one_less(transfer_id, 0)
        if not quiesced:
            return self._apply(replace(record, errored=True), E.READ_ERROR, now, reason)[2]
        if record.errored:
            return []
        return self._apply(record, E.REFUSE if record.reads else E.READ_UNSENT, now, reason)[2]

    def vouched(self, transfer_id: str, read_id: str, now: float) -> list[SinkAction]:
        """Pull: P answered Done with OK."""
        known = self._get(transfer_id)
        return self._apply(known, E.VOUCHED, now)[2] if known.read_id == read_id else []

    def disowned(self, transfer_id: str, read_id: str, reason: str, now: float) -> list[SinkAction]:
        """Pull: P answered Done with anything but OK. No answer at all is not this: the deadline decides."""
        known = self._get(transfer_id)
        return self._apply(known, E.DISOWNED, now, reason)[2] if known.read_id == read_id else []

    def abort_answered(self, transfer_id: str, rank: int, drained: bool, now: float) -> list[SinkAction]:
        """Layer-wise: rank `rank` of the grantee (same epoch) answered `SendAbort`."""
        known = self._get(transfer_id)
        if not drained or self._pull or known.source is None:
            return []
        record, event = with_drained(known, rank)
        return self._apply(record, event, now)[2]

    def refuse(self, transfer_id: str, reason: str, now: float) -> list[SinkAction]:
        """D finds that this transfer cannot work."""
        return self._apply(self._get(transfer_id), E.REFUSE, now, reason)[2]

    def cancel(self, transfer_id: str, now: float) -> list[SinkAction]:
        """vLLM aborted the request; its blocks stay allocated until `ReportFinished`."""
        known = self._get(transfer_id)
        unreported = known.begun and not known.reported and not known.answered_early
        record = replace(known, cancelled=True) if unreported else known
        return self._apply(record, E.CANCEL, now, "cancelled")[2]

    def reported(self, transfer_id: str, now: float) -> list[SinkAction]:
        """vLLM has taken the report."""
        return self._apply(self._get(transfer_id), E.REPORTED, now)[2]

    # --- the fence ---------------------------------------------------------------------------------------------

    def fence_begins(self) -> int:
        """Call just before the endpoint is destroyed. What starts from now on comes in through the next one.

        No read may be submitted to the old endpoint after this call.
        """
        self.generation += 1
        return self.generation - 1

    def fenced(self, generation: int, now: float) -> list[SinkAction]:
        """The endpoint of `generation` (as `fence_begins` returned it) is destroyed, on every rank."""
        actions: list[SinkAction] = []
        for record in self._live():
            if record.generation <= generation and record.state in (S.RECEIVING, S.FAILING, S.FENCING):
                over = replace(record, reads=0)
                actions += self._apply(over, E.FENCED, now, "the transport endpoint was destroyed")[2]
        return actions

    def fence_failed(self, reason: str, now: float) -> list[SinkAction]:
        """The endpoint could not be destroyed: the blocks stay in quarantine."""
        fencing = [record for record in self._live() if record.state is S.FENCING]
        return [action for r in fencing for action in self._apply(r, E.FENCE_FAILED, now, reason)[2]]

    # --- messages ----------------------------------------------------------------------------------------------

    def handle(
        self, message: Claim | Pushed | Release | Abort | Ask, now: float
    ) -> tuple[Answer | Story, list[SinkAction]]:
        """Answer one side-channel message. Repeating a message changes nothing and gets the same answer."""
        if isinstance(message, Ask):
            return self.story(message.transfer_id), []
        epoch = message.sink_epoch if isinstance(message, Claim | Pushed) else message.epoch
        if epoch != self.epoch and not (isinstance(message, Release) and not epoch):
            return Answer(verdict=Verdict.EPOCH, reason=f"this engine lives epoch {self.epoch}"), []
        record, event, reason = self._classify(message)
        record, kind, actions = self._apply(record, event, now, reason)
        if event in _NEVER_OK or (kind is Kind.REFUSED and event in _NOT_FOR_YOU):
            return Answer(verdict=Verdict.REFUSED, reason=reason or record.reason), actions
        if kind is Kind.REFUSED:
            return Answer(verdict=Verdict.GONE, reason=record.reason or f"transfer is {record.state}"), actions
        return Answer(verdict=Verdict.OK), actions

    def _classify(self, message: Claim | Pushed | Release | Abort) -> tuple[SinkTransfer, SinkEvent, str]:
        record = self._get(message.transfer_id)
        if isinstance(message, Claim):
            record, event, reason = classify_claim(record, message)
            if event is E.CLAIM_FIRST:
                record = replace(record, generation=self.generation)
            return record, event, reason
        if isinstance(message, Pushed):
            return classify_pushed(record, message)
        if isinstance(message, Abort):
            return *classify_abort(record, message, pull=self._pull), message.reason
        return record, E.RELEASE, message.reason

    def story(self, transfer_id: str) -> Story:
        """What is known of a transfer, also after its end."""
        record = self.transfers.get(transfer_id)
        if record is None:
            return Story(known=False)
        return Story(known=True, state=record.state, reason=record.reason, bytes_moved=record.bytes_moved)

    # --- time --------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float:
        """When `tick` has something to do; `inf` when never."""
        return self._timers.next()

    def tick(self, now: float) -> list[SinkAction]:
        """Let every deadline that has passed take effect."""
        actions: list[SinkAction] = []
        for transfer_id in self._timers.take(now):
            record = self._get(transfer_id)
            actions += self._apply(record, E.DEADLINE, now, f"deadline passed while {record.state}")[2]
        return actions

    def num_receiving(self) -> int:
        """Healthy transfers whose bytes are on their way."""
        return sum(1 for record in self._live() if record.state is S.RECEIVING)

    def num_waiting(self) -> int:
        """Transfers whose blocks vLLM must not touch yet."""
        return sum(1 for record in self._live() if record.begun and not record.reported)

    def _live(self) -> list[SinkTransfer]:
        """Transfers that are no tombstones; those are many, and nothing is left to do for them."""
        return [self.transfers[transfer_id] for transfer_id in self._live_ids]

    # --- the table at work -------------------------------------------------------------------------------------

    def _get(self, transfer_id: str) -> SinkTransfer:
        return self.transfers.get(transfer_id) or SinkTransfer(transfer_id)

    def _one_less(self, transfer_id: str, bytes_read: int) -> SinkTransfer:
        known = self._get(transfer_id)
        record = replace(known, reads=max(0, known.reads - 1), bytes_moved=known.bytes_moved + bytes_read)
        if transfer_id in self.transfers:
            self.transfers[transfer_id] = record
        return record

    def _apply(
        self, record: SinkTransfer, event: SinkEvent, now: float, reason: str = ""
    ) -> tuple[SinkTransfer, Kind, list[SinkAction]]:
        cell = self._table[event][record.state]
        if cell.kind is Kind.REFUSED:
            self.refusals += 1
            return self._get(record.transfer_id), cell.kind, []
        if cell.next is not None:
            record = replace(record, state=cell.next, reason=record.reason or reason)
        actions: list[SinkAction] = []
        for effect in cell.effects:
            record = self._carry_out(record, effect, actions)
        self._store(record, now, rearm=cell.next is not None or event is E.DEADLINE)
        return record, cell.kind, actions

    def _carry_out(self, record: SinkTransfer, effect: SinkEffect, actions: list[SinkAction]) -> SinkTransfer:
        if effect is F.ANSWER_EARLY:
            if self.limits.answer_early and not (record.cancelled or record.answered_early):
                actions.append(AnswerEarly(record.transfer_id, record.reason))
                return replace(record, answered_early=True)
        elif effect is F.REPORT:
            if record.begun and not record.reported:
                actions.append(ReportFinished(record.transfer_id, record.owner, _outcome(record), record.reason))
                return replace(record, reported=True)
        else:
            action = _EFFECTS[effect](record)
            if action is not None:
                actions.append(action)
        return record

    def _store(self, record: SinkTransfer, now: float, *, rearm: bool) -> None:
        transfer_id = record.transfer_id
        if record.state is S.UNKNOWN:
            self.transfers.pop(transfer_id, None)
            self._tombstones.pop(transfer_id, None)
            self._live_ids.pop(transfer_id, None)
            self._timers.set(transfer_id, inf)
            return
        self.transfers[transfer_id] = record
        runs_from_begin = record.state in (S.RECEIVING, S.RECEIVED) and self._timers.is_set(transfer_id)
        if not rearm or runs_from_begin:
            return
        self._timers.set(transfer_id, self._deadline(record, now))
        if record.state not in SINK_FINAL:
            self._live_ids[transfer_id] = None
        else:
            self._live_ids.pop(transfer_id, None)
            self._tombstones[transfer_id] = None
            if len(self._tombstones) > self.limits.max_tombstones:
                oldest = next(iter(self._tombstones))
                self._store(replace(self.transfers[oldest], state=S.UNKNOWN), now, rearm=True)

    def _deadline(self, record: SinkTransfer, now: float) -> float:
        if record.state in (S.FAILING, S.FENCING, S.QUIESCED):
            return now + self.limits.quarantine_s
        return now + (self.limits.tombstone_s if record.state in SINK_FINAL else self.limits.transfer_s)


_NOT_FOR_YOU = frozenset({E.CLAIM_OTHER, E.PUSHED_OTHER, E.ABORT_OTHER})
_NEVER_OK = frozenset({E.CLAIM_WRONG, E.SOURCE_RESTARTED})
"""These end the transfer, and whoever sent them must not think that it got what it asked for."""


def _outcome(record: SinkTransfer) -> Outcome:
    if record.state is S.DECODING:
        return Outcome.RECEIVED
    if record.cancelled:
        return Outcome.CANCELLED
    return Outcome.FAILED_ANSWERED if record.answered_early else Outcome.FAILED


_EFFECTS: dict[SinkEffect, Callable[[SinkTransfer], SinkAction | None]] = {
    F.SEND_DONE: lambda r: SendDone(r.transfer_id, r.source, r.read_id) if r.source else None,
    F.SEND_ABORT: lambda r: SendAbort(r.transfer_id, r.source, not r.reads, r.reason) if r.source else None,
    F.FENCE: lambda r: Fence(r.transfer_id),
    F.NOTE_OVERDUE: lambda r: ReportOverdue(r.transfer_id),
    F.DEMAND_RESTART: lambda r: DemandRestart(r.transfer_id, r.reason),
}
