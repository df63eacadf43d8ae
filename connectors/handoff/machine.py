"""What the two transition tables are made of: cells, and the check that none is missing.

Three rules. Everything that changes a transfer's state is a cell of `SOURCE` or `SINK`. A cell is allowed (the
state may change, actions follow), ignored (a repeat or a late echo: acknowledged, nothing changes) or refused
(nothing changes, and whoever asked is told no). No table has a default: each event names every state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from typing import Generic, NamedTuple, TypeVar

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)
Effect = TypeVar("Effect", bound=StrEnum)


class Kind(Enum):
    """How a cell was decided."""

    ALLOWED = "allowed"
    IGNORED = "ignored"
    REFUSED = "refused"


class Cell(NamedTuple, Generic[State, Effect]):
    """What one event does in one state; `next` is None when the state stays."""

    kind: Kind
    next: State | None
    effects: tuple[Effect, ...]


Row = Mapping[State, Cell[State, Effect]]
Table = Mapping[Event, Row[State, Effect]]


def to(state: State, *effects: Effect) -> Cell[State, Effect]:
    """Allowed: go to `state`, then do `effects` in order."""
    return Cell(Kind.ALLOWED, state, effects)


def stay(*effects: Effect) -> Cell[State, Effect]:
    """Allowed without a change of state."""
    return Cell(Kind.ALLOWED, None, effects)


def ignored(*states: State) -> dict[State, Cell[State, Effect]]:
    """A repeat, or news that changes nothing: answered as if it had just been done."""
    return {state: Cell(Kind.IGNORED, None, ()) for state in states}


def refused(*states: State) -> dict[State, Cell[State, Effect]]:
    """Not granted; the machine is left as it was."""
    return {state: Cell(Kind.REFUSED, None, ()) for state in states}


def undecided(table: Table[Event, State, Effect], states: Iterable[State], events: Iterable[Event]) -> list[str]:
    """The `event in state` cells nobody decided; a table in use has none."""
    every_state = list(states)
    return [
        f"{event} in {state}" for event in events for state in every_state if state not in table.get(event, {})
    ]
