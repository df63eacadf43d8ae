"""The prefill engine's scheduler side of the pull connector: holding blocks under a lease, vouching for them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from vllm.v1.request import Request as EngineRequest
from vllm.v1.request import RequestStatus

from ascend_pd.wire.identity import EngineRef, prompt_hash
from ascend_pd.wire.messages import Abort, Answer, Done, Release, Renew, Reply, Request, Verdict
from ascend_pd.wire.params import PullHandoff, PullPrefill, to_dict
from connectors.compat import BlockIds
from connectors.handoff.actions import FreeBlocks, SourceAction
from connectors.handoff.source import SourceLedger, SourceLimits
from connectors.request_params import params_for
from connectors.settings import ConnectorSettings
from connectors.stories import StoryBook

logger = logging.getLogger(__name__)

_NOT_HANDED_OFF = (RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_IGNORED, RequestStatus.FINISHED_ERROR)


class PrefillScheduler:
    """Called by vLLM's scheduler thread; `handle` and `tick` by the side channel's thread."""

    def __init__(self, settings: ConnectorSettings, stories: StoryBook) -> None:
        config = settings.config
        self._settings = settings
        self._stories = stories
        lease_s = config.lease_seconds
        if settings.faults is not None:
            lease_s = settings.faults.lease_s(lease_s)
        self._limits = SourceLimits(lease_s=lease_s, max_hold_s=config.max_hold_seconds)
        self._ledger: SourceLedger | None = None
        self._ref = EngineRef("", "")
        self._address = ("", 0)
        self._wake: Callable[[], None] = lambda: None
        self._transfers: dict[str, str] = {}
        self._held_since: dict[str, float] = {}
        self._began: dict[str, float] = {}
        """When requests came; when they were first scheduled, once they were."""
        self._scheduled: dict[str, float] = {}
        self._released: set[str] = set()
        self._lock = threading.Lock()

    def open(self, ref: EngineRef, address: tuple[str, int], wake: Callable[[], None]) -> None:
        """Begin this life of the engine; `wake` has `tick` run soon, which a new hold needs."""
        self._wake = wake
        self._ref = ref
        self._address = address
        self._ledger = SourceLedger(ref.epoch, self._limits)

    @property
    def ledger(self) -> SourceLedger:
        """All transfers of this engine."""
        if self._ledger is None:
            raise RuntimeError("the prefill side is not open")
        return self._ledger

    def on_new_request(self, request: EngineRequest) -> None:
        """Note which transfer this request computes for."""
        params = params_for(request, "do_remote_decode", PullPrefill, "it is computed without a handoff")
        if params is None:
            return
        with self._lock:
            begun = self.ledger.begin(params.transfer_id, request.request_id, time.monotonic())
            if begun:
                self._transfers[request.request_id] = params.transfer_id
                self._began[request.request_id] = time.monotonic()
        if not begun:
            logger.warning("transfer %s: used already or given up; no handoff", params.transfer_id)

    def considered(self, request: EngineRequest) -> None:
        """vLLM's scheduler has come to this request: its time in the queue is over."""
        if request.request_id in self._began:
            self._scheduled.setdefault(request.request_id, time.monotonic())

    def _timings_ms(self, request_id: str) -> dict[str, float]:
        began = self._began.pop(request_id, 0.0)
        scheduled = self._scheduled.pop(request_id, 0.0)
        if not began or not scheduled:
            return {}
        return {"prefill_queue": (scheduled - began) * 1e3, "prefill": (time.monotonic() - scheduled) * 1e3}

    def ended(self, request: EngineRequest, block_ids: BlockIds) -> tuple[bool, dict[str, Any] | None]:
        """vLLM finished the request: hold its blocks and say where they are, or let them go."""
        transfer_id = self._transfers.pop(request.request_id, None)
        if transfer_id is None:
            return False, None
        timings_ms = self._timings_ms(request.request_id)
        complete = (
            request.status not in _NOT_HANDED_OFF and request.num_computed_tokens >= request.num_prompt_tokens
        )
        with self._lock:
            now = time.monotonic()
            if not complete:
                self._carry_out(self.ledger.cancel(transfer_id, "the prefill was aborted", now))
                return False, None
            held = self.ledger.hold(transfer_id, request.request_id, now)
            if not held:
                return False, None
            self._held_since[transfer_id] = now
        # Its lease must end by itself, also when no message ever comes.
        self._wake()
        self._stories.record(transfer_id, "held", timings_ms=timings_ms)
        return True, to_dict(self._handoff(transfer_id, request, block_ids))

    def take_released(self) -> set[str]:
        """Requests whose blocks vLLM may have back, each once."""
        with self._lock:
            released, self._released = self._released, set()
        return released

    @property
    def has_held(self) -> bool:
        """Whether some blocks are not back yet."""
        return self.ledger.num_held() > 0 or bool(self._released)

    def handle(self, request: Request) -> Reply:
        """Answer a message about a transfer."""
        if not isinstance(request, Done | Renew | Release | Abort):
            return Answer(verdict=Verdict.REFUSED, reason="this engine only lends its blocks (pull)")
        with self._lock:
            answer, actions = self.ledger.handle(request, time.monotonic())
            self._carry_out(actions)
        return answer

    def tick(self, now: float) -> float | None:
        """Let leases expire; returns when to look again."""
        with self._lock:
            self._carry_out(self.ledger.tick(now))
            upcoming = self.ledger.next_deadline()
        return upcoming if upcoming < float("inf") else None

    def _carry_out(self, actions: list[SourceAction]) -> None:
        for action in actions:
            if isinstance(action, FreeBlocks):
                self._released.add(action.owner)
                held_s = time.monotonic() - self._held_since.pop(action.transfer_id)
                # From the end of the prefill to every rank vouched for: no decode can start before.
                timings = {"exposed": held_s * 1e3}
                self._stories.record(action.transfer_id, "released", reason=action.reason, timings_ms=timings)

    def _handoff(self, transfer_id: str, request: EngineRequest, block_ids: tuple[list[int], ...]) -> PullHandoff:
        host, port = self._address
        return PullHandoff(
            transfer_id=transfer_id,
            remote_engine_id=self._ref.engine_id,
            remote_epoch=self._ref.epoch,
            remote_host=host,
            remote_port=port,
            remote_block_ids=[list(ids) for ids in block_ids],
            remote_block_size=self._settings.block_size,
            remote_tp_size=self._settings.tp_size,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_hash=prompt_hash(request.prompt_token_ids or ()),
            lease_seconds=self._settings.config.lease_seconds,
        )
