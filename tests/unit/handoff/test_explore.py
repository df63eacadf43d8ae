"""The life cycle, explored: no rule is broken, and every broken cell is found out with a readable way to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from connectors.handoff.explore import STANDARD, main
from connectors.handoff.exploring.capacity import CapacityModel
from connectors.handoff.exploring.pull import PullModel
from connectors.handoff.exploring.pull_world import PULL_FAULTS
from connectors.handoff.exploring.push import PushModel
from connectors.handoff.exploring.search import Model, TooManyStatesError, search
from connectors.handoff.exploring.world import EVERY_FAULT, NO_FAULT, Budget, Fault
from connectors.handoff.machine import Cell, stay, to
from connectors.handoff.sink_table import SINK, SinkEffect, SinkEvent, SinkState
from connectors.handoff.source_table import SOURCE, SourceEffect, SourceEvent, SourceState

P, PE, PF = SourceState, SourceEvent, SourceEffect
D, DE, DF = SinkState, SinkEvent, SinkEffect
CALM = Budget(NO_FAULT, 0, free=NO_FAULT)
FAILING = Budget(NO_FAULT, 0)
"""Operations may fail; nothing else goes wrong."""


@pytest.mark.parametrize("make", STANDARD, ids=lambda make: make().name)
def test_no_rule_is_broken_and_an_end_stays_in_reach(make: Callable[[], Model[Any]]) -> None:
    result = search(make())
    assert not result.violation, str(result)
    assert result.states > 3000, "the model has lost most of its world"


class Broken(NamedTuple):
    """One cell changed, and the rule that the checker must see broken."""

    name: str
    rule: str
    make: Callable[[], Model[Any]]


def source(event: SourceEvent, state: SourceState, cell: Cell[Any, Any]) -> dict[str, Any]:
    return {"source_table": {**SOURCE, event: {**SOURCE[event], state: cell}}}


def sink(event: SinkEvent, state: SinkState, cell: Cell[Any, Any]) -> dict[str, Any]:
    return {"sink_table": {**SINK, event: {**SINK[event], state: cell}}}


def pull(broken: dict[str, Any], budget: Budget = FAILING, **shape: Any) -> Callable[[], Model[Any]]:
    return lambda: PullModel(budget=budget, **shape, **broken)


def push(broken: dict[str, Any], budget: Budget = FAILING, **shape: Any) -> Callable[[], Model[Any]]:
    return lambda: PushModel(budget=budget, **shape, **broken)


def one(fault: int) -> Budget:
    return Budget(fault, 1)


BROKEN = [
    # 1: P's blocks
    Broken("p vouches after the blocks went back", "(1)", pull(source(PE.DONE_LAST, P.RELEASED, stay()))),
    Broken(
        "p frees under its own write",
        "(1)",
        push(source(PE.DEADLINE, P.PUSHING, to(P.RELEASED, PF.SEND_ABORT, PF.FREE_BLOCKS))),
    ),
    Broken(
        "an errored write counts as ended",
        "(2)",
        push(source(PE.WRITE_ERROR, P.PUSHING, to(P.ABORTING, PF.SEND_ABORT))),
    ),
    # 2: D's blocks
    Broken(
        "d trusts the error of a read",
        "(2)",
        pull(sink(DE.READ_ERROR, D.RECEIVING, to(D.QUIESCED, DF.SEND_ABORT, DF.REPORT))),
    ),
    Broken("time alone quiesces a pull", "(2)", pull(sink(DE.DEADLINE, D.FAILING, to(D.QUIESCED, DF.REPORT)))),
    Broken("time alone quiesces a push", "(2)", push(sink(DE.DEADLINE, D.FAILING, to(D.QUIESCED, DF.REPORT)))),
    Broken("a given up reservation is granted", "(2)", push(sink(DE.CLAIM_FIRST, D.QUIESCED, stay()))),
    Broken(
        "two claimants are granted",
        "(2)",
        push(sink(DE.CLAIM_OTHER, D.RECEIVING, stay()), CALM, writers=("P", "Q")),
    ),
    Broken(
        "the next life of p speaks for its former one",
        "(2)",
        push(
            sink(DE.SOURCE_RESTARTED, D.RECEIVING, to(D.QUIESCED, DF.SEND_ABORT, DF.REPORT)),
            one(Fault.CRASH_P),
            writers=("P", "P"),
        ),
    ),
    # 3: what D decodes
    Broken("d does not ask p", "(3)", pull(sink(DE.READS_OK, D.RECEIVING, to(D.DECODING, DF.REPORT)))),
    Broken(
        "one rank of two is enough",
        "(3)",
        push(sink(DE.PUSHED_PART, D.RECEIVING, to(D.DECODING, DF.REPORT)), CALM, ranks=2),
    ),
    Broken(
        "a preempted request goes on writing",
        "(3)",
        push(source(PE.PREEMPTED, P.PUSHING, stay()), one(Fault.PREEMPT)),
    ),
    Broken(
        "a request preempted before the grant writes",
        "(3)",
        push(source(PE.PREEMPTED, P.PREPARING, stay()), one(Fault.PREEMPT)),
    ),
    # 4: deadlines
    Broken("the lease never expires", "no end", pull(source(PE.DEADLINE, P.HELD, stay()))),
    Broken("d waits for ever for p to write", "no end", push(sink(DE.DEADLINE, D.RECEIVING, stay()))),
    Broken("d waits for ever for an answer", "no end", pull(sink(DE.DEADLINE, D.RECEIVED, stay()))),
    # 5: ends, exactly once
    Broken("the fence is not reported", "no end", pull(sink(DE.FENCED, D.FENCING, to(D.QUIESCED)))),
    Broken("a late free is forgotten", "no end", push(source(PE.FINISHED, P.RELEASED, stay()))),
    Broken(
        "a release before the reservation is forgotten",
        "no end",
        push(sink(DE.BEGIN, D.REVOKED, to(D.RELEASED)), one(Fault.RELEASE)),
    ),
    Broken("two readers are vouched for", "(1)", pull(source(PE.DONE_OTHER, P.CONFIRMED, stay()))),
    Broken(
        "the failed block ids go out after the report",
        "(5)",
        pull(sink(DE.DEADLINE, D.QUIESCED, stay(DF.ANSWER_EARLY))),
    ),
    # 6: telling the other leg
    Broken(
        "d cancels in silence",
        "(6)",
        pull(sink(DE.CANCEL, D.RECEIVING, to(D.FAILING)), one(Fault.CANCEL_D)),
    ),
    Broken(
        "p cancels in silence",
        "(6)",
        push(source(PE.CANCEL, P.PUSHING, to(P.ABORTING, PF.STOP_SUBMITTING)), one(Fault.CANCEL_P)),
    ),
]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_cell_is_found_with_a_readable_way_to_it(broken: Broken) -> None:
    result = search(broken.make())
    assert broken.rule in result.violation, str(result)
    assert result.counterexample[0].strip().startswith("0. start")
    assert len(result.counterexample) > 1
    assert all("[P " in line for line in result.counterexample if line.strip()[0].isdigit())


def test_a_grant_must_be_bound_to_the_endpoints_looked_up_before_the_claim() -> None:
    assert "(2)" in search(PushModel(budget=CALM, late_lookup=True)).violation


def test_without_a_cap_two_full_engines_wait_for_each_other() -> None:
    result = search(CapacityModel(capped=False))
    assert "no end" in result.violation
    assert result.counterexample[-1].count("P preparing") == 2, "P is full of prefills nobody reserved"
    assert result.counterexample[-1].count("D reserved") == 2, "D is full of reservations nobody computes"


def test_a_counterexample_reads_as_a_sequence_of_steps() -> None:
    result = search(PullModel(budget=CALM, **sink(DE.DEADLINE, D.FAILING, to(D.QUIESCED, DF.REPORT))))
    steps = [line.split("[")[0].strip() for line in result.counterexample]
    assert steps == [
        "0. start",
        "1. P: vLLM takes the request",
        "2. P: finished, holds the blocks, hands off",
        "3. D: vLLM allocates blocks",
        "4. D0: reads",
        "5. D0: deadline while receiving",
        "-> D0: deadline while failing",
        "P held, blocks ours; D quiesced, blocks ours, reads flying",
    ]


def test_a_model_larger_than_allowed_is_refused_rather_than_cut() -> None:
    with pytest.raises(TooManyStatesError):
        search(PullModel(), max_states=100)


def test_the_command_prints_bounds_states_and_violations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.handoff.explore.STANDARD", (lambda: PullModel(budget=CALM),))
    assert main([]) == 0
    output = capsys.readouterr().out
    assert "bound: no fault" in output
    assert "0 violations" in output


def test_the_command_fails_on_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.handoff.explore.STANDARD", (BROKEN[0].make,))
    assert main([]) == 1
    assert "VIOLATION: (1)" in capsys.readouterr().out


def test_a_budget_says_what_may_happen() -> None:
    assert str(CALM) == "no fault"
    assert str(Budget(EVERY_FAULT, 2)).startswith("any number of: error, unsent; at most 2 of: crash p")
    assert str(Budget(PULL_FAULTS, 1, free=NO_FAULT)).count("preempt") == 0
