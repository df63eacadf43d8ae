"""Both tables decide every cell, and nothing but a decided cell."""

from __future__ import annotations

import pytest

from connectors.handoff.machine import Kind, undecided
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkEvent, SinkState
from connectors.handoff.source_table import SOURCE, SOURCE_FINAL, SourceEvent, SourceState

MACHINES = {
    "source": (SOURCE, SourceState, SourceEvent, SOURCE_FINAL),
    "sink": (SINK, SinkState, SinkEvent, SINK_FINAL),
}
machine = pytest.mark.parametrize("name", MACHINES)


@machine
def test_every_cell_is_decided(name: str) -> None:
    table, states, events, _ = MACHINES[name]
    assert undecided(table, states, events) == []
    assert set(table) == set(events)
    for row in table.values():
        assert set(row) == set(states)


@machine
def test_a_new_state_leaves_undecided_cells_in_every_row(name: str) -> None:
    table, states, events, _ = MACHINES[name]
    assert len(undecided(table, [*states, "another"], events)) == len(list(events))


@machine
def test_a_new_event_leaves_a_whole_undecided_row(name: str) -> None:
    table, states, events, _ = MACHINES[name]
    assert len(undecided(table, states, [*events, "another"])) == len(list(states))


@machine
def test_only_allowed_cells_do_something(name: str) -> None:
    for event, row in MACHINES[name][0].items():
        for state, cell in row.items():
            if cell.kind is not Kind.ALLOWED:
                assert cell.next is None and cell.effects == (), f"{event} in {state}"


@machine
def test_every_state_but_unknown_answers_its_deadline(name: str) -> None:
    """No state can wait for ever: time moves it on, or repeats the call for help."""
    table, states, _, _ = MACHINES[name]
    row = next(row for event, row in table.items() if event == "deadline")
    for state in states:
        cell = row[state]
        assert state == "unknown" or (cell.kind is Kind.ALLOWED and (cell.next or cell.effects)), state


@machine
def test_final_states_are_only_left_to_be_forgotten_or_ended(name: str) -> None:
    table, _, _, final = MACHINES[name]
    for event, row in table.items():
        for state in final:
            after = row[state].next
            assert after is None or after in final or event in {"deadline", "begin"}, f"{event} in {state}"
