"""One transfer on one rank of P: what is known of it, what it says to D, what it writes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from ascend_pd.errors import LocalProtocolError
from ascend_pd.layout.plan import salt_of
from ascend_pd.wire.identity import EngineRef
from ascend_pd.wire.messages import Claim, Pushed, WorkerInfo
from ascend_pd.wire.params import Reservation
from connectors.handshake import Address
from connectors.layerwise.metadata import PushBegin, PushReport
from connectors.layerwise.progress import PushProgress
from connectors.peers import Peer
from connectors.transport.stage_peer import StagedRequest


@dataclass(slots=True)
class Push:
    """One transfer on this rank."""

    order: PushBegin
    progress: PushProgress
    began: float
    block_ids: list[list[int]] = field(default_factory=list)
    wait: Future[Reservation] | None = None
    reservation: Reservation | None = None
    sink: Peer | None = None
    via: str = ""
    """The session of the write that runs, or ran last."""
    preempted: bool = False
    """vLLM waits for the writes in flight: nothing else is worth waiting for."""
    pumping: bool = False
    sealed: bool = False
    bytes_sent: int = 0
    write_s: float = 0.0
    computed_at: float = 0.0
    ended: str | None = None
    """Why this rank is through with it; D is told when its reservation comes later than that."""

    @property
    def transfer_id(self) -> str:
        return self.order.transfer_id

    @property
    def reserved(self) -> Reservation:
        """D's reservation, once it is known."""
        if self.reservation is None:
            raise LocalProtocolError("nothing is reserved")
        return self.reservation

    @property
    def address(self) -> Address:
        """D's side channel."""
        return self.reserved.sink_host, self.reserved.sink_port

    def claim(self, source: EngineRef, num_ranks: int, side_address: Address, endpoints: int) -> Claim:
        """May this engine write into the reservation, through D's sessions of this count?"""
        return Claim(
            transfer_id=self.transfer_id,
            sink_epoch=self.reserved.sink_epoch,
            source=source,
            source_ranks=num_ranks,
            prompt_hash=self.order.prompt_hash,
            source_host=side_address[0],
            source_port=side_address[1],
            endpoints=endpoints,
        )

    def pushed(self, source: EngineRef, rank: int, sink: EngineRef) -> Pushed:
        """This rank's writes are all acknowledged."""
        return Pushed(
            transfer_id=self.transfer_id,
            sink_epoch=sink.epoch,
            source=source,
            source_rank=rank,
            num_tokens=self.order.num_prompt_tokens,
            bytes_sent=self.bytes_sent,
        )

    def report(self, now: float) -> PushReport:
        """What was measured, D having answered; `exposed` is the time since the prefill's end, 0 when that is yet
        to come: the last layer's cache was there while the rest of the step ran."""
        exposed_s = max(0.0, now - self.computed_at) if self.computed_at else 0.0
        timings = {"write": self.write_s * 1e3, "push": (now - self.began) * 1e3, "exposed": exposed_s * 1e3}
        return PushReport(self.transfer_id, "pushed", bytes_moved=self.bytes_sent, timings_ms=timings)

    def requests(self) -> Iterator[tuple[WorkerInfo, StagedRequest]]:
        """What moves to each of D's workers, as the end that moves it names it to the other.

        Raises:
            LocalProtocolError: D has granted nothing yet.
        """
        if self.sink is None:
            raise LocalProtocolError("a write before the grant")
        salt = salt_of(self.transfer_id)
        for worker, pair in self.sink.plan.pairs(salt).items():
            yield self.sink.workers[worker], StagedRequest(pair, salt, self.block_ids, self.reserved.block_ids)
