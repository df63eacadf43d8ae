"""What the ledgers ask their connector to do. Each comes once; whoever sends messages repeats them."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ascend_pd.wire.identity import EngineRef


class Outcome(StrEnum):
    """What vLLM is to be told about a receive; each way ends in one `finished_recving`."""

    RECEIVED = "received"
    FAILED = "failed"
    """Report the load failure and the end of the receive together."""
    FAILED_ANSWERED = "failed_answered"
    """The failed block ids went out early (`AnswerEarly`): report only the end of the receive."""
    CANCELLED = "cancelled"
    """vLLM aborted the request itself: report only the end of the receive."""


class FreeBlocks(NamedTuple):
    """P: vLLM may have the blocks of `owner` back (`finished_sending`). At most once per transfer."""

    transfer_id: str
    owner: str
    reason: str


class StopSubmitting(NamedTuple):
    """P: submit no further write of this transfer. `SourceLedger.submit` refuses from now on as well."""

    transfer_id: str


class SendPushed(NamedTuple):
    """P: tell D, until it answers, that this rank's writes are all acknowledged; then call `told`."""

    transfer_id: str
    sink: EngineRef


class CloseSession(NamedTuple):
    """P: close the transport session, so that none of its writes goes on; then call `session_closed`."""

    transfer_id: str


class Replan(NamedTuple):
    """P: the request was resumed with other blocks; plan what D does not have yet."""

    transfer_id: str


class SendAbort(NamedTuple):
    """Either side: tell the peer, until it answers. `drained` is this side's promise, not the peer's."""

    transfer_id: str
    peer: EngineRef
    drained: bool
    reason: str


class SendDone(NamedTuple):
    """D, pull: ask P, until it answers, to vouch for `read_id`; then call `vouched` or `disowned`."""

    transfer_id: str
    source: EngineRef
    read_id: str


class AnswerEarly(NamedTuple):
    """D: the failed block ids may go out now; the blocks themselves stay until `ReportFinished`."""

    transfer_id: str
    reason: str


class ReportFinished(NamedTuple):
    """D: tell vLLM, then call `reported`. Exactly once per transfer that was begun."""

    transfer_id: str
    owner: str
    outcome: Outcome
    reason: str


class Fence(NamedTuple):
    """D: destroy the transport endpoint; `fence_begins` just before, then `fenced` or `fence_failed`."""

    transfer_id: str


class ReportOverdue(NamedTuple):
    """D: vLLM has not taken a report in time. It steps while a free is deferred, so a step is stuck."""

    transfer_id: str


class DemandRestart(NamedTuple):
    """Either side: blocks cannot be made safe; fail readiness and ask to be restarted."""

    transfer_id: str
    reason: str


SourceAction = FreeBlocks | StopSubmitting | SendPushed | SendAbort | CloseSession | Replan | DemandRestart
SinkAction = SendDone | SendAbort | AnswerEarly | ReportFinished | Fence | ReportOverdue | DemandRestart
