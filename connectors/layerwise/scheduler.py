"""The scheduler side of the layer-wise connector: one side channel, and the prefill or decode half, or both."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request as EngineRequest

from ascend_pd.wire.identity import Fingerprint
from ascend_pd.wire.messages import Abort, Answer, Claim, Pushed, Release, Reply, Request, Verdict, WorkerInfo
from connectors.compat import BlockIds
from connectors.endpoint import EngineEndpoint
from connectors.layerwise.decode import DecodeScheduler
from connectors.layerwise.metadata import LayerwiseMetadata, LayerwiseReport
from connectors.layerwise.prefill import PrefillScheduler
from connectors.settings import ConnectorSettings
from connectors.sidechannel.rendezvous import RendezvousClient

_UNRESERVED_SHARE = 4


class LayerwiseScheduler:
    """Composes what the engine's role needs.

    Raises:
        OperatorError: the side channel's port is taken.
    """

    def __init__(
        self, settings: ConnectorSettings, fingerprint: Fingerprint, *, num_blocks: int, single_group: bool
    ) -> None:
        config = settings.config
        self.endpoint = EngineEndpoint(settings, fingerprint, self._handle, self._tick)
        self._rendezvous: RendezvousClient | None = None
        self._prefill: PrefillScheduler | None = None
        self._decode: DecodeScheduler | None = None
        if settings.is_producer:
            cap = config.max_unreserved_blocks or max(1, num_blocks // _UNRESERVED_SHARE)
            self._prefill = PrefillScheduler(
                self.endpoint, cap, config.lease_seconds, config.metaserver, settings.block_size
            )
        if settings.is_consumer:
            self._rendezvous = RendezvousClient(settings.secret, settings.engine_id)
            self._decode = DecodeScheduler(settings, self.endpoint, self._rendezvous, single_group=single_group)
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
        return self._decode.matched_tokens(request, num_computed) if self._decode else (0, False)

    def allocated(self, request: EngineRequest, block_ids: BlockIds, num_external: int) -> None:
        """vLLM allocated blocks for an admitted request."""
        if self._decode:
            self._decode.allocated(request, block_ids, num_external)

    def build_metadata(self, output: SchedulerOutput) -> LayerwiseMetadata:
        """What the workers are to do and to say in this step."""
        metadata = LayerwiseMetadata(self.endpoint.ref)
        if self._prefill:
            self._prefill.describe_step(output, metadata)
        if self._decode:
            self._decode.fill(metadata)
        return metadata

    def report(self, report: LayerwiseReport) -> None:
        """What the workers say of pushes and fences."""
        if self._prefill:
            self._prefill.report(report)
        if self._decode and report.fences:
            self._decode.report_fences(report.fences)
        if report.unsound:
            self.endpoint.declare_unsound(report.unsound)

    def released(self, request_ids: set[str]) -> None:
        """Every rank reported these requests as finished_sending."""
        if self._prefill:
            self._prefill.released(request_ids)

    def ended(self, request: EngineRequest, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """vLLM finished the request; True keeps its blocks."""
        if self._decode:
            self._decode.ended(request)
        return self._prefill.ended(request, block_ids) if self._prefill else (False, None)

    def has_news(self) -> bool:
        """Whether the engine should take a step although it has nothing to compute."""
        halves = [half for half in (self._prefill, self._decode) if half]
        return any(half.has_news() for half in halves)

    def close(self) -> None:
        """Give the port back and end the threads."""
        self.endpoint.close()
        if self._rendezvous:
            self._rendezvous.close()

    def _handle(self, request: Request) -> Reply:
        if self._decode and (self._prefill is None or isinstance(request, Claim | Pushed)):
            return self._decode.handle(request)
        if self._prefill and self._decode and isinstance(request, Abort | Release):
            # A union engine may be either end of this transfer.
            ours = self._decode.knows(request.transfer_id)
            return (self._decode if ours else self._prefill).handle(request)
        if self._prefill:
            return self._prefill.handle(request)
        return Answer(verdict=Verdict.REFUSED, reason="this engine takes no part in transfers")

    def _tick(self, now: float) -> float | None:
        return self._decode.tick(now) if self._decode else None
