"""The sink machine (D): one literal table, event × state.

RESERVED: vLLM allocated blocks and nothing may have touched them. RECEIVING: D reads (pull), or one life of P was
granted the claim and writes (layer-wise). RECEIVED: pull only, every read succeeded and P has not vouched yet.
DECODING: vLLM was told that the cache is there.

FAILING waits for what is in flight to end: D's own reads, or P's word that it drained. FENCING no longer waits:
an operation returned an error or the bound is over, and only destroying D's endpoint makes sure that nothing
lands any more. QUIESCED: nothing can land; vLLM is being told. REVOKED is a transfer given up before D heard of
it. DECODING, RELEASED and REVOKED are tombstones.

`REPORT` happens exactly once per transfer, `ANSWER_EARLY` at most once and only where vLLM allows it.
"""

from __future__ import annotations

from enum import StrEnum

from connectors.handoff.machine import Table, ignored, refused, stay, to


class SinkState(StrEnum):
    """Where a transfer stands on D."""

    UNKNOWN = "unknown"
    REVOKED = "revoked"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    RECEIVED = "received"
    DECODING = "decoding"
    FAILING = "failing"
    FENCING = "fencing"
    QUIESCED = "quiesced"
    RELEASED = "released"


class SinkEvent(StrEnum):
    """What can happen to a transfer on D. An event is the classified form of a message, a call or a timer."""

    BEGIN = "begin"  # vLLM allocated the blocks
    REFUSE = "refuse"  # D finds that this transfer cannot work (layout, fingerprint, prompt)
    READ = "read"  # pull: may a read be submitted?
    READS_OK = "reads_ok"  # every read returned success
    READ_ERROR = "read_error"  # a read returned an error and may still be at work
    READ_UNSENT = "read_unsent"  # a read failed before anything was submitted
    VOUCHED = "vouched"  # P answered OK to Done
    DISOWNED = "disowned"  # P answered anything else
    CLAIM_FIRST = "claim_first"  # layer-wise: a life of P asks to write
    CLAIM_AGAIN = "claim_again"  # the grantee asks again, or another rank of it
    CLAIM_OTHER = "claim_other"  # somebody else asks
    CLAIM_WRONG = "claim_wrong"  # the claimant's prompt is another one
    PUSHED_PART = "pushed_part"  # a rank's writes are all acknowledged
    PUSHED_LAST = "pushed_last"  # ... and it is the last rank
    PUSHED_AGAIN = "pushed_again"
    PUSHED_DIRTY = "pushed_dirty"  # ... but one of them had returned an error, or the cache is incomplete
    PUSHED_OTHER = "pushed_other"  # from somebody who holds no claim
    PEER_ABORT = "peer_abort"  # the grantee (or, unclaimed, anybody) gives up
    PEER_DRAINED = "peer_drained"  # ... and every rank of it has nothing in flight
    ABORT_OTHER = "abort_other"  # from somebody who holds no claim
    SOURCE_RESTARTED = "source_restarted"  # the grantee lives a new life; the old one's bytes may still arrive
    RELEASE = "release"  # proxy: nobody wants the result
    CANCEL = "cancel"  # vLLM aborted the request
    DEADLINE = "deadline"
    FENCED = "fenced"  # D's endpoint of that time is destroyed
    FENCE_FAILED = "fence_failed"
    REPORTED = "reported"  # vLLM took the report


class SinkEffect(StrEnum):
    """What a cell orders; the ledger turns it into an action with its particulars."""

    SEND_DONE = "send_done"
    SEND_ABORT = "send_abort"
    ANSWER_EARLY = "answer_early"
    FENCE = "fence"
    REPORT = "report"
    NOTE_OVERDUE = "note_overdue"
    DEMAND_RESTART = "demand_restart"


S, E, F = SinkState, SinkEvent, SinkEffect
SinkTable = Table[SinkEvent, SinkState, SinkEffect]

SINK_FINAL = frozenset({S.REVOKED, S.DECODING, S.RELEASED})

_END_IDLE = to(S.QUIESCED, F.SEND_ABORT, F.REPORT)
_DRAIN = to(S.FAILING, F.SEND_ABORT, F.ANSWER_EARLY)
_FENCE_NOW = to(S.FENCING, F.SEND_ABORT, F.ANSWER_EARLY, F.FENCE)

SINK: SinkTable = {
    # --- vLLM's side -------------------------------------------------------------------------------------------
    E.BEGIN: {
        S.UNKNOWN: to(S.RESERVED),
        S.REVOKED: to(S.QUIESCED, F.REPORT),
        **refused(S.RESERVED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
    },
    E.REFUSE: {
        S.RESERVED: _END_IDLE,
        S.RECEIVING: _DRAIN,
        S.RECEIVED: _END_IDLE,
        **ignored(S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.DECODING),
    },
    E.CANCEL: {
        S.RESERVED: _END_IDLE,
        S.RECEIVING: _DRAIN,
        S.RECEIVED: _END_IDLE,
        S.FAILING: stay(),  # remembered: what vLLM is told differs
        S.FENCING: stay(),
        **ignored(S.UNKNOWN, S.REVOKED, S.DECODING, S.QUIESCED, S.RELEASED),
    },
    E.REPORTED: {
        S.QUIESCED: to(S.RELEASED),
        **ignored(S.DECODING, S.RELEASED, S.UNKNOWN, S.REVOKED),
        **refused(S.RESERVED, S.RECEIVING, S.RECEIVED, S.FAILING, S.FENCING),
    },
    # --- pull: D's own reads and P's word ----------------------------------------------------------------------
    E.READ: {
        S.RESERVED: to(S.RECEIVING),
        S.RECEIVING: stay(),
        **refused(S.UNKNOWN, S.REVOKED, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
    },
    E.READS_OK: {
        S.RECEIVING: to(S.RECEIVED, F.SEND_DONE),
        S.FAILING: to(S.QUIESCED, F.REPORT),  # given up meanwhile, and nothing is in flight any more
        **ignored(S.RECEIVED, S.DECODING, S.FENCING, S.QUIESCED, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED),
    },
    E.READ_ERROR: {
        S.RECEIVING: _FENCE_NOW,
        S.FAILING: to(S.FENCING, F.FENCE),
        **ignored(S.FENCING, S.QUIESCED, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING),
    },
    E.READ_UNSENT: {
        S.RESERVED: _END_IDLE,
        S.RECEIVING: _END_IDLE,
        S.FAILING: to(S.QUIESCED, F.REPORT),
        **ignored(S.FENCING, S.QUIESCED, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.RECEIVED, S.DECODING),
    },
    E.VOUCHED: {
        S.RECEIVED: to(S.DECODING, F.REPORT),
        **ignored(S.DECODING, S.QUIESCED, S.RELEASED),  # too late to matter
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.FAILING, S.FENCING),
    },
    E.DISOWNED: {
        S.RECEIVED: to(S.QUIESCED, F.REPORT),
        **ignored(S.DECODING, S.QUIESCED, S.RELEASED),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.FAILING, S.FENCING),
    },
    # --- layer-wise: one writer --------------------------------------------------------------------------------
    E.CLAIM_FIRST: {
        S.RESERVED: to(S.RECEIVING),
        **refused(S.UNKNOWN, S.REVOKED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.CLAIM_AGAIN: {
        **ignored(S.RECEIVING),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.CLAIM_OTHER: {
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING),
        **refused(S.QUIESCED, S.RELEASED),
    },
    E.CLAIM_WRONG: {
        S.RESERVED: to(S.QUIESCED, F.REPORT),
        **refused(S.UNKNOWN, S.REVOKED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.PUSHED_PART: {
        S.RECEIVING: stay(),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.PUSHED_LAST: {
        S.RECEIVING: to(S.DECODING, F.REPORT),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.PUSHED_AGAIN: {
        **ignored(S.RECEIVING, S.DECODING),
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
    },
    E.PUSHED_DIRTY: {
        S.RECEIVING: _DRAIN,
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED),
        **refused(S.RELEASED),
    },
    E.PUSHED_OTHER: {
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING),
        **refused(S.QUIESCED, S.RELEASED),
    },
    E.SOURCE_RESTARTED: {
        S.RECEIVING: _FENCE_NOW,
        S.FAILING: to(S.FENCING, F.FENCE),  # nobody is left who could say that it drained
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.FENCING, S.QUIESCED, S.RELEASED),
    },
    # --- giving up ---------------------------------------------------------------------------------------------
    E.PEER_ABORT: {
        S.UNKNOWN: to(S.REVOKED),
        S.RESERVED: to(S.QUIESCED, F.REPORT),
        S.RECEIVING: _DRAIN,
        **ignored(S.REVOKED, S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
        **refused(S.RECEIVED, S.DECODING),
    },
    E.PEER_DRAINED: {
        S.UNKNOWN: to(S.REVOKED),
        S.RESERVED: to(S.QUIESCED, F.REPORT),
        S.RECEIVING: to(S.QUIESCED, F.REPORT),
        S.FAILING: to(S.QUIESCED, F.REPORT),
        S.FENCING: to(S.QUIESCED, F.REPORT),  # as good as the fence, and earlier
        **ignored(S.REVOKED, S.QUIESCED, S.RELEASED),
        **refused(S.RECEIVED, S.DECODING),
    },
    E.ABORT_OTHER: {
        **refused(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.FENCING),
        **refused(S.QUIESCED, S.RELEASED),
    },
    E.RELEASE: {
        S.UNKNOWN: to(S.REVOKED),
        S.RESERVED: _END_IDLE,
        S.RECEIVING: _DRAIN,
        S.RECEIVED: _END_IDLE,
        **ignored(S.REVOKED, S.DECODING, S.FAILING, S.FENCING, S.QUIESCED, S.RELEASED),
    },
    E.DEADLINE: {
        S.RESERVED: _END_IDLE,
        S.RECEIVING: _DRAIN,
        S.RECEIVED: _END_IDLE,
        S.FAILING: to(S.FENCING, F.FENCE),
        S.FENCING: stay(F.DEMAND_RESTART),
        S.QUIESCED: stay(F.NOTE_OVERDUE),
        S.REVOKED: to(S.UNKNOWN),  # forgotten
        S.DECODING: to(S.UNKNOWN),
        S.RELEASED: to(S.UNKNOWN),
        **ignored(S.UNKNOWN),
    },
    E.FENCED: {
        S.FAILING: to(S.QUIESCED, F.REPORT),  # another transfer's fence covers this one
        S.FENCING: to(S.QUIESCED, F.REPORT),
        # healthy, but what it had in flight is lost with the endpoint
        S.RECEIVING: to(S.QUIESCED, F.SEND_ABORT, F.REPORT),
        **ignored(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVED, S.DECODING, S.QUIESCED, S.RELEASED),
    },
    E.FENCE_FAILED: {
        S.FENCING: stay(F.DEMAND_RESTART),
        **ignored(S.UNKNOWN, S.REVOKED, S.RESERVED, S.RECEIVING, S.RECEIVED, S.DECODING, S.FAILING, S.QUIESCED),
        **ignored(S.RELEASED),
    },
}
