"""What P remembers of one transfer, and which event a Done is."""

from __future__ import annotations

from math import inf

from msgspec import Struct
from msgspec.structs import replace

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Done
from connectors.handoff.source_table import SourceEvent, SourceState

S, E = SourceState, SourceEvent


class SourceTransfer(Struct, frozen=True, gc=False):
    """One transfer on P. `sink` is whom the claim was made to, `reader` whom the first Done fixed."""

    transfer_id: str
    state: SourceState = S.UNKNOWN
    owner: str = ""
    deferred: bool = False
    freed: bool = False
    sink: EngineRef | None = None
    reader: EngineRef | None = None
    reader_ranks: int = 0
    accepted: tuple[tuple[int, str], ...] = ()
    all_submitted: bool = False
    reason: str = ""
    hold_until: float = inf
    dirty: bool = False
    """A write was given up by closing the session: what had been sent may still arrive, so D must fence."""
    inflight: int = 0


def classify_done(record: SourceTransfer, done: Done) -> tuple[SourceTransfer, SourceEvent]:
    """Which event a Done is; the record it comes with has this read accepted (dropped again if refused)."""
    if record.reader is not None and (record.reader != done.sink or record.reader_ranks != done.sink_ranks):
        return record, E.DONE_OTHER
    accepted = dict(record.accepted)
    known = accepted.get(done.sink_rank)
    if known is not None:
        return record, E.DONE_AGAIN if known == done.read_id else E.DONE_OTHER
    if not 0 <= done.sink_rank < done.sink_ranks:
        return record, E.DONE_OTHER
    taken = replace(
        record,
        reader=done.sink,
        reader_ranks=done.sink_ranks,
        accepted=(*record.accepted, (done.sink_rank, done.read_id)),
    )
    return taken, E.DONE_LAST if len(taken.accepted) == done.sink_ranks else E.DONE_PART
