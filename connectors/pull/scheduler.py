"""The scheduler side of the pull connector: one side channel, and the prefill or decode half of it, or both."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request as EngineRequest

from ascend_pd.wire.identity import Fingerprint
from ascend_pd.wire.messages import Answer, Reply, Request, Verdict, WorkerInfo
from connectors.compat import BlockIds
from connectors.endpoint import EngineEndpoint
from connectors.pull.decode import DecodeScheduler
from connectors.pull.metadata import PullMetadata, PullReport
from connectors.pull.prefill import PrefillScheduler
from connectors.settings import ConnectorSettings


class PullScheduler:
    """Composes what the engine's role needs.

    Raises:
        OperatorError: the side channel's port is taken.
    """

    def __init__(self, settings: ConnectorSettings, fingerprint: Fingerprint) -> None:
        self.endpoint = EngineEndpoint(settings, fingerprint, self._handle, self._tick)
        self._prefill = PrefillScheduler(settings, self.endpoint.stories) if settings.is_producer else None
        self._decode = DecodeScheduler(self.endpoint, settings.tp_size) if settings.is_consumer else None
        if self._prefill:
            self._prefill.open(self.endpoint.ref, self.endpoint.address, self.endpoint.server.wake)
        self.endpoint.start()

    def publish(self, workers: tuple[WorkerInfo, ...]) -> None:
        """Make the workers known to peers."""
        self.endpoint.publish(workers)

    def on_new_request(self, request: EngineRequest) -> None:
        """vLLM took a request in."""
        if self._prefill:
            self._prefill.on_new_request(request)
        if self._decode:
            self._decode.on_new_request(request)

    def matched_tokens(self, request: EngineRequest, num_computed: int) -> tuple[int, bool]:
        """Tokens that come from P, and whether between steps."""
        if self._prefill:
            self._prefill.considered(request)
        return self._decode.matched_tokens(request, num_computed) if self._decode else (0, False)

    def allocated(self, request: EngineRequest, block_ids: BlockIds, num_external: int) -> None:
        """vLLM allocated blocks for an admitted request."""
        if self._decode:
            self._decode.allocated(request, block_ids, num_external)

    def build_metadata(self) -> PullMetadata:
        """What the workers are to do in this step."""
        metadata = PullMetadata()
        if self._prefill:
            metadata.released = self._prefill.take_released()
        if self._decode:
            metadata.loads, metadata.cancels = self._decode.take_outbox()
        return metadata

    def report(self, report: PullReport) -> None:
        """What the workers say of loads that ended."""
        if self._decode:
            self._decode.report(report)
        if report.unsound:
            self.endpoint.declare_unsound(report.unsound)

    def ended(self, request: EngineRequest, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """vLLM finished the request; (True, handoff) keeps its blocks."""
        if self._decode:
            self._decode.ended(request)
        return self._prefill.ended(request, block_ids) if self._prefill else (False, None)

    def close(self) -> None:
        """Give the port back."""
        self.endpoint.close()

    def _handle(self, request: Request) -> Reply:
        if self._prefill:
            return self._prefill.handle(request)
        return Answer(verdict=Verdict.REFUSED, reason="this engine holds nothing for others (decode, pull)")

    def _tick(self, now: float) -> float | None:
        halves = [half.tick(now) for half in (self._prefill, self._decode) if half]
        return min((instant for instant in halves if instant is not None), default=None)
