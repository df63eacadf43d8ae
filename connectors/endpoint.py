"""This engine core on the side channel: its identity of this life, the handshake, and who answers what."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable

from ascend_pd.wire.identity import EngineRef, Fingerprint, mismatches
from ascend_pd.wire.messages import Answer, Ask, Hello, HelloReply, Reply, Request, Verdict, WorkerInfo
from connectors.settings import ConnectorSettings
from connectors.sidechannel.client import SideChannelClient
from connectors.sidechannel.server import SideChannelServer
from connectors.stories import StoryBook

logger = logging.getLogger(__name__)

Handler = Callable[[Request], Reply]
Tick = Callable[[float], float | None]


def mint_engine(engine_id: str) -> EngineRef:
    """This engine in a new life: nobody used the epoch before."""
    return EngineRef(engine_id, secrets.token_hex(8))


class EngineEndpoint:
    """One per engine core, in the scheduler process.

    `handler` and `tick` run on the side channel's thread, so neither needs the engine to take a step.

    Raises:
        OperatorError: the side channel's address cannot be bound.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        fingerprint: Fingerprint,
        handler: Handler,
        tick: Tick,
    ) -> None:
        self.ref = mint_engine(settings.engine_id)
        self.stories = StoryBook()
        self._settings = settings
        self._fingerprint = fingerprint
        self._handler = handler
        self._workers: tuple[WorkerInfo, ...] = ()
        self.endpoints = 0
        self._unsound = ""
        config = settings.config
        self.server = SideChannelServer(
            config.host,
            settings.side_port,
            settings.secret,
            self._answer,
            str(self.ref),
            tick=tick,
            faults=settings.faults,
        )
        self.client = SideChannelClient(settings.secret, str(self.ref), faults=settings.faults)

    @property
    def address(self) -> tuple[str, int]:
        """Where peers reach this side channel."""
        return self._settings.config.host, self.server.port

    def start(self) -> None:
        """Begin to answer."""
        self.server.start()

    def publish(self, workers: tuple[WorkerInfo, ...]) -> None:
        """Make the workers' endpoints and layouts known; until then a handshake shows none."""
        self._workers = workers

    def renew(self, workers: Iterable[WorkerInfo]) -> None:
        """After a fence: these workers have new sessions."""
        renewed = {info.layout.worker: info for info in workers}
        self._workers = tuple(renewed.get(info.layout.worker, info) for info in self._workers)
        self.endpoints += 1

    def declare_unsound(self, reason: str) -> None:
        """Blocks cannot be made safe: who asks from now on is told to send nothing here, and why."""
        if not self._unsound:
            logger.critical("restart engine %s: %s", self.ref, reason)
        self._unsound = self._unsound or reason

    def close(self) -> None:
        """End both threads and free the port. Safe to repeat."""
        self.server.close()
        self.client.close()

    def _answer(self, request: Request) -> Reply:
        if isinstance(request, Hello):
            return self._hello(request)
        if isinstance(request, Ask):
            return self.stories.tell(request.transfer_id)
        return self._handler(request)

    def _hello(self, request: Hello) -> Reply:
        if request.fingerprint is not None:
            ours, theirs = self._fingerprint, request.fingerprint
            differing = mismatches(*((theirs, ours) if request.role == "prefill" else (ours, theirs)))
            if differing:
                reason = "; ".join(str(field) for field in differing)
                return Answer(verdict=Verdict.REFUSED, reason=f"fingerprints differ: {reason}")
        settings = self._settings
        return HelloReply(
            engine=self.ref,
            role=settings.role,
            fingerprint=self._fingerprint,
            block_size=settings.block_size,
            tp_size=settings.tp_size,
            pp_size=settings.pp_size,
            workers=self._workers,
            endpoints=self.endpoints,
            unsound=self._unsound,
        )
