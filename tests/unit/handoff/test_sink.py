"""D's ledger: what is decoded, when blocks are safe, and that vLLM hears exactly once."""

from __future__ import annotations

import pytest

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Claim, Pushed, Release, Story, Verdict
from connectors.handoff.actions import (
    AnswerEarly,
    DemandRestart,
    Fence,
    Outcome,
    ReportFinished,
    ReportOverdue,
    SendAbort,
    SendDone,
)
from connectors.handoff.sink import SinkLedger, SinkLimits
from connectors.handoff.sink_table import SinkState

P = EngineRef("p", "e1")
P_REBORN = EngineRef("p", "e2")
OTHER = EngineRef("p2", "e1")
EARLY = SinkLimits(transfer_s=60, quarantine_s=10, answer_early=True, tombstone_s=100, max_tombstones=3)
LATE = SinkLimits(transfer_s=60, quarantine_s=10, tombstone_s=100, max_tombstones=3)


def reports(actions: list) -> list[Outcome]:
    return [action.outcome for action in actions if isinstance(action, ReportFinished)]


def pull(reads: int = 1, limits: SinkLimits = LATE) -> SinkLedger:
    ledger = SinkLedger("d1", "pull", limits)
    assert ledger.begin("t", "req", 0.0, source=P) == (True, [])
    if reads:
        assert ledger.start_reads("t", "r0", reads, 1.0)
    return ledger


# --- pull -----------------------------------------------------------------------------------------------------


def test_the_request_decodes_only_after_p_vouched_for_the_finished_reads() -> None:
    ledger = pull(2)
    assert ledger.read_ok("t", 2.0) == []
    assert ledger.vouched("t", "r0", 2.0) == []
    assert ledger.read_ok("t", 3.0, bytes_read=5) == [SendDone("t", P, "r0")]
    assert ledger.vouched("t", "r0", 4.0) == [ReportFinished("t", "req", Outcome.RECEIVED, "")]
    assert ledger.vouched("t", "r0", 5.0) == []


def test_an_ok_for_another_read_does_not_count() -> None:
    ledger = pull(1)
    ledger.read_ok("t", 2.0)
    assert ledger.vouched("t", "r9", 3.0) == []
    assert ledger.transfers["t"].state is SinkState.RECEIVED


def test_disowned_bytes_are_thrown_away_at_once() -> None:
    ledger = pull(1)
    ledger.read_ok("t", 2.0)
    assert ledger.disowned("t", "r0", "lease expired", 3.0) == [
        ReportFinished("t", "req", Outcome.FAILED, "lease expired")
    ]
    assert ledger.vouched("t", "r0", 4.0) == []


def test_without_an_answer_by_the_deadline_the_bytes_are_thrown_away() -> None:
    ledger = pull(1)
    ledger.read_ok("t", 2.0)
    assert ledger.next_deadline() == 60.0
    assert reports(ledger.tick(60.0)) == [Outcome.FAILED]


def test_after_a_read_error_only_the_fence_frees_the_blocks() -> None:
    ledger = pull(2)
    actions = ledger.read_failed("t", "timed out", 2.0, quiesced=False)
    assert Fence("t") in actions and reports(actions) == []
    assert ledger.read_ok("t", 3.0) == []
    assert ledger.tick(12.0) == [DemandRestart("t", "timed out")]
    assert ledger.tick(22.0) == [DemandRestart("t", "timed out")]
    assert reports(ledger.fenced(ledger.fence_begins(), 23.0)) == [Outcome.FAILED]
    assert ledger.fenced(ledger.fence_begins(), 24.0) == []


def test_a_read_that_was_never_submitted_needs_no_fence() -> None:
    ledger = pull(1)
    actions = ledger.read_failed("t", "no such peer", 2.0, quiesced=True)
    assert reports(actions) == [Outcome.FAILED]
    assert SendAbort("t", P, True, "no such peer") in actions


def test_an_unsubmitted_read_waits_for_the_reads_beside_it() -> None:
    ledger = pull(2)
    assert reports(ledger.read_failed("t", "no such peer", 2.0, quiesced=True)) == []
    assert reports(ledger.read_ok("t", 3.0)) == [Outcome.FAILED]


def test_a_cancel_while_reading_waits_for_the_reads_and_is_no_failure() -> None:
    ledger = pull(1, EARLY)
    assert ledger.cancel("t", 2.0) == [SendAbort("t", P, False, "cancelled")]
    assert ledger.read_ok("t", 3.0) == [ReportFinished("t", "req", Outcome.CANCELLED, "cancelled")]


def test_a_read_that_outlives_the_quarantine_is_fenced() -> None:
    ledger = pull(1)
    ledger.cancel("t", 2.0)
    assert ledger.tick(12.0) == [Fence("t")]
    assert reports(ledger.fenced(ledger.fence_begins(), 13.0)) == [Outcome.CANCELLED]
    assert ledger.read_ok("t", 14.0) == []


def test_the_early_answer_comes_first_and_vllm_hears_of_the_end_only_once() -> None:
    ledger = pull(1, EARLY)
    actions = ledger.read_failed("t", "timed out", 2.0, quiesced=False)
    assert AnswerEarly("t", "timed out") in actions
    assert ledger.cancel("t", 2.5) == []
    assert reports(ledger.fenced(ledger.fence_begins(), 3.0)) == [Outcome.FAILED_ANSWERED]


def test_policy_recompute_never_answers_early() -> None:
    actions = pull(1, LATE).read_failed("t", "timed out", 2.0, quiesced=False)
    assert not any(isinstance(action, AnswerEarly) for action in actions)


def test_p_cannot_say_that_ds_own_reads_are_over() -> None:
    ledger = pull(1)
    _, actions = ledger.handle(Abort(transfer_id="t", epoch="d1", sender=P, drained=True, reason="x"), 2.0)
    assert reports(actions) == []
    assert ledger.transfers["t"].state is SinkState.FAILING


def test_a_fence_spares_what_started_after_it_began() -> None:
    ledger = pull(1)
    ledger.read_failed("t", "timed out", 2.0, quiesced=False)
    generation = ledger.fence_begins()
    ledger.begin("new", "req2", 3.0, source=P)
    ledger.start_reads("new", "r1", 1, 3.0)
    assert [action.transfer_id for action in ledger.fenced(generation, 4.0)] == ["t"]
    assert ledger.transfers["new"].state is SinkState.RECEIVING


def test_an_untaken_report_wakes_the_engine_and_is_not_repeated() -> None:
    ledger = pull(0)
    assert reports(ledger.cancel("t", 1.0)) == [Outcome.CANCELLED]
    assert ledger.tick(11.0) == [ReportOverdue("t")]
    assert ledger.reported("t", 12.0) == []
    assert ledger.transfers["t"].state is SinkState.RELEASED


def test_a_second_request_under_the_same_transfer_id_is_refused() -> None:
    ledger = pull(1)
    assert ledger.begin("t", "sibling", 2.0, source=P) == (False, [])
    assert ledger.refusals == 1
    ledger.read_ok("t", 3.0)
    assert reports(ledger.vouched("t", "r0", 4.0)) == [Outcome.RECEIVED]
    assert ledger.begin("t", "again", 5.0, source=P) == (False, [])


# --- layer-wise -----------------------------------------------------------------------------------------------


def claim(source: EngineRef = P, ranks: int = 1, prompt: str = "h", epoch: str = "d1") -> Claim:
    return Claim(transfer_id="t", sink_epoch=epoch, source=source, source_ranks=ranks, prompt_hash=prompt)


def pushed(source: EngineRef = P, rank: int = 0, tokens: int = 7, dirty: bool = False) -> Pushed:
    return Pushed(
        transfer_id="t",
        sink_epoch="d1",
        source=source,
        source_rank=rank,
        num_tokens=tokens,
        bytes_sent=10,
        dirty=dirty,
    )


def abort(source: EngineRef = P, rank: int = 0, drained: bool = False) -> Abort:
    return Abort(transfer_id="t", epoch="d1", sender=source, rank=rank, drained=drained, reason="p gave up")


def reserved(limits: SinkLimits = LATE) -> SinkLedger:
    ledger = SinkLedger("d1", "layerwise", limits)
    assert ledger.begin("t", "req", 0.0, prompt_hash="h", num_tokens=7) == (True, [])
    return ledger


def verdict(ledger: SinkLedger, message: Claim | Pushed | Release | Abort, now: float = 2.0) -> Verdict:
    answer, _ = ledger.handle(message, now)
    assert not isinstance(answer, Story)
    return answer.verdict


def claimed(ranks: int = 1, limits: SinkLimits = LATE) -> SinkLedger:
    ledger = reserved(limits)
    assert verdict(ledger, claim(ranks=ranks)) is Verdict.OK
    return ledger


def test_exactly_one_claimant_is_granted() -> None:
    ledger = claimed()
    assert verdict(ledger, claim()) is Verdict.OK
    assert verdict(ledger, claim(OTHER)) is Verdict.REFUSED
    assert verdict(ledger, pushed(OTHER)) is Verdict.REFUSED
    assert verdict(ledger, abort(OTHER, drained=True)) is Verdict.REFUSED
    assert reports(ledger.handle(pushed(), 3.0)[1]) == [Outcome.RECEIVED]


def test_every_source_rank_must_have_pushed() -> None:
    ledger = claimed(ranks=2)
    assert ledger.handle(pushed(rank=0), 3.0)[1] == []
    assert ledger.handle(pushed(rank=0), 3.1)[1] == []
    assert verdict(ledger, pushed(rank=2)) is Verdict.REFUSED
    assert reports(ledger.handle(pushed(rank=1), 4.0)[1]) == [Outcome.RECEIVED]
    answer, actions = ledger.handle(pushed(rank=1), 5.0)
    assert (answer.verdict, actions) == (Verdict.OK, [])


def test_an_unclaimed_reservation_ends_at_once_and_refuses_later_claims() -> None:
    ledger = reserved()
    _, actions = ledger.handle(Release(transfer_id="t", reason="no prefill"), 1.0)
    assert reports(actions) == [Outcome.FAILED]
    assert verdict(ledger, claim()) is Verdict.GONE


def test_a_claim_with_another_prompt_fails_the_request_with_the_reason() -> None:
    ledger = reserved()
    answer, actions = ledger.handle(claim(prompt="other"), 1.0)
    assert answer.verdict is Verdict.REFUSED
    assert "token ids" in answer.reason
    assert reports(actions) == [Outcome.FAILED]


def test_a_dirty_push_fails_and_waits_for_the_drain() -> None:
    ledger = claimed(limits=EARLY)
    _, actions = ledger.handle(pushed(dirty=True), 3.0)
    assert [type(action) for action in actions] == [SendAbort, AnswerEarly]
    assert reports(ledger.abort_answered("t", 0, True, 4.0)) == [Outcome.FAILED_ANSWERED]


def test_a_short_push_is_never_decoded() -> None:
    ledger = claimed()
    _, actions = ledger.handle(pushed(tokens=6), 3.0)
    assert reports(actions) == []
    assert ledger.transfers["t"].reason == "prefill pushed 6 tokens of 7"


def test_a_failed_receive_waits_for_every_rank_to_drain() -> None:
    ledger = claimed(ranks=3)
    ledger.handle(pushed(rank=2), 3.0)
    assert reports(ledger.handle(abort(rank=0, drained=True), 4.0)[1]) == []
    assert ledger.abort_answered("t", 1, False, 4.5) == []
    assert reports(ledger.handle(abort(rank=0, drained=True), 4.6)[1]) == []
    assert reports(ledger.handle(abort(rank=1, drained=True), 5.0)[1]) == [Outcome.FAILED]


def test_a_silent_grantee_is_fenced_after_the_quarantine() -> None:
    ledger = claimed()
    assert ledger.tick(60.0) == [SendAbort("t", P, True, "deadline passed while receiving")]
    assert verdict(ledger, pushed(), 61.0) is Verdict.GONE
    assert ledger.tick(70.0) == [Fence("t")]
    assert reports(ledger.fenced(ledger.fence_begins(), 71.0)) == [Outcome.FAILED]


@pytest.mark.parametrize("message", [claim(P_REBORN), abort(P_REBORN, drained=True)], ids=["claim", "abort"])
def test_a_reborn_grantee_cannot_speak_for_its_former_life(message: Claim | Abort) -> None:
    ledger = claimed()
    answer, actions = ledger.handle(message, 3.0)
    assert answer.verdict is Verdict.REFUSED
    assert Fence("t") in actions and reports(actions) == []


def test_a_push_of_a_reborn_grantee_is_refused() -> None:
    assert verdict(claimed(), pushed(P_REBORN)) is Verdict.REFUSED


def test_an_abort_before_the_reservation_ends_it_when_it_comes() -> None:
    ledger = SinkLedger("d1", "layerwise", LATE)
    assert verdict(ledger, abort()) is Verdict.OK
    begun, actions = ledger.begin("t", "req", 3.0)
    assert begun
    assert actions == [ReportFinished("t", "req", Outcome.FAILED, "p gave up")]


def test_messages_to_another_epoch_are_refused() -> None:
    ledger = reserved()
    assert verdict(ledger, claim(epoch="d0")) is Verdict.EPOCH
    assert ledger.transfers["t"].state is SinkState.RESERVED


def test_tombstones_are_bounded_in_number_and_time() -> None:
    ledger = SinkLedger("d1", "layerwise", LATE)
    for i in range(10):
        ledger.handle(Release(transfer_id=f"t{i}", reason="x"), float(i))
    assert len(ledger.transfers) == 3
    ledger.tick(500.0)
    assert ledger.transfers == {}
