"""Whatever happens to many transfers at once, in whatever order: each end comes, and comes once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Claim, Done, Pushed, Release, Renew
from connectors.handoff.actions import CloseSession, Fence, FreeBlocks, ReportFinished
from connectors.handoff.sink import SinkLedger, SinkLimits
from connectors.handoff.source import SourceLedger, SourceLimits

P, D = EngineRef("p", "1"), EngineRef("d", "1")
IDS = st.sampled_from(["t0", "t1"])
WAITS = st.sampled_from([0.0, 0.1, 3.0, 20.0, 70.0])
FOREVER_S = 100_000.0

SOURCE_CALLS: dict[str, Callable[[SourceLedger, str, float], Any]] = {
    "begin": lambda ledger, t, now: ledger.begin(t, t, now),
    "hold": lambda ledger, t, now: ledger.hold(t, t, now),
    "sibling": lambda ledger, t, now: ledger.hold(t, "sibling", now),
    "finished": lambda ledger, t, now: ledger.finished(t, t, now),
    "granted": lambda ledger, t, now: ledger.granted(t, D, now),
    "denied": lambda ledger, t, now: ledger.denied(t, "no", now),
    "submit": lambda ledger, t, now: ledger.submit(t, now),
    "all_submitted": lambda ledger, t, now: ledger.all_submitted(t, now),
    "preempted": lambda ledger, t, now: ledger.preempted(t, now),
    "resumed": lambda ledger, t, now: ledger.resumed(t, now),
    "told": lambda ledger, t, now: ledger.told(t, now),
    "cancel": lambda ledger, t, now: ledger.cancel(t, "no", now),
    "renew": lambda ledger, t, now: ledger.handle(Renew(transfer_id=t, source_epoch="1"), now)[1],
    "release": lambda ledger, t, now: ledger.handle(Release(transfer_id=t, reason="no"), now)[1],
    "abort": lambda ledger, t, now: ledger.handle(Abort(transfer_id=t, epoch="1", sender=D, reason="no"), now)[1],
    "done": lambda ledger, t, now: ledger.handle(done(t, "r"), now)[1],
    "done again": lambda ledger, t, now: ledger.handle(done(t, "another"), now)[1],
}


def done(transfer_id: str, read_id: str) -> Done:
    return Done(transfer_id=transfer_id, source_epoch="1", sink=D, sink_rank=0, sink_ranks=1, read_id=read_id)


SOURCE_STEPS = [
    *SOURCE_CALLS,
    *3 * ["begin", "granted", "submit", "finished"],
    "write ok",
    "write error",
    "unsent",
]
"""Those that lead somewhere come more often."""


def end_write(ledger: SourceLedger, how: str, transfer_id: str, now: float) -> Any:
    if how == "write ok":
        return ledger.write_ok(transfer_id, now)
    return ledger.write_failed(transfer_id, "no", now, quiesced=how == "unsent")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(SOURCE_STEPS), IDS, WAITS), min_size=15, max_size=40))
def test_p_gives_back_what_was_deferred_once_and_never_under_its_own_write(
    steps: list[tuple[str, str, float]],
) -> None:
    ledger = SourceLedger("1", SourceLimits(max_tombstones=2))
    now, deferred, freed, writes = 0.0, Counter[str](), Counter[str](), Counter[str]()

    def see(actions: Any) -> None:
        for action in actions if isinstance(actions, list) else ():
            if isinstance(action, FreeBlocks):
                assert not writes[action.transfer_id], "freed under a write"
                freed[action.transfer_id] += 1
            if isinstance(action, CloseSession):
                writes.clear()
                see(ledger.session_closed(now))

    for call, transfer_id, wait in steps:
        now += wait
        see(ledger.tick(now))
        if call in SOURCE_CALLS:
            if call == "finished" and transfer_id in deferred:
                continue  # vLLM finishes a request once
            returned = SOURCE_CALLS[call](ledger, transfer_id, now)
            if call == "submit" and returned:
                writes[transfer_id] += 1
            if call == "finished" or (call == "hold" and returned):
                deferred[transfer_id] += 1  # an id that was forgotten may live again
            see(returned)
        elif writes[transfer_id]:
            writes[transfer_id] -= call != "write error"
            see(end_write(ledger, call, transfer_id, now))
    for later in range(1, 8):
        see(ledger.tick(now + later * FOREVER_S))
    assert freed == +deferred
    assert ledger.num_held() == 0
    assert not ledger.transfers


SINK_CALLS: dict[str, Callable[[SinkLedger, str, float], Any]] = {
    "begin": lambda ledger, t, now: ledger.begin(t, t, now, prompt_hash="h", num_tokens=8)[1],
    "refuse": lambda ledger, t, now: ledger.refuse(t, "no", now),
    "cancel": lambda ledger, t, now: ledger.cancel(t, now),
    "reported": lambda ledger, t, now: ledger.reported(t, now),
    "claim": lambda ledger, t, now: ledger.handle(claim(t, P), now)[1],
    "claim of another": lambda ledger, t, now: ledger.handle(claim(t, EngineRef("q", "1")), now)[1],
    "claim of a new life": lambda ledger, t, now: ledger.handle(claim(t, EngineRef("p", "2")), now)[1],
    "pushed": lambda ledger, t, now: ledger.handle(pushed(t, dirty=False), now)[1],
    "dirty": lambda ledger, t, now: ledger.handle(pushed(t, dirty=True), now)[1],
    "abort": lambda ledger, t, now: ledger.handle(abort(t, drained=False), now)[1],
    "drained": lambda ledger, t, now: ledger.handle(abort(t, drained=True), now)[1],
    "answered": lambda ledger, t, now: ledger.abort_answered(t, 0, True, now),
    "release": lambda ledger, t, now: ledger.handle(Release(transfer_id=t, reason="no"), now)[1],
    "fenced": lambda ledger, t, now: ledger.fenced(ledger.fence_begins(), now),
    "fence failed": lambda ledger, t, now: ledger.fence_failed("no", now),
}


def claim(transfer_id: str, source: EngineRef) -> Claim:
    return Claim(transfer_id=transfer_id, sink_epoch="1", source=source, source_ranks=1, prompt_hash="h")


def pushed(transfer_id: str, *, dirty: bool) -> Pushed:
    return Pushed(
        transfer_id=transfer_id,
        sink_epoch="1",
        source=P,
        source_rank=0,
        num_tokens=8,
        bytes_sent=1,
        dirty=dirty,
    )


def abort(transfer_id: str, *, drained: bool) -> Abort:
    return Abort(transfer_id=transfer_id, epoch="1", sender=P, drained=drained, reason="no")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(SINK_CALLS)), IDS, WAITS), min_size=15, max_size=40))
def test_d_reports_every_request_once(steps: list[tuple[str, str, float]]) -> None:
    ledger = SinkLedger("1", "layerwise", SinkLimits(answer_early=True, max_tombstones=2))
    now, begun, reports = 0.0, set[str](), Counter[str]()

    def see(actions: Any) -> None:
        for action in actions:
            if isinstance(action, ReportFinished):
                reports[action.transfer_id] += 1
            if isinstance(action, Fence):
                see(ledger.fenced(ledger.fence_begins(), now))

    for call, transfer_id, wait in steps:
        now += wait
        see(ledger.tick(now))
        if call == "begin":
            if transfer_id in begun:
                continue  # a transfer id is used for one attempt
            begun.add(transfer_id)
        see(SINK_CALLS[call](ledger, transfer_id, now))
    for later in range(1, 8):
        see(ledger.tick(now + later * FOREVER_S))
        for transfer_id in begun:
            ledger.reported(transfer_id, now + later * FOREVER_S)
    assert reports == Counter(begun)
    assert ledger.num_waiting() == 0
    assert not ledger.transfers
