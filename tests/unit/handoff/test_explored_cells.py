"""The explorer visits the tables: an allowed cell that no model reaches is named here with the reason."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from connectors.handoff.exploring.pull import PullModel
from connectors.handoff.exploring.pull_world import PULL_FAULTS
from connectors.handoff.exploring.push import PushModel
from connectors.handoff.exploring.search import Model, TooManyStatesError, search
from connectors.handoff.exploring.world import EVERY_FAULT, FAILING_OPERATIONS, NO_FAULT, Budget, Fault
from connectors.handoff.machine import Kind
from connectors.handoff.sink_table import SINK
from connectors.handoff.source_table import SOURCE

UNREACHED = {
    "source": {
        ("hold", "parked"): "pull: P's connector is not told of preemptions",
        ("renew", "parked"): "likewise",
        ("drain_overdue", "pushing"): "the drain is only bounded after a preemption; a late call must be safe",
        ("cancel", "held"): "the capacity model drops unreserved prefills",
    },
    "sink": {
        ("read", "receiving"): "the models submit all reads of a rank at once",
        ("read_unsent", "reserved"): "a read fails before it counts as started: the unit tests have it",
        ("peer_abort", "reserved"): "a P without a claim has nothing in flight and says so",
        ("release", "received"): "pull: the proxy gives up D's leg by closing its request",
    },
}


class Watched(dict[Any, Any]):
    """One row of a table that remembers which states were looked up."""

    def __init__(self, event: str, row: Mapping[Any, Any], seen: set[tuple[str, str]]) -> None:
        super().__init__(row)
        self._event, self._seen = event, seen

    def __getitem__(self, state: Any) -> Any:
        self._seen.add((str(self._event), str(state)))
        return super().__getitem__(state)


def models(tables: dict[str, Any]) -> Iterator[Model[Any]]:
    yield PullModel(budget=Budget(PULL_FAULTS, 1), **tables)
    yield PullModel(ranks=2, budget=Budget(NO_FAULT, 0, free=NO_FAULT), **tables)
    yield PushModel(budget=Budget(EVERY_FAULT, 1), **tables)
    yield PushModel(writers=("P", "P"), budget=Budget(Fault.CRASH_P, 1, free=NO_FAULT), **tables)
    for second in (Fault.CANCEL_P, Fault.RELEASE, Fault.OTHER_CLOSE):
        yield PushModel(writes=2, budget=Budget(Fault.PREEMPT | second, 2, free=NO_FAULT), **tables)
    yield PushModel(budget=Budget(Fault.RELEASE | Fault.FORGET, 2, free=FAILING_OPERATIONS), **tables)
    yield PushModel(ranks=2, budget=Budget(NO_FAULT, 0, free=NO_FAULT), **tables)


def test_every_allowed_cell_is_reached_or_named() -> None:
    seen: dict[str, set[tuple[str, str]]] = {"source": set(), "sink": set()}
    tables = {
        "source_table": {event: Watched(event, row, seen["source"]) for event, row in SOURCE.items()},
        "sink_table": {event: Watched(event, row, seen["sink"]) for event, row in SINK.items()},
    }
    for model in models(tables):
        with contextlib.suppress(TooManyStatesError):
            search(model, max_states=8_000)
    for name, table in (("source", SOURCE), ("sink", SINK)):
        allowed = {
            (str(event), str(state))
            for event, row in table.items()
            for state, cell in row.items()
            if cell.kind is Kind.ALLOWED
        }
        assert allowed - seen[name] == set(UNREACHED[name])
