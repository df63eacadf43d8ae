"""What the scheduler side and the worker side of the pull connector tell each other at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.params import PullHandoff
from connectors.compat import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass(frozen=True, slots=True)
class PullLoad:
    """Scheduler → every worker of D: read this request's cache."""

    request_id: str
    handoff: PullHandoff
    sink: EngineRef
    block_ids: tuple[tuple[int, ...], ...]
    """D's blocks per KV cache group in token order, its prefix hit included."""
    num_cached_tokens: int
    """Tokens at the front that D already has."""
    refusal: str = ""
    """When not empty the load fails at once with this reason (the prompt is another one, for example)."""


@dataclass(slots=True)
class PullMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler → workers."""

    loads: list[PullLoad] = field(default_factory=list)
    cancels: dict[str, str] = field(default_factory=dict)
    """Loads whose request was aborted: request id → reason."""
    released: set[str] = field(default_factory=set)
    """P: requests whose blocks go back to vLLM now; each worker returns them as finished_sending."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How one rank's load ended."""

    transfer_id: str
    ok: bool
    reason: str
    bytes_moved: int = 0
    timings_ms: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class PullReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers → scheduler: the loads that ended in this step."""

    loads: list[LoadReport]
    unsound: str = ""
    """Why this engine must be restarted."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PullReport:
        """The reports of both."""
        if not isinstance(other, PullReport):
            return self
        return PullReport(self.loads + other.loads, self.unsound or other.unsound)
