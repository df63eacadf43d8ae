"""What the scheduler side and the worker side of the layer-wise connector tell each other at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Abort, Release, WorkerInfo
from connectors.compat import BlockIds, KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class PushBegin:
    """P: a request that is to be pushed is scheduled for the first time."""

    request_id: str
    transfer_id: str
    metaserver: str
    num_prompt_tokens: int
    prompt_hash: str


@dataclass(frozen=True, slots=True)
class PushChunk:
    """P: what this step computes of one request."""

    transfer_id: str
    new_block_ids: BlockIds
    """Per KV cache group; all of the request's blocks when `replaces`, else those to append."""
    replaces: bool
    settled_token: int
    """Tokens before it were computed before this step, by whomever."""
    end_token: int


@dataclass(slots=True)
class LayerwiseMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler → workers."""

    engine: EngineRef
    side_address: tuple[str, int] = ("", 0)
    messages: list[Abort | Release] = field(default_factory=list)
    begins: list[PushBegin] = field(default_factory=list)
    chunks: list[PushChunk] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Transfer ids whose blocks this step may overwrite."""
    cancels: dict[str, str] = field(default_factory=dict)
    """Transfer id → reason."""
    finished: dict[str, str] = field(default_factory=dict)
    """Transfer id → request id: vLLM finished it and waits for finished_sending."""
    received: set[str] = field(default_factory=set)
    """D: requests that each worker returns as finished_recving."""
    failed: set[str] = field(default_factory=set)
    invalid_block_ids: set[int] = field(default_factory=set)
    receiving: bool = False
    """D: healthy pushes are under way, which a fence spares for a while."""
    fence: int | None = None
    """D: destroy the transport endpoint; the number comes back in the report."""


@dataclass(frozen=True, slots=True)
class PushReport:
    """P rank: how far one transfer is."""

    transfer_id: str
    state: str
    """`granted`, `pushed` or `failed`."""
    reason: str = ""
    bytes_moved: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FenceReport:
    """D rank: a fence is done (`info` has the new session), or failed."""

    generation: int
    info: WorkerInfo
    failure: str = ""


@dataclass(slots=True)
class LayerwiseReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers → scheduler."""

    pushes: list[PushReport] = field(default_factory=list)
    fences: list[FenceReport] = field(default_factory=list)
    unsound: str = ""
    """Why this engine must be restarted."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LayerwiseReport:
        """The reports of both."""
        if not isinstance(other, LayerwiseReport):
            return self
        unsound = self.unsound or other.unsound
        return LayerwiseReport(self.pushes + other.pushes, self.fences + other.fences, unsound)
