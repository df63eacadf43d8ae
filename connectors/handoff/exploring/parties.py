"""The real ledgers with one transfer in them, put into a state, driven one step, and read out again.

A snapshot is a small number that stands for the transfer's record and whether its deadline is armed. Reasons and
times are left out: they decide nothing.
"""

from __future__ import annotations

from math import inf
from typing import Any, Generic, Literal, TypeVar

from msgspec.structs import replace

from ascend_pd.wire.identity import EngineRef
from connectors.handoff.sink import SinkLedger, SinkLimits
from connectors.handoff.sink_record import SinkTransfer
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkTable
from connectors.handoff.source import SourceLedger
from connectors.handoff.source_record import SourceTransfer
from connectors.handoff.source_table import SOURCE, SOURCE_FINAL, SourceTable
from connectors.handoff.timers import Timers

T = "t"
"""The transfer id of every model."""
NOW = 0.0

Record = TypeVar("Record", SourceTransfer, SinkTransfer)


class HandTimer(Timers):
    """A timer that goes off when the model says so."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def is_set(self, key: str) -> bool:
        return self.armed

    def set(self, key: str, deadline: float) -> None:
        self.armed = deadline != inf

    def take(self, now: float) -> list[str]:
        self.armed = False
        return [T]


class Snapshots(Generic[Record]):
    """Numbers for (record, deadline armed); 0 is a ledger that knows nothing."""

    def __init__(self, unknown: Record) -> None:
        self._entries: list[tuple[Record, bool]] = [(unknown, False)]
        self._numbers: dict[tuple[Record, bool], int] = {self._entries[0]: 0}

    def number(self, record: Record, armed: bool) -> int:
        key = (replace(record, reason="") if record.reason else record, armed)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._entries)
            self._entries.append(key)
        return number

    def entry(self, number: int) -> tuple[Record, bool]:
        return self._entries[number]


class Call:
    """One way to drive a ledger: a method and its arguments. Compared by identity, so made once per model."""

    __slots__ = ("arguments", "keywords", "method")

    def __init__(self, method: str, *arguments: object, **keywords: object) -> None:
        self.method, self.arguments, self.keywords = method, arguments, keywords


TICK = Call("tick", NOW)


class Party(Generic[Record]):
    """A ledger with at most one transfer in it. Driving is remembered: same snapshot and call, same outcome."""

    def __init__(self, engine: EngineRef, unknown: Record, final: frozenset[str]) -> None:
        self.engine = engine
        self.timer = HandTimer()
        self._final = final
        self._snapshots: Snapshots[Record] = Snapshots(unknown)
        self._driven: dict[tuple[int, Call], tuple[int, Any]] = {}

    def drive(self, number: int, call: Call) -> tuple[int, Any]:
        """The snapshot after `call`, and what the ledger returned."""
        key = (number, call)
        driven = self._driven.get(key)
        if driven is None:
            ledger = self._ledger()
            record, self.timer.armed = self._snapshots.entry(number)
            ledger.transfers.clear()
            ledger._live_ids.clear()
            if number:
                ledger.transfers[T] = record
                if record.state not in self._final:
                    ledger._live_ids[T] = None
            returned = getattr(ledger, call.method)(*call.arguments, **call.keywords)
            after = ledger.transfers.get(T)
            driven = (0 if after is None else self._snapshots.number(after, self.timer.armed), returned)
            self._driven[key] = driven
        return driven

    def _ledger(self) -> Any:
        raise NotImplementedError

    def record(self, number: int) -> Record:
        return self._snapshots.entry(number)[0]

    def lacks_deadline(self, number: int) -> bool:
        """Invariant 4."""
        record, armed = self._snapshots.entry(number)
        return bool(number) and not armed and record.state not in self._final


class SourceParty(Party[SourceTransfer]):
    """P."""

    def __init__(self, engine: EngineRef, table: SourceTable = SOURCE) -> None:
        super().__init__(engine, SourceTransfer(T), SOURCE_FINAL)
        self._source = SourceLedger(engine.epoch, table=table, timers=self.timer)

    def _ledger(self) -> SourceLedger:
        return self._source


class SinkParty(Party[SinkTransfer]):
    """D."""

    def __init__(
        self,
        engine: EngineRef,
        mode: Literal["pull", "layerwise"],
        *,
        answer_early: bool,
        table: SinkTable = SINK,
    ) -> None:
        super().__init__(engine, SinkTransfer(T), SINK_FINAL)
        limits = SinkLimits(answer_early=answer_early)
        self._sink = SinkLedger(engine.epoch, mode, limits, table=table, timers=self.timer)

    def _ledger(self) -> SinkLedger:
        return self._sink
