"""What D remembers of one transfer, and which event a message about it is."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Claim, Pushed
from connectors.handoff.sink_table import SinkEvent, SinkState

S, E = SinkState, SinkEvent


class SinkTransfer(Struct, frozen=True, gc=False):
    """One transfer on D. `source` is P: named at `begin` (pull) or granted the claim (layer-wise)."""

    transfer_id: str
    state: SinkState = S.UNKNOWN
    owner: str = ""
    begun: bool = False
    source: EngineRef | None = None
    source_ranks: int = 0
    prompt_hash: str = ""
    num_tokens: int = 0
    generation: int = 0
    """Which life of D's endpoint the bytes come in through."""
    read_id: str = ""
    reads: int = 0
    """Own reads in flight (pull)."""
    errored: bool = False
    pushed: frozenset[int] = frozenset()
    drained: frozenset[int] = frozenset()
    bytes_moved: int = 0
    answered_early: bool = False
    cancelled: bool = False
    reported: bool = False
    reason: str = ""


def classify_claim(record: SinkTransfer, claim: Claim) -> tuple[SinkTransfer, SinkEvent, str]:
    """Which event a Claim is, the record with the claimant in it, and why it is refused if it is."""
    if record.source is not None:
        if record.source == claim.source:
            return record, E.CLAIM_AGAIN, ""
        if record.source.engine_id == claim.source.engine_id:
            return record, E.SOURCE_RESTARTED, f"{claim.source.engine_id} was restarted during the transfer"
        return record, E.CLAIM_OTHER, f"claimed by {record.source}"
    if record.prompt_hash and claim.prompt_hash != record.prompt_hash:
        return record, E.CLAIM_WRONG, "prefill's prompt has other token ids: template or tokenizer differ"
    if claim.source_ranks < 1:
        return record, E.CLAIM_OTHER, "a claim for no rank"
    return replace(record, source=claim.source, source_ranks=claim.source_ranks), E.CLAIM_FIRST, ""


def classify_pushed(record: SinkTransfer, pushed: Pushed) -> tuple[SinkTransfer, SinkEvent, str]:
    """Which event a Pushed is, and the record that counts it."""
    if record.source != pushed.source or not 0 <= pushed.source_rank < record.source_ranks:
        return record, E.PUSHED_OTHER, "not the rank of a grantee"
    if pushed.source_rank in record.pushed:
        return record, E.PUSHED_AGAIN, ""
    if pushed.dirty:
        return record, E.PUSHED_DIRTY, "a write returned an error on prefill"
    if record.num_tokens and pushed.num_tokens != record.num_tokens:
        why = f"prefill pushed {pushed.num_tokens} tokens of {record.num_tokens}"
        return record, E.PUSHED_DIRTY, why
    counted = replace(
        record, pushed=record.pushed | {pushed.source_rank}, bytes_moved=record.bytes_moved + pushed.bytes_sent
    )
    return counted, E.PUSHED_LAST if len(counted.pushed) == record.source_ranks else E.PUSHED_PART, ""


def classify_abort(record: SinkTransfer, abort: Abort, *, pull: bool) -> tuple[SinkTransfer, SinkEvent]:
    """Which event an Abort is. In pull mode P cannot know whether D's own reads are over, so it never drains."""
    if pull:
        ours = record.source is None or record.source == abort.sender
        return record, E.PEER_ABORT if ours else E.ABORT_OTHER
    if record.source is None:
        return record, E.PEER_DRAINED if abort.drained else E.PEER_ABORT
    if record.source.engine_id == abort.sender.engine_id and record.source != abort.sender:
        return record, E.SOURCE_RESTARTED
    if record.source != abort.sender or not 0 <= abort.rank < record.source_ranks:
        return record, E.ABORT_OTHER
    return with_drained(record, abort.rank) if abort.drained else (record, E.PEER_ABORT)


def with_drained(record: SinkTransfer, rank: int) -> tuple[SinkTransfer, SinkEvent]:
    """Count one rank's promise. A rank that pushed cleanly has nothing in flight either."""
    counted = replace(record, drained=record.drained | {rank})
    over = len(counted.drained | counted.pushed) == counted.source_ranks
    return counted, E.PEER_DRAINED if over else E.PEER_ABORT
