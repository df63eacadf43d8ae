"""Faults happen as planned, and only then."""

from __future__ import annotations

import pytest

from ascend_pd.errors import OperatorError
from ascend_pd.wire.messages import Reply
from connectors.handoff.faults import NO_FAULT, REPLY_TAGS, FaultInjector, FaultPlan, parse_faults


def test_nothing_happens_without_a_plan() -> None:
    injector = FaultInjector(parse_faults(""))
    assert not parse_faults("")
    assert injector.on_send("done") == (0.0,)
    assert injector.on_transfer() == NO_FAULT
    assert injector.lease_s(30.0) == 30.0
    assert injector.counts() == {}


def test_the_first_messages_of_a_kind_are_lost_repeated_and_late() -> None:
    injector = FaultInjector(parse_faults("drop:done:2, repeat:claim:1,delay:pushed:0.5:1"))
    assert [injector.on_send("done") for _ in range(3)] == [(), (), (0.0,)]
    assert [len(injector.on_send("claim")) for _ in range(2)] == [2, 1]
    assert [injector.on_send("pushed") for _ in range(2)] == [(0.5,), (0.0,)]
    assert injector.on_send("renew") == (0.0,)
    assert injector.counts() == {"drop:done": 2, "repeat:claim": 1, "delay:pushed": 1}


def test_without_a_count_every_message_is_hit() -> None:
    injector = FaultInjector(parse_faults("drop:done.reply"))
    assert not any(injector.on_send("done.reply") for _ in range(1000))


def test_replies_are_named_by_their_own_type_or_by_the_request() -> None:
    injector = FaultInjector(parse_faults("drop:answer:1,drop:done.reply:1,drop:story"))
    assert [injector.on_send("renew.reply") for _ in range(2)] == [(), (0.0,)]
    assert [injector.on_send("done.reply") for _ in range(2)] == [(), (0.0,)]
    assert injector.on_send("hello.reply") == (0.0,)
    assert injector.on_send("ask.reply") == ()


def test_every_reply_has_its_name() -> None:
    tags = {kind.__struct_config__.tag for kind in Reply.__args__}
    assert tags == {"answer", *REPLY_TAGS.values()}


def test_the_named_transfers_fail_stall_and_corrupt() -> None:
    injector = FaultInjector(parse_faults("fail-transfer:2,corrupt-byte:3,stall:1.5:1"))
    faults = [injector.on_transfer() for _ in range(4)]
    assert [fault.stall_s for fault in faults] == [1.5, 0.0, 0.0, 0.0]
    assert [fault.fail for fault in faults] == [False, True, False, False]
    assert [fault.corrupt for fault in faults] == [False, False, True, False]


def test_a_lease_can_be_made_short() -> None:
    assert FaultInjector(parse_faults("lease:0.2")).lease_s(30.0) == 0.2


@pytest.mark.parametrize(
    "text",
    [
        "loose:done",
        "drop",
        "drop:dne",
        "drop:done:x",
        "delay:done",
        "fail-transfer:x",
        "lease:1:2",
        "stall:",
    ],
)
def test_a_plan_that_cannot_be_understood_is_refused_by_name(text: str) -> None:
    with pytest.raises(OperatorError, match=text.split(":")[0]):
        parse_faults(text)


def test_plans_compare_by_what_they_do() -> None:
    assert parse_faults("lease:1") == FaultPlan(lease_s=1.0)
