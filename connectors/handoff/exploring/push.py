"""Layer-wise: one D, one or two would-be writers of one or two ranks each, preemption, late writes, crashes.

What is checked at every step: P's vLLM gets blocks back, or overwrites preempted ones, only when none of P's own
writes can still read them (1); a write lands on D only while D waits for it, and only of the one that holds the
claim (2); D decodes only complete and right bytes (3); states have deadlines (4); vLLM gets every deferred free
back once and hears of every request once (5); and a leg given up on either side is told to the other at once (6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Verdict
from connectors.handoff.actions import (
    AnswerEarly,
    DemandRestart,
    Fence,
    Outcome,
    ReportFinished,
    SendAbort,
    SinkAction,
)
from connectors.handoff.exploring import push_world as calls
from connectors.handoff.exploring.parties import TICK, Call, SinkParty, SourceParty
from connectors.handoff.exploring.push_world import D0, Rank, State, Wires, Writer, sent
from connectors.handoff.exploring.push_writer import WriterSide
from connectors.handoff.exploring.search import Step
from connectors.handoff.exploring.world import (
    EVERY_FAULT,
    IN_TRANSIT,
    Blocks,
    Budget,
    Fault,
    Network,
    Op,
    Vllm,
    policy,
    put,
)
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkState, SinkTable
from connectors.handoff.source_table import SOURCE, SourceTable

Steps = Iterator[Step[State]]
TWO_OF_PUSH = Budget(once=EVERY_FAULT, most=2)
GIVEN_UP = frozenset({SinkState.FAILING, SinkState.FENCING, SinkState.QUIESCED})


class PushModel:
    """See the module. `writers` names the engines; of two with one name the second is the first one's next life.

    `late_lookup` breaks the rule that P learns D's sessions before it claims, to show that the rule is needed.
    """

    def __init__(
        self,
        writers: Sequence[str] = ("P",),
        ranks: int = 1,
        writes: int = 1,
        budget: Budget = TWO_OF_PUSH,
        *,
        answer_early: bool = True,
        late_lookup: bool = False,
        source_table: SourceTable = SOURCE,
        sink_table: SinkTable = SINK,
    ) -> None:
        shape = f"{ranks} rank(s), {writes} write(s) each"
        self.name = f"push: {' and '.join(writers)} of {shape}, policy {policy(answer_early)}"
        self.bound = str(budget)
        self._budget, self._early, self._late_lookup = budget, answer_early, late_lookup
        self._reborn = len(writers) > len(set(writers))
        lives = [EngineRef(name, f"life{list(writers[:i]).count(name)}") for i, name in enumerate(writers)]
        net = Network()
        self._reserved, self._release = net.bit("reservation"), net.bit("release")
        self._wires = [Wires(net, engine, ranks) for engine in lives]
        self._p = [SourceParty(engine, source_table) for engine in lives]
        self._sides = [
            WriterSide(i, party, wires, budget)
            for i, (party, wires) in enumerate(zip(self._p, self._wires, strict=True))
        ]
        self._d = SinkParty(D0, "layerwise", answer_early=answer_early, table=sink_table)
        self._ops = (Op.NONE,) * writes

    def initial(self) -> State:
        writers = tuple(Writer(ranks=(Rank(ops=self._ops),) * len(wires.ranks)) for wires in self._wires)
        return State(writers=writers)

    def ended(self, s: State) -> bool:
        d_over = s.d_blocks is not Blocks.OURS or s.d is Vllm.DECODING
        return d_over and all(_writer_ended(w) for w in s.writers)

    def describe(self, s: State) -> str:
        parts = []
        for party, wires, w in zip(self._p, self._wires, s.writers, strict=True):
            states = ",".join(party.record(rank.src).state for rank in w.ranks) if w.alive else "dead"
            ops = " ".join(op.name.lower() for rank in w.ranks for op in rank.ops)
            parts.append(f"{wires.name} {states}, blocks {w.blocks.name.lower()}, writes {ops}")
        return "; ".join([*parts, f"D {self._d.record(s.snk).state}, blocks {s.d_blocks.name.lower()}"])

    def steps(self, s: State) -> Steps:
        for number, side in enumerate(self._sides):
            born = number == 0 or not self._reborn or not s.writers[number - 1].alive
            if s.writers[number].alive and born:
                yield from side.steps(s, self._reserved)
                if s.net & self._release:
                    yield from side.release(s)
            yield from self._landings(s, number)
        if s.d_life == 0:
            yield from self._d_steps(s)
            for wires in self._wires:
                yield from self._to_d(s, wires)
        yield from self._fault_steps(s)

    def _used(self, s: State, fault: int) -> State:
        return s._replace(faults=self._budget.spend(fault, s.faults))

    def _landings(self, s: State, number: int) -> Steps:
        """A grant is bound to the endpoints P looked up before it claimed, so nothing lands after the fence."""
        if s.d_life or (s.fenced and not self._late_lookup):
            return
        writer = s.writers[number]
        for r, rank in enumerate(writer.ranks):
            for i, op in enumerate(rank.ops):
                if op not in IN_TRANSIT:
                    continue
                right = writer.alive and writer.blocks is Blocks.OURS
                landed = Op.LOST if op is Op.ZOMBIE else Op.RIGHT if right else Op.WRONG
                after = self._sides[number].with_rank(s, r, ops=put(rank.ops, i, landed))
                label = f"{self._wires[number].ranks[r].name}: write {i} lands"
                yield Step(label, after, False, self._landing_problems(s, number))

    def _landing_problems(self, s: State, number: int) -> tuple[str, ...]:
        if s.d_blocks is not Blocks.OURS or s.d is Vllm.DECODING or s.taken:
            return ("(2) a write lands in blocks that D no longer keeps for it",)
        if self._d.record(s.snk).source != self._p[number].engine:
            return ("(2) a write lands that holds no claim",)
        return ()

    # --- D -----------------------------------------------------------------------------------------------------

    def _drive_d(
        self, s: State, call: Call, label: str, *, certain: bool = False, asked: bool = False
    ) -> Step[State]:
        """`asked`: P itself said that it is over, so D need not tell it."""
        problems: list[str] = []
        old = self._d.record(s.snk)
        snk, returned = self._d.drive(s.snk, call)
        if snk != s.snk:
            s = s._replace(snk=snk)
            if self._d.lacks_deadline(snk):
                problems.append("(4) D's state has no deadline")
        actions: Sequence[SinkAction] = returned[1] if call.method in ("begin", "handle") else returned
        for action in actions:
            s = self._carry_out(s, action, problems)
        gave_up = old.state is SinkState.RECEIVING and self._d.record(snk).state in GIVEN_UP
        if gave_up and not asked and not any(s.net & wires.to_abort for wires in self._wires):
            problems.append("(6) D gives up and does not tell P")
        return Step(label, s, certain, tuple(problems))

    def _carry_out(self, s: State, action: SinkAction, problems: list[str]) -> State:
        if isinstance(action, SendAbort):
            for party, wires in zip(self._p, self._wires, strict=True):
                if party.engine == action.peer:
                    return sent(s, wires.to_abort)
        if isinstance(action, Fence):
            return s._replace(fence=max(1, s.fence))
        if isinstance(action, DemandRestart):
            return s._replace(fence=2)
        if isinstance(action, AnswerEarly):
            if not self._early or s.report is not None:
                problems.append("(5) vLLM gets failed block ids it may not get now")
            return s._replace(d=Vllm.ANSWERED if s.d is Vllm.RUNNING else s.d)
        if isinstance(action, ReportFinished):
            self._check_report(s, action, problems)
            return s._replace(report=action.outcome)
        return s

    def _check_report(self, s: State, action: ReportFinished, problems: list[str]) -> None:
        ops = {op for w in s.writers for rank in w.ranks for op in rank.ops}
        if s.report is not None:
            problems.append("(5) vLLM hears twice of one request")
        if not IN_TRANSIT.isdisjoint(ops) and not s.fenced:
            problems.append("(2) D reports while a write may still land")
        if action.outcome is Outcome.RECEIVED:
            owner = self._d.record(s.snk).source
            mine = [w for p, w in zip(self._p, s.writers, strict=True) if p.engine == owner]
            if not mine or any(op is not Op.DONE_RIGHT for rank in mine[0].ranks for op in rank.ops):
                problems.append("(3) D takes bytes that P did not vouch for")

    def _d_steps(self, s: State) -> Steps:
        record = self._d.record(s.snk)
        if s.d is Vllm.ABSENT:
            after = s._replace(d=Vllm.RUNNING, d_blocks=Blocks.OURS, net=s.net | self._reserved)
            yield self._drive_d(after, calls.D_BEGIN, "D: vLLM reserves blocks, D posts the reservation")
        if s.snk and record.state not in SINK_FINAL:
            yield self._drive_d(s, TICK, f"D: deadline while {record.state}", certain=True)
        elif s.snk and self._budget.allows(Fault.FORGET, s.faults):
            yield self._drive_d(self._used(s, Fault.FORGET), TICK, "D: forgets the transfer")
        yield from self._d_faults(s, record.state)
        if s.fence == 1:
            after = self._lost(s) if self._late_lookup else s
            after = after._replace(fence=0, fenced=True)
            yield self._drive_d(after, calls.D_FENCED, "D: destroys its endpoint", certain=True)
        if s.report is not None and not s.taken:
            received = s.report is Outcome.RECEIVED and s.d is Vllm.RUNNING
            after = s._replace(
                taken=True,
                d=Vllm.DECODING if received else Vllm.ENDED,
                d_blocks=Blocks.OURS if received else Blocks.REUSED,
            )
            label = f"D: vLLM takes the report and {'decodes' if received else 'frees or recomputes'}"
            yield self._drive_d(after, calls.D_REPORTED, label, certain=True)
        if s.d is Vllm.ABORTED and not record.cancelled and s.report is None:
            yield self._drive_d(s, calls.D_CANCEL, "D: hears of vLLM's abort", certain=True)

    def _d_faults(self, s: State, state: SinkState) -> Steps:
        if self._budget.allows(Fault.REFUSE, s.faults) and state in (SinkState.RESERVED, SinkState.RECEIVING):
            yield self._drive_d(self._used(s, Fault.REFUSE), calls.D_REFUSE, "D: finds that it cannot work")
        if self._budget.allows(Fault.WRONG_CLAIM, s.faults):
            label = "D <- Claim with another prompt"
            yield self._drive_d(self._used(s, Fault.WRONG_CLAIM), calls.WRONG_CLAIM, label)
        bound_to_it = state in (SinkState.RECEIVING, SinkState.FAILING, SinkState.FENCING)
        if self._budget.allows(Fault.OTHER_FENCE, s.faults) and bound_to_it and not s.fenced:
            after = self._used(s, Fault.OTHER_FENCE)._replace(fence=0, fenced=True)
            yield self._drive_d(after, calls.D_FENCED, "D: destroys its endpoint for another transfer")

    def _lost(self, s: State) -> State:
        """What was on its way to the destroyed endpoint."""
        for number, writer in enumerate(s.writers):
            for r, rank in enumerate(writer.ranks):
                ops = tuple(Op.LOST if op in IN_TRANSIT else op for op in rank.ops)
                s = self._sides[number].with_rank(s, r, ops=ops)
        return s

    def _to_d(self, s: State, wires: Wires) -> Steps:
        if s.net & wires.claim:
            answer = self._d.drive(s.snk, wires.deliver_claim)[1][0]
            granted = answer.verdict is Verdict.OK
            after = sent(s, wires.granted if granted else wires.denied)
            label = f"D <- Claim of {wires.name}, {'granted' if granted else 'refused'}"
            yield self._drive_d(after, wires.deliver_claim, label)
        for rank in wires.ranks:
            if s.net & rank.pushed:
                yield self._drive_d(sent(s, rank.told), rank.deliver_pushed, f"D <- Pushed of {rank.name}")
            if s.net & rank.dirty:
                yield self._drive_d(s, rank.deliver_dirty, f"D <- dirty Pushed of {rank.name}")
            if s.net & rank.abort:
                yield self._drive_d(s, rank.deliver_abort, f"D <- Abort of {rank.name}")
            if s.net & rank.drained:
                yield self._drive_d(s, rank.deliver_drained, f"D <- drained Abort of {rank.name}", asked=True)
            if s.net & rank.drained_reply:
                label = f"D <- {rank.name} answers that it drained"
                yield self._drive_d(s, rank.answered_drained, label, asked=True)
        if wires is self._wires[0] and s.net & self._release:
            yield self._drive_d(s, calls.RELEASE, "D <- Release of the proxy")

    # --- faults ------------------------------------------------------------------------------------------------

    def _fault_steps(self, s: State) -> Steps:
        def might(fault: int) -> bool:
            return self._budget.allows(fault, s.faults)

        if might(Fault.RELEASE):
            after = s._replace(net=s.net | self._release, faults=s.faults | Fault.RELEASE)
            yield Step("the proxy gives up both legs", after)
        if s.d_life or s.d is Vllm.ABSENT:
            return
        if might(Fault.CANCEL_D) and s.d is Vllm.RUNNING:
            after = s._replace(d=Vllm.ABORTED, faults=s.faults | Fault.CANCEL_D)
            yield Step("D: vLLM aborts the request", after)
        if might(Fault.FENCE_FAILS) and s.fence == 1:
            after = s._replace(faults=s.faults | Fault.FENCE_FAILS)
            yield self._drive_d(after, calls.D_FENCE_FAILED, "D: cannot destroy its endpoint")
        if s.fence == 2:
            yield Step("D: is restarted as it asked", _restarted(s), True)
        elif might(Fault.CRASH_D):
            after = _restarted(s)._replace(faults=s.faults | Fault.CRASH_D)
            yield Step("D: crashes, and starts again under the same name", after)


def _restarted(s: State) -> State:
    """D's memory, and with its new transport name every way into it, is another."""
    return State(writers=s.writers, d=Vllm.ENDED, d_life=1, net=s.net, faults=s.faults)


def _writer_ended(w: Writer) -> bool:
    if not w.alive:
        return True
    returned = not w.deferred or all(rank.freed for rank in w.ranks)
    return returned and w.request in (Vllm.ABSENT, Vllm.ENDED)
