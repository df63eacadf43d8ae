"""The writing half of the layer-wise model: vLLM on P, its preemption, P's ranks and their writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from connectors.handoff.actions import (
    CloseSession,
    DemandRestart,
    FreeBlocks,
    SendAbort,
    SendPushed,
    SourceAction,
)
from connectors.handoff.exploring import push_world as calls
from connectors.handoff.exploring.parties import TICK, Call, SourceParty
from connectors.handoff.exploring.push_world import Rank, RankWires, State, Wires, Writer, sent
from connectors.handoff.exploring.search import Step
from connectors.handoff.exploring.world import IN_TRANSIT, LANDED, Blocks, Budget, Fault, Op, Vllm, put
from connectors.handoff.source_table import SOURCE_FINAL, SourceState

Steps = Iterator[Step[State]]
UNSETTLED = IN_TRANSIT | LANDED
CLAIMING = frozenset({SourceState.PREPARING, SourceState.PARKED, SourceState.HELD})
WRITING = frozenset({SourceState.PUSHING, SourceState.PAUSED})
GIVEN_UP = frozenset({SourceState.ABORTING, SourceState.CLOSING, SourceState.RELEASED})


class WriterSide:
    """Everything that happens on the writer `number` of a state."""

    def __init__(self, number: int, party: SourceParty, wires: Wires, budget: Budget) -> None:
        self._number, self._party, self._wires, self._budget = number, party, wires, budget
        self._ranks = range(len(wires.ranks))

    def steps(self, s: State, reserved: int) -> Steps:
        """`reserved` is D's reservation, as a bit of the network."""
        w = s.writers[self._number]
        yield from self._vllm_steps(s, w)
        claims = any(self._party.record(rank.src).state in CLAIMING for rank in w.ranks)
        if claims and s.net & reserved and not s.net & self._wires.claim:
            yield Step(f"{self._wires.name}: claims", sent(s, self._wires.claim))
        for r, (rank, wires) in enumerate(zip(w.ranks, self._wires.ranks, strict=True)):
            yield from self._writes(s, r, rank)
            for i, op in enumerate(rank.ops):
                yield from self._returns(s, r, i, op)
            yield from self._rank_steps(s, r, rank, wires, reserved)
        yield from self._fault_steps(s, w)

    def with_rank(self, s: State, r: int, **changes: Any) -> State:
        w = s.writers[self._number]
        rank = w.ranks[r]._replace(**changes)
        return self.with_writer(s, ranks=put(w.ranks, r, rank))

    def with_writer(self, s: State, **changes: Any) -> State:
        return s._replace(writers=put(s.writers, self._number, s.writers[self._number]._replace(**changes)))

    def _may(self, s: State, fault: int) -> bool:
        return self._budget.allows(fault, s.faults)

    def _used(self, s: State, fault: int) -> State:
        return s._replace(faults=self._budget.spend(fault, s.faults))

    # --- driving a rank's ledger -------------------------------------------------------------------------------

    def drive(
        self, s: State, r: int, call: Call, label: str, *, certain: bool = False, asked: bool = False
    ) -> Step[State]:
        """`asked`: D told P to end this, so P need not tell D."""
        party, wires, problems = self._party, self._wires.ranks[r], []
        before = s.writers[self._number].ranks[r].src
        src, returned = party.drive(before, call)
        if src != before:
            s = self.with_rank(s, r, src=src)
            if party.lacks_deadline(src):
                problems.append("(4) P's state has no deadline")
        actions: Sequence[SourceAction] = returned[1] if call.method == "handle" else returned
        for action in actions if isinstance(actions, list) else ():
            s = self._carry_out(s, r, action, problems)
        old, new = party.record(before).state, party.record(src).state
        if old in WRITING and new in GIVEN_UP and not asked and not s.net & wires.abort:
            problems.append("(6) P gives up and does not tell D")
        return Step(label, s, certain, tuple(problems))

    def _carry_out(self, s: State, r: int, action: SourceAction, problems: list[str]) -> State:
        wires, rank = self._wires.ranks[r], s.writers[self._number].ranks[r]
        if isinstance(action, FreeBlocks):
            return self._free(s, r, problems)
        if isinstance(action, SendPushed):
            return sent(s, wires.pushed)
        if isinstance(action, SendAbort):
            if action.drained and not UNSETTLED.isdisjoint(rank.ops):
                problems.append("(2) P says that it drained with a write in flight")
            return sent(s, wires.abort | (wires.drained if action.drained else 0))
        if isinstance(action, CloseSession):
            return self.with_rank(s, r, close=max(1, rank.close))
        if isinstance(action, DemandRestart):
            return self.with_rank(s, r, close=2)
        return s

    def _free(self, s: State, r: int, problems: list[str]) -> State:
        w = s.writers[self._number]
        if w.ranks[r].freed or not w.deferred:
            problems.append("(5) P's vLLM is given blocks back that it did not lend")
        if not IN_TRANSIT.isdisjoint(w.ranks[r].ops):
            problems.append("(1) P frees blocks under its own unfinished write")
        s = self.with_rank(s, r, freed=True)
        if all(rank.freed for rank in s.writers[self._number].ranks):
            return self.with_writer(s, blocks=Blocks.REUSED)
        return s

    def every_rank(self, s: State, call: Call, label: str, *, certain: bool = False) -> Step[State]:
        """One call on every rank's ledger, as the metadata of one vLLM step makes it."""
        problems: tuple[str, ...] = ()
        for r in self._ranks:
            step = self.drive(s, r, call, label)
            s, problems = step.after, (*problems, *step.problems)
        return Step(label, s, certain, problems)

    # --- vLLM --------------------------------------------------------------------------------------------------

    def _vllm_steps(self, s: State, w: Writer) -> Steps:
        name = self._wires.name
        if w.request is Vllm.ABSENT:
            begun = all(self._party.drive(rank.src, calls.BEGIN)[1] for rank in w.ranks)
            after = self.with_writer(s, request=Vllm.RUNNING, blocks=Blocks.OURS, begun=begun)
            yield self.every_rank(after, calls.BEGIN, f"{name}: vLLM takes the request")
        if w.request is Vllm.RUNNING and w.begun:
            after = self.with_writer(s, request=Vllm.ENDED, deferred=True)
            yield self.every_rank(after, calls.FINISHED, f"{name}: vLLM finishes", certain=True)
        elif w.request is Vllm.RUNNING:
            after = self.with_writer(s, request=Vllm.ENDED, blocks=Blocks.REUSED)
            yield Step(f"{name}: vLLM finishes, nothing was handed off", after, True)
        quiet = all(UNSETTLED.isdisjoint(rank.ops) and not rank.close for rank in w.ranks)
        if w.request is Vllm.PREEMPTING and quiet:
            after = self.with_writer(s, request=Vllm.PREEMPTED, blocks=Blocks.REUSED)
            yield Step(f"{name}: vLLM overwrites the preempted blocks", after, True)
        if w.request is Vllm.PREEMPTED:
            after = self.with_writer(s, request=Vllm.RUNNING, blocks=Blocks.OURS)
            yield self.every_rank(after, calls.RESUMED, f"{name}: resumes in other blocks", certain=True)

    # --- one rank ----------------------------------------------------------------------------------------------

    def _writes(self, s: State, r: int, rank: Rank) -> Steps:
        record, name = self._party.record(rank.src), self._wires.ranks[r].name
        if record.state is not SourceState.PUSHING:
            return
        if Op.NONE in rank.ops:
            i = rank.ops.index(Op.NONE)
            src, granted = self._party.drive(rank.src, calls.SUBMIT)
            if granted:
                ops = put(rank.ops, i, Op.FLYING)
                after, label = self.with_rank(s, r, src=src, ops=ops), f"{name}: writes piece {i}"
                yield Step(label, after) if Op.NONE in ops else self.drive(after, r, calls.ALL_SUBMITTED, label)
        elif not record.all_submitted:
            yield self.drive(s, r, calls.ALL_SUBMITTED, f"{name}: has submitted everything", certain=True)

    def _returns(self, s: State, r: int, i: int, op: Op) -> Steps:
        if op is not Op.FLYING and op not in LANDED:
            return
        ops, name = s.writers[self._number].ranks[r].ops, f"{self._wires.ranks[r].name}: write {i}"
        if op in LANDED:
            after = self.with_rank(s, r, ops=put(ops, i, Op.DONE_RIGHT if op is Op.RIGHT else Op.DONE_WRONG))
            yield self.drive(after, r, calls.WRITE_OK, f"{name} returns success", certain=True)
        if self._may(s, Fault.ERROR):
            after = self._used(s, Fault.ERROR)
            after = self.with_rank(after, r, ops=put(ops, i, Op.ZOMBIE if op is Op.FLYING else Op.LOST))
            after = sent(after, self._wires.ranks[r].dirty)
            yield self.drive(after, r, calls.WRITE_ERROR, f"{name} returns an error", certain=True)
        if op is Op.FLYING and self._may(s, Fault.UNSENT):
            after = self.with_rank(self._used(s, Fault.UNSENT), r, ops=put(ops, i, Op.LOST))
            yield self.drive(after, r, calls.WRITE_UNSENT, f"{name} could not be submitted")

    def _rank_steps(self, s: State, r: int, rank: Rank, wires: RankWires, reserved: int) -> Steps:
        w, record, name = s.writers[self._number], self._party.record(rank.src), wires.name
        if w.request is Vllm.PREEMPTING and Op.FLYING in rank.ops:
            label = f"{name}: writes outlive the preemption's bound"
            yield self.drive(s, r, calls.DRAIN_OVERDUE, label, certain=True)
        if rank.src and record.state not in SOURCE_FINAL:
            yield self.drive(s, r, TICK, f"{name}: deadline while {record.state}", certain=True)
        elif rank.src and self._may(s, Fault.FORGET):
            yield self.drive(self._used(s, Fault.FORGET), r, TICK, f"{name}: forgets the transfer")
        if rank.close == 1:
            yield self._close(s, r, f"{name}: closes its session")
        elif self._may(s, Fault.OTHER_CLOSE) and not UNSETTLED.isdisjoint(rank.ops):
            after = self._used(s, Fault.OTHER_CLOSE)
            yield self._close(after, r, f"{name}: closes its session for another transfer")
        if record.state is SourceState.RELEASED and s.net & reserved and UNSETTLED.isdisjoint(rank.ops):
            yield Step(f"{name}: tells D that it will not write", sent(s, wires.drained))
        if s.net & self._wires.granted and w.begun:
            yield self.drive(s, r, calls.GRANTED, f"{name} <- claim granted")
        if s.net & self._wires.denied and w.begun:
            yield self.drive(s, r, calls.DENIED, f"{name} <- claim refused", asked=True)
        if s.net & wires.told:
            yield self.drive(s, r, calls.TOLD, f"{name} <- Pushed answered")
        if s.net & self._wires.to_abort:
            answer = self._party.drive(rank.src, self._wires.take_abort)[1][0]
            after = sent(s, wires.drained_reply) if answer.drained else s
            label = f"{name} <- Abort of D, answers {'' if answer.drained else 'not '}drained"
            yield self.drive(after, r, self._wires.take_abort, label, asked=True)

    def _close(self, s: State, r: int, label: str) -> Step[State]:
        ops = tuple(Op.LOST if op in UNSETTLED else op for op in s.writers[self._number].ranks[r].ops)
        return self.drive(self.with_rank(s, r, ops=ops, close=0), r, calls.SESSION_CLOSED, label, certain=True)

    def release(self, s: State) -> Steps:
        """The proxy's Release reaches each rank on its own."""
        for r, wires in enumerate(self._wires.ranks):
            yield self.drive(s, r, calls.RELEASE, f"{wires.name} <- Release of the proxy")

    # --- faults ------------------------------------------------------------------------------------------------

    def _fault_steps(self, s: State, w: Writer) -> Steps:
        name = self._wires.name
        demanded = any(rank.close == 2 for rank in w.ranks)
        if demanded or self._may(s, Fault.CRASH_P):
            ranks = tuple(Rank(ops=tuple(_orphaned(op) for op in rank.ops)) for rank in w.ranks)
            after = self.with_writer(s, ranks=ranks, alive=False, blocks=Blocks.REUSED)
            after = after._replace(faults=s.faults if demanded else s.faults | Fault.CRASH_P)
            yield Step(f"{name}: {'is restarted as it asked' if demanded else 'crashes'}", after, demanded)
        if self._may(s, Fault.CANCEL_P) and w.request in (Vllm.RUNNING, Vllm.PREEMPTED):
            yield self._cancel(s, w)
        if self._may(s, Fault.CANCEL_P) and w.request is Vllm.PREEMPTED and w.begun:
            after = self.with_writer(self._used(s, Fault.CANCEL_P), request=Vllm.ENDED, deferred=True)
            yield self.every_rank(after, calls.FINISHED, f"{name}: vLLM ends the preempted request")
        if self._may(s, Fault.PREEMPT) and w.request is Vllm.RUNNING:
            after = self.with_writer(s, request=Vllm.PREEMPTING)._replace(faults=s.faults | Fault.PREEMPT)
            yield self.every_rank(after, calls.PREEMPTED, f"{name}: vLLM preempts the request")
        for r, rank in enumerate(w.ranks):
            if self._may(s, Fault.CLOSE_FAILS) and rank.close == 1:
                after = s._replace(faults=s.faults | Fault.CLOSE_FAILS)
                yield self.drive(after, r, calls.CLOSE_FAILED, f"{name}{r}: cannot close its session")

    def _cancel(self, s: State, w: Writer) -> Step[State]:
        label = f"{self._wires.name}: vLLM aborts the request"
        after = self.with_writer(s, request=Vllm.ENDED)._replace(faults=s.faults | Fault.CANCEL_P)
        first = self.every_rank(after, calls.CANCEL_P, label)
        if not w.begun:
            return first._replace(after=self.with_writer(first.after, blocks=Blocks.REUSED))
        second = self.every_rank(self.with_writer(first.after, deferred=True), calls.FINISHED, label)
        return second._replace(problems=(*first.problems, *second.problems))


def _orphaned(op: Op) -> Op:
    """What a crash leaves of an operation: bytes on the way may still arrive."""
    return Op.ZOMBIE if op is Op.FLYING else Op.LOST if op in LANDED else op
