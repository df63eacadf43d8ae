"""Pull: one P, one D of one or two ranks, any number of late, lost and repeated messages, and a second reader.

What is checked at every step: P vouches only for reads of blocks it still holds (1); nothing lands on D outside
the wait (2); D decodes only what P vouched for, and it is right (3); states have deadlines (4); vLLM gets every
block back once and hears of every request once (5); and a leg given up on D is told to P at once (6).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ascend_pd.wire.messages import Verdict
from connectors.handoff.actions import (
    AnswerEarly,
    DemandRestart,
    Fence,
    FreeBlocks,
    Outcome,
    ReportFinished,
    SendAbort,
    SendDone,
    SinkAction,
    SourceAction,
)
from connectors.handoff.exploring.parties import NOW, TICK, Call, SinkParty, SourceParty
from connectors.handoff.exploring.pull_world import (
    ALL_OF_PULL,
    D0,
    D_BEGIN,
    D_CANCEL,
    D_ERROR,
    D_FENCE_FAILED,
    D_FENCED,
    D_READ_OK,
    D_REFUSE,
    D_REPORTED,
    D_UNSENT,
    OTHER,
    P0,
    P1,
    P_ABORT,
    P_BEGIN,
    P_CANCEL,
    P_HOLD,
    P_RELEASE,
    P_RENEW,
    P_SIBLING,
    RankWires,
    State,
    done_message,
    sent,
)
from connectors.handoff.exploring.search import Step
from connectors.handoff.exploring.world import (
    IN_TRANSIT,
    LANDED,
    NO_FAULT,
    NOT_RIGHT,
    Blocks,
    Budget,
    Fault,
    Network,
    Op,
    Vllm,
    policy,
    put,
)
from connectors.handoff.machine import Kind
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkTable
from connectors.handoff.source_record import classify_done
from connectors.handoff.source_table import SOURCE, SOURCE_FINAL, SourceTable

Steps = Iterator[Step[State]]


class PullModel:
    """See the module. `reads` per rank."""

    def __init__(
        self,
        ranks: int = 1,
        reads: int = 1,
        budget: Budget = ALL_OF_PULL,
        *,
        answer_early: bool = True,
        source_table: SourceTable = SOURCE,
        sink_table: SinkTable = SINK,
    ) -> None:
        self.name = f"pull: {ranks} rank(s) of D, {reads} read(s) each, policy {policy(answer_early)}"
        self.bound = str(budget)
        self._ranks, self._reads, self._budget = range(ranks), reads, budget
        self._early = answer_early
        self._source_table = source_table
        self._p = (SourceParty(P0, source_table), SourceParty(P1, source_table))
        self._d = SinkParty(D0, "pull", answer_early=answer_early, table=sink_table)
        net = Network()
        self._handoff, self._abort, self._release = net.bit("handoff"), net.bit("abort"), net.bit("release")
        self._wires = [RankWires(net, rank, ranks, reads) for rank in self._ranks]
        self._other = Call("handle", done_message(0, ranks, OTHER, "other"), NOW)

    def initial(self) -> State:
        n = len(self._ranks)
        ops = ((Op.NONE,) * self._reads,) * n
        return State(snk=(0,) * n, ops=ops, reports=(None,) * n, taken=(False,) * n, fences=(0,) * n)

    def ended(self, s: State) -> bool:
        d_over = s.d_blocks is not Blocks.OURS or s.d is Vllm.DECODING
        return s.p is not Vllm.RUNNING and s.p_blocks is not Blocks.OURS and d_over

    def describe(self, s: State) -> str:
        p, d = self._p[s.p_life].record(s.src).state, ",".join(self._d.record(r).state for r in s.snk)
        ops = " ".join(op.name.lower() for rank in s.ops for op in rank)
        return f"P {p}, blocks {s.p_blocks.name.lower()}; D {d}, blocks {s.d_blocks.name.lower()}, reads {ops}"

    def steps(self, s: State) -> Steps:
        for step in self._all_steps(s):
            problem = "" if step.after is s else self._unsafe_vouch(step.after)
            yield step._replace(problems=(*step.problems, problem)) if problem else step

    def _all_steps(self, s: State) -> Steps:
        yield from self._p_steps(s)
        yield from self._to_p(s)
        if s.d_life == 0:
            yield from self._d_steps(s)
            for rank in self._ranks:
                yield from self._rank_steps(s, rank)
        yield from self._fault_steps(s)

    def _may(self, s: State, fault: int) -> bool:
        return self._budget.allows(fault, s.faults)

    def _used(self, s: State, fault: int) -> State:
        return s._replace(faults=self._budget.spend(fault, s.faults))

    # --- P -----------------------------------------------------------------------------------------------------

    def _drive_p(self, s: State, call: Call, label: str, *, certain: bool = False) -> Step[State]:
        party, problems = self._p[s.p_life], []
        src, returned = party.drive(s.src, call)
        if src != s.src:
            s = s._replace(src=src)
            if party.lacks_deadline(src):
                problems.append("(4) P's state has no deadline")
        actions: Sequence[SourceAction] = returned[1] if call.method == "handle" else returned or ()
        for action in actions:
            if isinstance(action, FreeBlocks):
                if s.p_blocks is not Blocks.OURS:
                    problems.append("(5) P's vLLM is given blocks back that it has")
                s = s._replace(p_blocks=Blocks.REUSED)
        return Step(label, s, certain, tuple(problems))

    def _p_steps(self, s: State) -> Steps:
        party = self._p[s.p_life]
        if s.p is Vllm.ABSENT and s.p_life == 0:
            src, _ = party.drive(s.src, P_BEGIN)
            yield Step("P: vLLM takes the request", s._replace(src=src, p=Vllm.RUNNING))
        if s.p is Vllm.RUNNING:
            src, held = party.drive(s.src, P_HOLD)
            after = s._replace(src=src, p=Vllm.ENDED)
            if held:
                after = after._replace(p_blocks=Blocks.OURS, net=s.net | self._handoff)
                yield Step("P: finished, holds the blocks, hands off", after, True)
            else:
                yield Step("P: finished, nothing to hold", after._replace(p_blocks=Blocks.REUSED), True)
            src, held = party.drive(s.src, P_SIBLING)
            problems = ("(5) a sibling got a hold",) if held else ()
            yield Step("P: a sibling asks for a hold", s._replace(src=src), problems=problems)
        if s.src:
            state = party.record(s.src).state
            if state not in SOURCE_FINAL:
                yield self._drive_p(s, TICK, f"P: deadline while {state}", certain=True)
            elif self._may(s, Fault.FORGET):
                yield self._drive_p(self._used(s, Fault.FORGET), TICK, "P: forgets the transfer")

    def _to_p(self, s: State) -> Steps:
        for rank, wires in enumerate(self._wires):
            if s.net & wires.done:
                answer = self._p[s.p_life].drive(s.src, wires.deliver)[1][0]
                ok = answer.verdict is Verdict.OK
                yield self._drive_p(
                    sent(s, wires.ok if ok else wires.no),
                    wires.deliver,
                    f"P <- Done of rank {rank}, answers {answer.verdict}",
                )
        yield self._deliver_other(s)
        yield self._drive_p(s, P_RENEW, "P <- Renew")
        if s.net & self._release:
            yield self._drive_p(s, P_RELEASE, "P <- Release of the proxy")
        if s.net & self._abort:
            yield self._drive_p(s, P_ABORT, "P <- Abort of D")

    def _deliver_other(self, s: State) -> Step[State]:
        """Somebody else read the blocks too. Only one of the readers may be told that the bytes are right."""
        answer = self._p[s.p_life].drive(s.src, self._other)[1][0]
        step = self._drive_p(s, self._other, f"P <- Done of another reader, answers {answer.verdict}")
        if answer.verdict is Verdict.OK and any(s.net & wires.ok for wires in self._wires):
            return step._replace(problems=(*step.problems, "(5) P vouched to two readers"))
        return step

    def _unsafe_vouch(self, s: State) -> str:
        """Invariant 1: with the blocks given back, P must not say OK to a read that has not landed rightly."""
        if s.p_blocks is not Blocks.REUSED or s.p_life or not s.src:
            return ""
        record = self._p[0].record(s.src)
        for rank, wires in enumerate(self._wires):
            if not NOT_RIGHT.isdisjoint(s.ops[rank]):
                _, event = classify_done(record, wires.message)
                if self._source_table[event][record.state].kind is not Kind.REFUSED:
                    return "(1) P gave blocks back under a read it would still vouch for"
        return ""

    # --- D -----------------------------------------------------------------------------------------------------

    def _drive_d(self, s: State, rank: int, call: Call, label: str, *, certain: bool = False) -> Step[State]:
        problems: list[str] = []
        old = self._d.record(s.snk[rank]).state
        snk, returned = self._d.drive(s.snk[rank], call)
        if snk != s.snk[rank]:
            s = s._replace(snk=put(s.snk, rank, snk))
            if self._d.lacks_deadline(snk):
                problems.append("(4) D's state has no deadline")
        actions: Sequence[SinkAction] = returned[1] if call.method == "begin" else returned
        for action in actions:
            s = self._carry_out(s, rank, action, problems)
        gave_up = old in ("reserved", "receiving", "received") and call not in (
            self._wires[rank].vouched,
            self._wires[rank].disowned,
        )
        if gave_up and self._d.record(snk).state in ("failing", "fencing", "quiesced") and not s.net & self._abort:
            problems.append("(6) D gives up and does not tell P")
        return Step(label, s, certain, tuple(problems))

    def _carry_out(self, s: State, rank: int, action: SinkAction, problems: list[str]) -> State:
        if isinstance(action, SendDone):
            return s._replace(net=s.net | self._wires[rank].done)
        if isinstance(action, SendAbort):
            return s._replace(net=s.net | self._abort)
        if isinstance(action, Fence):
            return s._replace(fences=put(s.fences, rank, max(1, s.fences[rank])))
        if isinstance(action, DemandRestart):
            return s._replace(fences=put(s.fences, rank, 2))
        if isinstance(action, AnswerEarly):
            if not self._early or s.reports[rank] is not None:
                problems.append("(5) vLLM gets failed block ids it may not get now")
            return s._replace(d=Vllm.ANSWERED if s.d is Vllm.RUNNING else s.d)
        if isinstance(action, ReportFinished):
            if s.reports[rank] is not None:
                problems.append("(5) vLLM hears twice of one request")
            if not IN_TRANSIT.isdisjoint(s.ops[rank]):
                problems.append("(2) D reports while a read may still land")
            if action.outcome is Outcome.RECEIVED and not self._vouched_for(s, rank):
                problems.append("(3) D takes bytes that P did not vouch for")
            return s._replace(reports=put(s.reports, rank, action.outcome))
        return s

    def _vouched_for(self, s: State, rank: int) -> bool:
        return bool(s.net & self._wires[rank].ok) and all(op is Op.DONE_RIGHT for op in s.ops[rank])

    def _d_steps(self, s: State) -> Steps:
        if s.d is Vllm.ABSENT and s.net & self._handoff:
            after, label = s._replace(d=Vllm.RUNNING, d_blocks=Blocks.OURS), "D: vLLM allocates blocks"
            for rank in self._ranks:
                after = self._drive_d(after, rank, D_BEGIN, label).after
            yield Step(label, after)
        if s.d_blocks is Blocks.OURS and s.d is not Vllm.DECODING and all(s.taken):
            if s.d is Vllm.RUNNING and all(outcome is Outcome.RECEIVED for outcome in s.reports):
                yield Step("D: vLLM decodes", s._replace(d=Vllm.DECODING), True)
            else:
                after = s._replace(d=Vllm.ENDED, d_blocks=Blocks.REUSED)
                yield Step("D: vLLM frees or recomputes", after, True)

    def _rank_steps(self, s: State, rank: int) -> Steps:
        record, wires = self._d.record(s.snk[rank]), self._wires[rank]
        if record.begun and s.ops[rank][0] is Op.NONE:
            snk, started = self._d.drive(s.snk[rank], wires.start)
            if started:
                ops = put(s.ops, rank, (Op.FLYING,) * self._reads)
                yield Step(f"D{rank}: reads", s._replace(snk=put(s.snk, rank, snk), ops=ops))
        for i, op in enumerate(s.ops[rank]):
            yield from self._op_steps(s, rank, i, op)
        if s.d is Vllm.ABORTED and not record.cancelled and s.reports[rank] is None:
            yield self._drive_d(s, rank, D_CANCEL, f"D{rank}: hears of vLLM's abort", certain=True)
        if s.net & wires.ok:
            yield self._drive_d(s, rank, wires.vouched, f"D{rank} <- OK")
        if s.net & wires.no:
            yield self._drive_d(s, rank, wires.disowned, f"D{rank} <- not vouched for")
        yield from self._local_steps(s, rank)

    def _local_steps(self, s: State, rank: int) -> Steps:
        record = self._d.record(s.snk[rank])
        if s.snk[rank] and record.state not in SINK_FINAL:
            yield self._drive_d(s, rank, TICK, f"D{rank}: deadline while {record.state}", certain=True)
        elif s.snk[rank] and self._may(s, Fault.FORGET):
            yield self._drive_d(self._used(s, Fault.FORGET), rank, TICK, f"D{rank}: forgets")
        if s.fences[rank] == 1:
            yield self._fence(s, rank, f"D{rank}: destroys its endpoint")
        elif self._may(s, Fault.OTHER_FENCE) and s.fences[rank] == 0 and record.begun:
            label = f"D{rank}: destroys its endpoint for another transfer"
            yield self._fence(self._used(s, Fault.OTHER_FENCE), rank, label)
        if self._may(s, Fault.REFUSE) and record.begun:
            after = self._used(s, Fault.REFUSE)
            yield self._drive_d(after, rank, D_REFUSE, f"D{rank}: finds that it cannot work")
        if s.reports[rank] is not None and not s.taken[rank]:
            after = s._replace(taken=put(s.taken, rank, True))
            yield self._drive_d(after, rank, D_REPORTED, f"D{rank}: vLLM takes the report", certain=True)

    def _fence(self, s: State, rank: int, label: str) -> Step[State]:
        dead = tuple(Op.LOST if op in IN_TRANSIT | LANDED else op for op in s.ops[rank])
        after = s._replace(ops=put(s.ops, rank, dead), fences=put(s.fences, rank, 0))
        return self._drive_d(after, rank, D_FENCED, label, certain=True)

    def _op_steps(self, s: State, rank: int, i: int, op: Op) -> Steps:
        def with_op(new: Op, fault: int = NO_FAULT) -> State:
            return self._used(s, fault)._replace(ops=put(s.ops, rank, put(s.ops[rank], i, new)))

        name = f"D{rank}: read {i}"
        if op in IN_TRANSIT:
            waiting = s.d_blocks is Blocks.OURS and s.d is not Vllm.DECODING and not s.taken[rank]
            problems = () if waiting else ("(2) a read lands in blocks that are no longer its own",)
            right = s.p_blocks is Blocks.OURS and s.p_life == 0
            landed = Op.LOST if op is Op.ZOMBIE else Op.RIGHT if right else Op.WRONG
            yield Step(f"{name} lands{'' if right else ' with wrong bytes'}", with_op(landed), False, problems)
        if op in LANDED:
            done = Op.DONE_RIGHT if op is Op.RIGHT else Op.DONE_WRONG
            yield self._drive_d(with_op(done), rank, D_READ_OK, f"{name} returns success", certain=True)
        if (op in LANDED or op is Op.FLYING) and self._may(s, Fault.ERROR):
            after = with_op(Op.ZOMBIE if op is Op.FLYING else Op.LOST, Fault.ERROR)
            yield self._drive_d(after, rank, D_ERROR, f"{name} returns an error", certain=True)
        if op is Op.FLYING and self._may(s, Fault.UNSENT):
            yield self._drive_d(with_op(Op.LOST, Fault.UNSENT), rank, D_UNSENT, f"{name} could not be submitted")

    # --- faults ------------------------------------------------------------------------------------------------

    def _fault_steps(self, s: State) -> Steps:
        if self._may(s, Fault.RELEASE):
            after = self._used(s, Fault.RELEASE)
            yield Step("the proxy gives up P's leg", after._replace(net=s.net | self._release))
        if self._may(s, Fault.CANCEL_P) and s.p is Vllm.RUNNING:
            after = self._used(s, Fault.CANCEL_P)._replace(p=Vllm.ENDED, p_blocks=Blocks.REUSED)
            yield self._drive_p(after, P_CANCEL, "P: vLLM aborts the request")
        if self._may(s, Fault.CRASH_P):
            after = self._used(s, Fault.CRASH_P)._replace(p_life=1, src=0, p=Vllm.ENDED, p_blocks=Blocks.REUSED)
            yield Step("P: crashes, and starts again under the same name", after)
        if s.d_life or s.d is Vllm.ABSENT:
            return
        if self._may(s, Fault.CANCEL_D) and s.d is Vllm.RUNNING:
            yield Step("D: vLLM aborts the request", self._used(s, Fault.CANCEL_D)._replace(d=Vllm.ABORTED))
        for rank in self._ranks:
            if self._may(s, Fault.FENCE_FAILS) and s.fences[rank] == 1:
                yield self._drive_d(
                    self._used(s, Fault.FENCE_FAILS), rank, D_FENCE_FAILED, f"D{rank}: cannot destroy it"
                )
        if any(fence == 2 for fence in s.fences):
            yield Step("D: is restarted as it asked", self._restarted(s), True)
        elif self._may(s, Fault.CRASH_D):
            after = self._restarted(self._used(s, Fault.CRASH_D))
            yield Step("D: crashes, and starts again under the same name", after)

    def _restarted(self, s: State) -> State:
        """D's operations end with its memory."""
        return self.initial()._replace(
            src=s.src,
            p=s.p,
            p_blocks=s.p_blocks,
            p_life=s.p_life,
            d=Vllm.ENDED,
            d_life=1,
            net=s.net,
            faults=s.faults,
        )
