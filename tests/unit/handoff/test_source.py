"""P's ledger: what is vouched for, when blocks go back, and what a repeat changes."""

from __future__ import annotations

import pytest

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Ask, Done, Release, Renew, Story, Verdict
from connectors.handoff.actions import (
    CloseSession,
    DemandRestart,
    FreeBlocks,
    Replan,
    SendAbort,
    SendPushed,
    StopSubmitting,
)
from connectors.handoff.source import SourceLedger, SourceLimits
from connectors.handoff.source_table import SourceState

D = EngineRef("d", "e1")
OTHER = EngineRef("d2", "e1")
LIMITS = SourceLimits(lease_s=30, max_hold_s=100, push_s=60, drain_s=10, tombstone_s=200, max_tombstones=3)


def done(
    tid: str = "t", rank: int = 0, ranks: int = 1, read: str = "r0", sink: EngineRef = D, epoch: str = "p1"
) -> Done:
    return Done(transfer_id=tid, source_epoch=epoch, sink=sink, sink_rank=rank, sink_ranks=ranks, read_id=read)


def held(tid: str = "t") -> SourceLedger:
    ledger = SourceLedger("p1", LIMITS)
    assert ledger.begin(tid, "req", 0.0)
    assert ledger.hold(tid, "req", 1.0)
    return ledger


def verdict(ledger: SourceLedger, message: Done | Renew | Release | Abort, now: float = 2.0) -> Verdict:
    answer, _ = ledger.handle(message, now)
    assert not isinstance(answer, Story)
    return answer.verdict


def frees(actions: list) -> int:
    return sum(isinstance(action, FreeBlocks) for action in actions)


def test_blocks_go_back_when_the_only_rank_was_vouched_for() -> None:
    ledger = held()
    answer, actions = ledger.handle(done(), 2.0)
    assert answer.verdict is Verdict.OK
    assert actions == [FreeBlocks("t", "req", "")]
    assert ledger.num_held() == 0


def test_blocks_stay_until_every_rank_was_vouched_for() -> None:
    ledger = held()
    assert ledger.handle(done(rank=1, ranks=2, read="r1"), 2.0)[1] == []
    assert ledger.num_held() == 1
    assert frees(ledger.handle(done(rank=0, ranks=2, read="r0"), 3.0)[1]) == 1


def test_a_repeated_done_is_ok_again_and_frees_nothing_twice() -> None:
    ledger = held()
    ledger.handle(done(), 2.0)
    for now in (3.0, 20.0, 150.0):
        answer, actions = ledger.handle(done(), now)
        assert (answer.verdict, actions) == (Verdict.OK, [])


def test_a_done_after_expiry_is_gone_unless_this_read_was_accepted_before() -> None:
    ledger = held()
    assert verdict(ledger, done(rank=0, ranks=2, read="r0")) is Verdict.OK
    assert ledger.tick(31.0) == [FreeBlocks("t", "req", "lease expired")]
    assert verdict(ledger, done(rank=0, ranks=2, read="r0"), 32.0) is Verdict.OK
    assert verdict(ledger, done(rank=0, ranks=2, read="r9"), 32.0) is Verdict.GONE
    assert verdict(ledger, done(rank=1, ranks=2, read="r1"), 32.0) is Verdict.GONE


def test_a_late_lease_counts_only_once_expiry_was_made() -> None:
    """State decides, never clocks: nobody has taken the blocks, so the bytes that were read are right."""
    ledger = held()
    assert verdict(ledger, done(), 99.0) is Verdict.OK


def test_the_first_done_fixes_the_reader() -> None:
    ledger = held()
    assert verdict(ledger, done(rank=0, ranks=2)) is Verdict.OK
    assert verdict(ledger, done(rank=1, ranks=2, sink=OTHER)) is Verdict.GONE
    assert verdict(ledger, done(rank=1, ranks=2, sink=EngineRef("d", "e2"))) is Verdict.GONE
    assert verdict(ledger, done(rank=1, ranks=3)) is Verdict.GONE


def test_a_rank_outside_the_readers_ranks_is_not_vouched_for() -> None:
    assert verdict(held(), done(rank=2, ranks=2)) is Verdict.GONE


def test_messages_of_another_epoch_are_refused_and_change_nothing() -> None:
    ledger = held()
    assert verdict(ledger, done(epoch="p0")) is Verdict.EPOCH
    assert verdict(ledger, Renew(transfer_id="t", source_epoch="p0")) is Verdict.EPOCH
    assert verdict(ledger, Release(transfer_id="t", epoch="p0", reason="x")) is Verdict.EPOCH
    assert ledger.num_held() == 1
    assert verdict(ledger, Release(transfer_id="t", reason="any life")) is Verdict.OK
    assert ledger.num_held() == 0


def test_renewal_extends_the_lease_but_not_past_the_hard_maximum() -> None:
    ledger = held()
    answer, _ = ledger.handle(Renew(transfer_id="t", source_epoch="p1"), 20.0)
    assert (answer.verdict, answer.lease_seconds) == (Verdict.OK, 30.0)
    assert ledger.tick(40.0) == []
    for now in (45.0, 70.0, 95.0):
        answer, _ = ledger.handle(Renew(transfer_id="t", source_epoch="p1"), now)
    assert answer.lease_seconds == pytest.approx(5.0)
    assert ledger.next_deadline() == 100.0
    assert frees(ledger.tick(100.0)) == 1
    assert verdict(ledger, Renew(transfer_id="t", source_epoch="p1"), 101.0) is Verdict.GONE


def test_a_release_before_the_request_prevents_the_hold() -> None:
    ledger = SourceLedger("p1", LIMITS)
    assert verdict(ledger, Release(transfer_id="t", reason="client left")) is Verdict.OK
    assert not ledger.begin("t", "req", 3.0)
    assert not ledger.hold("t", "req", 4.0)
    assert ledger.num_held() == 0
    assert ledger.handle(Ask(transfer_id="t"), 5.0)[0] == Story(known=True, state="released", reason="client left")


def test_a_release_while_computing_prevents_the_hold() -> None:
    ledger = SourceLedger("p1", LIMITS)
    ledger.begin("t", "req", 0.0)
    answer, actions = ledger.handle(Release(transfer_id="t", reason="x"), 1.0)
    assert (answer.verdict, actions) == (Verdict.OK, [])
    assert not ledger.hold("t", "req", 2.0)


def test_a_sibling_under_the_same_transfer_id_is_refused_and_harms_nobody() -> None:
    ledger = SourceLedger("p1", LIMITS)
    assert ledger.begin("t", "first", 0.0)
    assert not ledger.begin("t", "second", 0.0)
    assert not ledger.hold("t", "second", 1.0)
    assert ledger.hold("t", "first", 2.0)
    assert not ledger.hold("t", "second", 3.0)
    assert ledger.refusals == 3
    assert ledger.handle(done(), 4.0)[1] == [FreeBlocks("t", "first", "")]


def test_tombstones_are_bounded_in_number_and_time() -> None:
    ledger = SourceLedger("p1", LIMITS)
    for i in range(10):
        ledger.handle(Release(transfer_id=f"t{i}", reason="x"), float(i))
    assert len(ledger.transfers) == 3
    ledger.tick(500.0)
    assert ledger.transfers == {}
    assert ledger.next_deadline() == float("inf")


def test_a_forgotten_transfer_is_never_vouched_for() -> None:
    ledger = held()
    ledger.handle(done(), 2.0)
    ledger.tick(100.0)
    ledger.tick(1000.0)
    assert ledger.transfers == {}
    assert verdict(ledger, done(), 1001.0) is Verdict.GONE


# --- layer-wise -----------------------------------------------------------------------------------------------


def pushing(writes: int = 0) -> SourceLedger:
    ledger = SourceLedger("p1", LIMITS)
    assert ledger.begin("t", "req", 0.0, sink=D)
    assert not ledger.submit("t", 0.5)
    assert ledger.granted("t", D, 1.0) == []
    for _ in range(writes):
        assert ledger.submit("t", 2.0)
    return ledger


def test_pushed_is_sent_when_the_last_write_is_acknowledged_and_blocks_go_back_when_vllm_is_done() -> None:
    ledger = pushing(2)
    assert ledger.write_ok("t", 3.0) == []
    assert ledger.all_submitted("t", 3.0) == []
    assert ledger.write_ok("t", 4.0) == [SendPushed("t", D)]
    assert ledger.finished("t", "req", 5.0) == [FreeBlocks("t", "req", "")]
    assert ledger.told("t", 6.0) == []
    assert ledger.transfers["t"].state is SourceState.RELEASED


def test_blocks_go_back_at_once_when_vllm_finished_before_the_last_acknowledgement() -> None:
    ledger = pushing(1)
    assert ledger.finished("t", "req", 3.0) == []
    ledger.all_submitted("t", 3.0)
    assert ledger.write_ok("t", 4.0) == [SendPushed("t", D), FreeBlocks("t", "req", "")]


def test_an_aborted_push_frees_and_says_drained_only_after_its_writes() -> None:
    ledger = pushing(2)
    ledger.finished("t", "req", 2.5)
    answer, actions = ledger.handle(Abort(transfer_id="t", epoch="p1", sender=D, reason="cancelled"), 3.0)
    assert (answer.verdict, answer.drained) == (Verdict.OK, False)
    assert actions == [StopSubmitting("t")]
    assert not ledger.submit("t", 3.0)
    assert ledger.write_ok("t", 4.0) == []
    assert ledger.write_ok("t", 5.0) == [
        FreeBlocks("t", "req", "cancelled"),
        SendAbort("t", D, True, "cancelled"),
    ]
    answer, _ = ledger.handle(Abort(transfer_id="t", epoch="p1", sender=D, reason="cancelled"), 6.0)
    assert answer.drained


def test_after_an_errored_write_only_closing_the_session_frees() -> None:
    ledger = pushing(2)
    ledger.finished("t", "req", 2.5)
    actions = ledger.write_failed("t", "timed out", 3.0, quiesced=False)
    assert CloseSession("t") in actions and frees(actions) == 0
    assert frees(ledger.write_ok("t", 4.0)) == 0
    assert ledger.tick(14.0) == [DemandRestart("t", "timed out")]
    assert ledger.session_closed(15.0) == [
        FreeBlocks("t", "req", "timed out"),
        SendAbort("t", D, False, "timed out"),
    ]


def test_a_closed_session_is_no_promise_that_nothing_arrives_any_more() -> None:
    """What the kernel had taken is still delivered: only D's own fence ends that."""
    ledger = pushing(1)
    ledger.finished("t", "req", 2.5)
    ledger.write_failed("t", "timed out", 3.0, quiesced=False)
    ledger.session_closed(4.0)
    answer, actions = ledger.handle(Abort(transfer_id="t", epoch="p1", sender=D, reason="timed out"), 5.0)
    assert not answer.drained
    assert SendAbort("t", D, True, "timed out") not in actions


def test_an_unsubmitted_write_needs_no_closing() -> None:
    ledger = pushing(1)
    ledger.finished("t", "req", 2.5)
    actions = ledger.write_failed("t", "no such peer", 3.0, quiesced=True)
    assert frees(actions) == 1
    assert SendAbort("t", D, True, "no such peer") in actions
    assert not any(isinstance(action, CloseSession) for action in actions)


def test_a_clean_failure_waits_for_the_writes_beside_it() -> None:
    ledger = pushing(3)
    ledger.finished("t", "req", 2.5)
    assert frees(ledger.write_failed("t", "x", 3.0, quiesced=True)) == 0
    assert frees(ledger.write_failed("t", "x", 3.0, quiesced=True)) == 0
    assert frees(ledger.write_ok("t", 4.0)) == 1


def test_preemption_stops_submitting_and_resumes_with_a_new_plan() -> None:
    ledger = pushing(1)
    assert ledger.preempted("t", 3.0) == [StopSubmitting("t")]
    assert not ledger.submit("t", 3.0)
    assert ledger.write_ok("t", 3.1) == []
    assert ledger.resumed("t", 4.0) == [Replan("t")]
    assert ledger.submit("t", 4.1)


def test_preemption_that_does_not_drain_closes_the_session() -> None:
    ledger = pushing(1)
    ledger.preempted("t", 3.0)
    assert CloseSession("t") in ledger.drain_overdue("t", 4.0)


def test_a_request_preempted_before_the_grant_writes_only_after_it_resumed() -> None:
    ledger = SourceLedger("p1", LIMITS)
    ledger.begin("t", "req", 0.0, sink=D)
    ledger.preempted("t", 1.0)
    ledger.granted("t", D, 2.0)
    assert not ledger.submit("t", 2.1)
    assert ledger.resumed("t", 3.0) == [Replan("t")]
    assert ledger.submit("t", 3.1)


def test_a_denied_claim_gives_the_blocks_back() -> None:
    ledger = SourceLedger("p1", LIMITS)
    ledger.begin("t", "req", 0.0, sink=D)
    assert ledger.finished("t", "req", 1.0) == []
    assert frees(ledger.denied("t", "claimed by other", 2.0)) == 1


def test_an_unreserved_prefill_is_dropped_and_frees() -> None:
    ledger = SourceLedger("p1", LIMITS)
    ledger.begin("t", "req", 0.0)
    ledger.finished("t", "req", 1.0)
    assert ledger.cancel("t", "too many unreserved prefills", 2.0) == [
        FreeBlocks("t", "req", "too many unreserved prefills")
    ]


def test_a_deferral_is_paid_back_even_when_the_transfer_was_forgotten() -> None:
    ledger = SourceLedger("p1", LIMITS)
    assert frees(ledger.finished("t", "req", 1.0)) == 1
    assert frees(ledger.finished("t", "req", 2.0)) == 0
