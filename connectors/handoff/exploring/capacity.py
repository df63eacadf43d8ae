"""Layer-wise with full engines: unreserved prefills fill P while reservations fill D. No timer ever goes off here.

P takes and D reserves transfers in any order, and an end must stay reachable without waiting for a deadline. With
`capped=False` it does not, which shows that the cap on unreserved prefills is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Claim, Pushed
from connectors.handoff.actions import FreeBlocks, ReportFinished
from connectors.handoff.exploring import push_world as calls
from connectors.handoff.exploring.parties import NOW, Call, SinkParty, SourceParty, T
from connectors.handoff.exploring.push_world import D0
from connectors.handoff.exploring.search import Step
from connectors.handoff.exploring.world import put
from connectors.handoff.sink_table import SinkState
from connectors.handoff.source_table import SourceState
from connectors.handoff.unreserved import UnreservedCap

P0 = EngineRef("P", "life0")
CLAIM = Call(
    "handle", Claim(transfer_id=T, sink_epoch=D0.epoch, source=P0, source_ranks=1, prompt_hash="prompt"), NOW
)
PUSHED = Call(
    "handle",
    Pushed(transfer_id=T, sink_epoch=D0.epoch, source=P0, source_rank=0, num_tokens=1, bytes_sent=1),
    NOW,
)


class Transfer(NamedTuple):
    """One transfer: both records, and whether it has a slot on either engine."""

    src: int = 0
    snk: int = 0
    on_p: bool = False
    on_d: bool = False
    dropped: bool = False


class State(NamedTuple):
    """`unreserved`: finished on P without a reservation, oldest first."""

    transfers: tuple[Transfer, ...]
    unreserved: tuple[int, ...] = ()


Steps = Iterator[Step[State]]


class CapacityModel:
    """See the module. Every transfer takes one slot of each engine."""

    def __init__(self, transfers: int = 4, p_slots: int = 2, d_slots: int = 2, *, capped: bool = True) -> None:
        self.name = f"capacity: {transfers} transfers, {p_slots} slots on P, {d_slots} on D"
        self.bound = "arrival in any order on either side; no fault, no deadline"
        self._transfers, self._p_slots, self._d_slots = transfers, p_slots, d_slots
        self._max_unreserved = p_slots - 1 if capped else p_slots
        self._p = SourceParty(P0)
        self._d = SinkParty(D0, "layerwise", answer_early=False)

    def initial(self) -> State:
        return State((Transfer(),) * self._transfers)

    def ended(self, s: State) -> bool:
        return all(
            not t.on_p and not t.on_d and (t.dropped or self._d_state(t) is SinkState.DECODING)
            for t in s.transfers
        )

    def describe(self, s: State) -> str:
        parts = [f"{i}: P {self._p_state(t)}, D {self._d_state(t)}" for i, t in enumerate(s.transfers)]
        return "; ".join(parts)

    def _p_state(self, t: Transfer) -> SourceState:
        return self._p.record(t.src).state

    def _d_state(self, t: Transfer) -> SinkState:
        return self._d.record(t.snk).state

    def steps(self, s: State) -> Steps:
        p_free = self._p_slots > sum(t.on_p for t in s.transfers)
        d_free = self._d_slots > sum(t.on_d for t in s.transfers)
        for i, t in enumerate(s.transfers):
            if p_free and not t.src:
                src, _ = self._p.drive(t.src, calls.BEGIN)
                yield self._step(s, i, t._replace(src=src, on_p=True), "P starts")
            if self._p_state(t) is SourceState.PREPARING:
                yield self._finish(s, i, t)
            if d_free and not t.snk and not t.dropped:
                yield self._reserve(s, i, t)
            yield from self._later_steps(s, i, t)

    def _step(self, s: State, i: int, after: Transfer, label: str) -> Step[State]:
        return Step(f"{i}: {label}", s._replace(transfers=put(s.transfers, i, after)), True)

    def _finish(self, s: State, i: int, t: Transfer) -> Step[State]:
        src, _ = self._p.drive(t.src, calls.FINISHED)
        step = self._step(s, i, t._replace(src=src), "P finishes")
        if self._d_state(t) is SinkState.RESERVED:
            return step
        cap = UnreservedCap(self._max_unreserved)
        dropped = [name for earlier in (*s.unreserved, i) for name in cap.add(str(earlier), 1)]
        after = step.after._replace(unreserved=tuple(u for u in (*s.unreserved, i) if str(u) not in dropped))
        for name in dropped:
            after = self._drop(after, int(name))
        return Step(f"{step.label}{', dropped: ' + ' '.join(dropped) if dropped else ''}", after, True)

    def _drop(self, s: State, i: int) -> State:
        src, actions = self._p.drive(s.transfers[i].src, calls.CANCEL_P)
        freed = any(isinstance(action, FreeBlocks) for action in actions)
        after = s.transfers[i]._replace(src=src, dropped=True, on_p=not freed)
        return s._replace(transfers=put(s.transfers, i, after))

    def _reserve(self, s: State, i: int, t: Transfer) -> Step[State]:
        snk, _ = self._d.drive(t.snk, calls.D_BEGIN)
        step = self._step(s, i, t._replace(snk=snk, on_d=True), "D reserves")
        left = tuple(u for u in s.unreserved if u != i)
        return step._replace(after=step.after._replace(unreserved=left))

    def _later_steps(self, s: State, i: int, t: Transfer) -> Steps:
        if t.dropped and t.on_d:
            snk, (_, actions) = self._d.drive(t.snk, calls.RELEASE)
            told = any(isinstance(action, ReportFinished) for action in actions)
            yield self._step(s, i, t._replace(snk=snk, on_d=not told), "D hears that P dropped it")
        elif self._p_state(t) is SourceState.HELD and self._d_state(t) is SinkState.RESERVED:
            yield self._push(s, i, t)
        elif t.on_d and self._d_state(t) is SinkState.DECODING:
            yield self._step(s, i, t._replace(on_d=False), "D completes its answer")

    def _push(self, s: State, i: int, t: Transfer) -> Step[State]:
        """Claim, one write, Pushed: nothing goes wrong here."""
        src, snk, freed = t.src, self._d.drive(t.snk, CLAIM)[0], False
        for call in (calls.GRANTED, calls.SUBMIT, calls.ALL_SUBMITTED, calls.WRITE_OK):
            src, actions = self._p.drive(src, call)
            freed |= isinstance(actions, list) and any(isinstance(action, FreeBlocks) for action in actions)
        snk, _ = self._d.drive(snk, PUSHED)
        return self._step(s, i, t._replace(src=src, snk=snk, on_p=not freed), "P pushes, D decodes")
