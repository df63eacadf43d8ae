"""The source machine (P): one literal table, event × state.

Pull: a transfer is PREPARING while P computes, HELD under a lease when it is done, CONFIRMED when every rank of
one decode engine has been vouched for. Layer-wise: PUSHING once D granted the claim (HELD when P finished before
that), CONFIRMED when every write is acknowledged. Preemption makes PREPARING to PARKED and PUSHING to PAUSED until
vLLM resumes the request in other blocks.

ABORTING waits for P's own writes; without any it is left in the same breath (`DRAINED`). CLOSING is ABORTING
after a write returned an error, or did not return in time: bytes may still leave P's blocks, and only closing
P's transport session ends that. REVOKED is a transfer that was given up before P heard of it. RELEASED and
REVOKED are tombstones.

`FREE_BLOCKS` happens exactly once per transfer whose free vLLM was asked to defer, however often a cell names it.
"""

from __future__ import annotations

from enum import StrEnum

from connectors.handoff.machine import Cell, Table, ignored, refused, stay, to


class SourceState(StrEnum):
    """Where a transfer stands on P."""

    UNKNOWN = "unknown"
    REVOKED = "revoked"
    PREPARING = "preparing"
    PARKED = "parked"
    HELD = "held"
    PUSHING = "pushing"
    PAUSED = "paused"
    CONFIRMED = "confirmed"
    ABORTING = "aborting"
    CLOSING = "closing"
    RELEASED = "released"


class SourceEvent(StrEnum):
    """What can happen to a transfer on P. An event is the classified form of a message, a call or a timer."""

    BEGIN = "begin"  # vLLM has the request
    HOLD = "hold"  # pull: vLLM finished it and asks whether to keep the blocks
    FINISHED = "finished"  # layer-wise: vLLM finished it, its free is deferred already
    GRANTED = "granted"  # D granted the claim
    DENIED = "denied"  # D did not
    WRITE = "write"  # may a write be submitted?
    WRITES_DONE = "writes_done"  # the last write was submitted and every one is acknowledged
    WRITE_ERROR = "write_error"  # a write returned an error and may still be at work
    DRAINED = "drained"  # no write is in flight
    DRAIN_OVERDUE = "drain_overdue"  # writes did not end within their bound
    SESSION_CLOSED = "session_closed"  # P's transport session is gone, and with it every write
    CLOSE_FAILED = "close_failed"
    DONE_PART = "done_part"  # D's rank read everything; other ranks are still to come
    DONE_LAST = "done_last"  # ... and it is the last rank
    DONE_AGAIN = "done_again"  # this very read was vouched for before
    DONE_OTHER = "done_other"  # another engine, or a second read of a rank that was vouched for
    RENEW = "renew"
    RELEASE = "release"  # proxy or D: nobody will come
    PEER_ABORT = "peer_abort"
    CANCEL = "cancel"  # vLLM aborted the request, or P gives it up
    PREEMPTED = "preempted"  # vLLM takes the blocks away at once
    RESUMED = "resumed"  # and computes again, with other blocks
    DEADLINE = "deadline"
    TOLD = "told"  # D answered Pushed, whatever it said


class SourceEffect(StrEnum):
    """What a cell orders; the ledger turns it into an action with its particulars."""

    FREE_BLOCKS = "free_blocks"
    STOP_SUBMITTING = "stop_submitting"
    SEND_PUSHED = "send_pushed"
    SEND_ABORT = "send_abort"
    SEND_DRAINED = "send_drained"
    CLOSE_SESSION = "close_session"
    REPLAN = "replan"
    DEMAND_RESTART = "demand_restart"


S, E, F = SourceState, SourceEvent, SourceEffect
SourceTable = Table[SourceEvent, SourceState, SourceEffect]

SOURCE_FINAL = frozenset({S.REVOKED, S.RELEASED})

_GIVE_UP_IDLE: Cell[SourceState, SourceEffect] = to(S.ABORTING)
_GIVE_UP_WRITING = to(S.ABORTING, F.STOP_SUBMITTING, F.SEND_ABORT)
_CLOSE = to(S.CLOSING, F.STOP_SUBMITTING, F.SEND_ABORT, F.CLOSE_SESSION)

SOURCE: SourceTable = {
    # --- vLLM's side -------------------------------------------------------------------------------------------
    E.BEGIN: {
        S.UNKNOWN: to(S.PREPARING),
        S.REVOKED: to(S.RELEASED),  # the caller sees that nothing was begun and computes without a handoff
        **refused(S.PREPARING, S.PARKED, S.HELD, S.PUSHING, S.PAUSED, S.CONFIRMED, S.ABORTING, S.CLOSING),
        **refused(S.RELEASED),
    },
    E.HOLD: {
        S.PREPARING: to(S.HELD),
        S.PARKED: to(S.HELD),  # what vLLM finished it has resumed
        # refused means: do not defer, vLLM frees the blocks itself
        **refused(S.UNKNOWN, S.REVOKED, S.HELD, S.PUSHING, S.PAUSED, S.CONFIRMED, S.ABORTING, S.CLOSING),
        **refused(S.RELEASED),
    },
    E.FINISHED: {
        S.PREPARING: to(S.HELD),
        S.PARKED: _GIVE_UP_IDLE,  # finished without being resumed: aborted while preempted
        S.PUSHING: stay(),
        S.PAUSED: to(S.ABORTING, F.SEND_ABORT),  # likewise
        S.CONFIRMED: stay(F.FREE_BLOCKS),
        S.ABORTING: stay(),
        S.CLOSING: stay(),
        S.RELEASED: stay(F.FREE_BLOCKS),
        S.REVOKED: to(S.RELEASED, F.FREE_BLOCKS),
        S.UNKNOWN: to(S.RELEASED, F.FREE_BLOCKS),  # forgotten meanwhile: vLLM must still get its blocks back
        **ignored(S.HELD),
    },
    E.CANCEL: {
        S.PREPARING: _GIVE_UP_IDLE,
        S.PARKED: _GIVE_UP_IDLE,
        S.HELD: _GIVE_UP_IDLE,
        S.PUSHING: _GIVE_UP_WRITING,
        S.PAUSED: to(S.ABORTING, F.SEND_ABORT),
        **ignored(S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED, S.REVOKED, S.UNKNOWN),
    },
    E.PREEMPTED: {
        S.PREPARING: to(S.PARKED),
        S.PUSHING: to(S.PAUSED, F.STOP_SUBMITTING),
        **ignored(S.UNKNOWN, S.REVOKED, S.PARKED, S.PAUSED, S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED),
        **refused(S.HELD),  # a finished request cannot be preempted
    },
    E.RESUMED: {
        S.PARKED: to(S.PREPARING),
        S.PAUSED: to(S.PUSHING, F.REPLAN),
        **ignored(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PUSHING, S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED),
        **refused(S.HELD),
    },
    # --- layer-wise: the claim and P's own writes --------------------------------------------------------------
    E.GRANTED: {
        S.PREPARING: to(S.PUSHING),
        S.PARKED: to(S.PAUSED),
        S.HELD: to(S.PUSHING),
        **ignored(S.PUSHING, S.PAUSED, S.CONFIRMED),
        # granted after P gave up: D must hear that nobody will write
        S.ABORTING: stay(F.SEND_ABORT),
        S.CLOSING: stay(F.SEND_ABORT),
        S.RELEASED: stay(F.SEND_DRAINED),
        S.REVOKED: stay(F.SEND_DRAINED),
        **refused(S.UNKNOWN),
    },
    E.DENIED: {
        S.PREPARING: _GIVE_UP_IDLE,
        S.PARKED: _GIVE_UP_IDLE,
        S.HELD: _GIVE_UP_IDLE,
        S.PUSHING: to(S.ABORTING, F.STOP_SUBMITTING),
        S.PAUSED: to(S.ABORTING),
        **ignored(S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED, S.REVOKED, S.UNKNOWN),
    },
    E.WRITE: {
        S.PUSHING: stay(),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD, S.PAUSED, S.CONFIRMED, S.ABORTING),
        **refused(S.CLOSING, S.RELEASED),
    },
    E.WRITES_DONE: {
        S.PUSHING: to(S.CONFIRMED, F.SEND_PUSHED, F.FREE_BLOCKS),
        **ignored(S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED, S.PAUSED),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD),
    },
    E.WRITE_ERROR: {
        S.PUSHING: _CLOSE,
        S.PAUSED: _CLOSE,
        S.ABORTING: to(S.CLOSING, F.CLOSE_SESSION),
        **ignored(S.CLOSING, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD, S.CONFIRMED),
    },
    E.DRAINED: {
        S.ABORTING: to(S.RELEASED, F.FREE_BLOCKS, F.SEND_DRAINED),
        **ignored(S.PUSHING, S.PAUSED, S.CONFIRMED, S.CLOSING, S.RELEASED, S.PREPARING, S.PARKED, S.HELD),
        **refused(S.UNKNOWN, S.REVOKED),
    },
    E.DRAIN_OVERDUE: {
        S.PUSHING: _CLOSE,
        S.PAUSED: _CLOSE,
        S.ABORTING: to(S.CLOSING, F.CLOSE_SESSION),
        **ignored(S.CLOSING, S.RELEASED, S.CONFIRMED),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD),
    },
    E.SESSION_CLOSED: {
        S.CLOSING: to(S.RELEASED, F.FREE_BLOCKS, F.SEND_DRAINED),
        S.ABORTING: to(S.RELEASED, F.FREE_BLOCKS, F.SEND_DRAINED),
        # another transfer's error closed the session under this one: what it had in flight is lost
        S.PUSHING: to(S.RELEASED, F.STOP_SUBMITTING, F.FREE_BLOCKS, F.SEND_DRAINED),
        S.PAUSED: to(S.RELEASED, F.FREE_BLOCKS, F.SEND_DRAINED),
        **ignored(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD, S.CONFIRMED, S.RELEASED),
    },
    E.CLOSE_FAILED: {
        S.CLOSING: stay(F.DEMAND_RESTART),
        **ignored(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD, S.PUSHING, S.PAUSED, S.CONFIRMED),
        **ignored(S.ABORTING, S.RELEASED),
    },
    E.TOLD: {
        S.CONFIRMED: to(S.RELEASED, F.FREE_BLOCKS),
        **ignored(S.ABORTING, S.CLOSING, S.RELEASED, S.UNKNOWN, S.REVOKED),
        **refused(S.PREPARING, S.PARKED, S.HELD, S.PUSHING, S.PAUSED),
    },
    # --- pull: vouching ----------------------------------------------------------------------------------------
    E.DONE_PART: {
        S.HELD: stay(),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.PUSHING, S.PAUSED, S.CONFIRMED, S.ABORTING),
        **refused(S.CLOSING),
        **refused(S.RELEASED),
    },
    E.DONE_LAST: {
        S.HELD: to(S.CONFIRMED, F.FREE_BLOCKS),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.PUSHING, S.PAUSED, S.CONFIRMED, S.ABORTING),
        **refused(S.CLOSING),
        **refused(S.RELEASED),
    },
    E.DONE_AGAIN: {
        **ignored(S.HELD, S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.PUSHING, S.PAUSED),
    },
    E.DONE_OTHER: {
        **refused(S.UNKNOWN, S.REVOKED, S.PREPARING, S.PARKED, S.HELD, S.PUSHING, S.PAUSED, S.CONFIRMED),
        **refused(S.ABORTING, S.CLOSING),
        **refused(S.RELEASED),
    },
    E.RENEW: {
        S.PREPARING: stay(),
        S.PARKED: stay(),
        S.HELD: stay(),
        **ignored(S.PUSHING, S.PAUSED, S.CONFIRMED),
        **refused(S.UNKNOWN, S.REVOKED, S.ABORTING, S.CLOSING, S.RELEASED),
    },
    # --- giving up ---------------------------------------------------------------------------------------------
    E.RELEASE: {
        S.UNKNOWN: to(S.REVOKED),
        S.PREPARING: _GIVE_UP_IDLE,
        S.PARKED: _GIVE_UP_IDLE,
        S.HELD: _GIVE_UP_IDLE,
        S.PUSHING: _GIVE_UP_WRITING,
        S.PAUSED: to(S.ABORTING, F.SEND_ABORT),
        **ignored(S.REVOKED, S.CONFIRMED, S.ABORTING, S.CLOSING, S.RELEASED),
    },
    E.PEER_ABORT: {
        S.UNKNOWN: to(S.REVOKED),
        S.PREPARING: _GIVE_UP_IDLE,
        S.PARKED: _GIVE_UP_IDLE,
        S.HELD: _GIVE_UP_IDLE,
        S.PUSHING: to(S.ABORTING, F.STOP_SUBMITTING),
        S.PAUSED: to(S.ABORTING),
        S.CONFIRMED: to(S.RELEASED, F.FREE_BLOCKS),  # every write is acknowledged, D does not want the cache
        S.RELEASED: stay(F.SEND_DRAINED),  # the acknowledgement may have been lost
        S.REVOKED: stay(F.SEND_DRAINED),
        **ignored(S.ABORTING, S.CLOSING),
    },
    E.DEADLINE: {
        S.PREPARING: _GIVE_UP_IDLE,
        S.PARKED: _GIVE_UP_IDLE,
        S.HELD: _GIVE_UP_IDLE,
        S.PUSHING: _GIVE_UP_WRITING,
        S.PAUSED: to(S.ABORTING, F.SEND_ABORT),
        S.CONFIRMED: to(S.RELEASED, F.FREE_BLOCKS),
        S.ABORTING: to(S.CLOSING, F.CLOSE_SESSION),
        S.CLOSING: stay(F.DEMAND_RESTART),
        S.REVOKED: to(S.UNKNOWN),  # forgotten
        S.RELEASED: to(S.UNKNOWN),
        **ignored(S.UNKNOWN),
    },
}
