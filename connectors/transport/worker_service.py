"""What a worker does for peers that move bytes to or from its cache: gather and scatter what they stage, and add up
what they moved.

A worker's own thread answers, so it works in an idle engine and during a long step. What may still be read or
written is never handed to another: a pull's slots after longer than P's blocks can be held (whoever reads them
then is told GONE), a push's slots only after a fence of this worker's endpoint.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ascend_pd.errors import RemoteProtocolError, TransferError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.pieces import Tiles
from ascend_pd.layout.staging import gather, scatter, size_of
from ascend_pd.wire.messages import (
    Answer,
    Checksum,
    ChecksumReply,
    Reply,
    Request,
    Stage,
    StageOpen,
    StageReady,
    Verdict,
)
from connectors.device.base import Buffer, Device, Event
from connectors.sidechannel.server import SideChannelServer
from connectors.transport.base import Transport
from connectors.transport.checksum import Adder
from connectors.transport.pair_plans import PairPlans
from connectors.transport.staging import slot_sizes

logger = logging.getLogger(__name__)

COPY_TIMEOUT_S = 5.0
MAX_CALLERS = 16
"""Peers that can hold slots at once; a further one moves its pieces unstaged."""
NUM_SLOTS = 2
MAX_SUMS = 256
"""Checksums remembered for repeated questions."""


@dataclass(slots=True)
class _Lease:
    """One caller's slots."""

    caller: str
    push: bool
    layout: KVLayout
    buffer: Buffer
    last_used: float
    sequence: dict[int, int] = field(default_factory=dict)


class WorkerService:
    """One per worker. Listens from the start; `close` ends its thread.

    Args:
        layout: this worker's.
        staging_bytes: memory per caller; 0 stages nothing.
        checksums: add up what peers moved.
        idle_s: a pull's slots may go to another caller after this long without use; above the longest hold.

    Raises:
        OperatorError: `host` cannot be listened on.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        layout: KVLayout,
        *,
        host: str,
        secret: bytes,
        staging_bytes: int,
        checksums: bool = False,
        idle_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._transport = transport
        self.checksums = checksums
        self._plans = PairPlans(layout)
        self._adder = Adder(device)
        self._sums: OrderedDict[str, int] = OrderedDict()
        self.life = secrets.token_hex(8)
        """Made anew with every service: what is meant for a former one is refused."""
        slots, self._slot_bytes = slot_sizes(staging_bytes)
        self._num_slots = min(NUM_SLOTS, slots)
        self._idle_s = idle_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._spare: list[Buffer] = []
        self._given_up: list[Event] = []
        """Scatters that did not end in time, and below the slots that they read."""
        self._lost: list[Buffer] = []
        self._lock = threading.Lock()
        self._bound = threading.local()
        self._server = SideChannelServer(host, 0, secret, self._answer, f"worker-{layout.worker}")
        self._server.start()

    @property
    def port(self) -> int:
        """Where peers reach it; 0 when there is nothing that it does."""
        return self._server.port if self.stages or self.checksums else 0

    @property
    def stages(self) -> bool:
        """Whether it has slots."""
        return self._num_slots > 0

    def fenced(self) -> None:
        """The transport was rotated: nobody can read or write the slots any more, all leases are void. A new life,
        so that callers which were granted nothing meanwhile ask for slots anew.

        Raises:
            TransferError: a scatter that was given up may still run; the blocks it writes are not safe.
        """
        with self._lock:
            until = time.monotonic() + COPY_TIMEOUT_S
            if not all(copy.wait(until) for copy in self._given_up):
                raise TransferError("a staging copy that was given up is still running", quiesced=False)
            self._given_up.clear()
            self._spare += [lease.buffer for lease in self._leases.values()] + self._lost
            self._lost.clear()
            self._leases.clear()
            self.life = secrets.token_hex(8)

    def close(self) -> None:
        """Stop answering. Safe to repeat."""
        self._server.close()

    def _answer(self, request: Request) -> Reply:
        if not getattr(self._bound, "done", False):
            self._device.bind_thread()
            self._bound.done = True
        with self._lock:
            if isinstance(request, StageOpen):
                return self._open(request)
            if isinstance(request, Stage):
                return self._stage(request)
            if isinstance(request, Checksum):
                return self._add_up(request)
        raise RemoteProtocolError("a worker answers Stage and Checksum messages only")

    def _add_up(self, request: Checksum) -> Reply:
        if request.life != self.life:
            return Answer(verdict=Verdict.EPOCH, reason="this worker was restarted")
        if not self.checksums:
            return Answer(verdict=Verdict.REFUSED, reason="connector.checksum is off")
        known = self._sums.get(request.question)
        if known is not None:
            return ChecksumReply(crc32=known)
        plan = self._plans.plan(request.layout, request.choice, push=request.push)
        crc32 = self._adder.crc32(plan, request.cells, request.block_ids, of_source=not request.push)
        self._sums[request.question] = crc32
        if len(self._sums) > MAX_SUMS:
            self._sums.popitem(last=False)
        return ChecksumReply(crc32=crc32)

    def _open(self, request: StageOpen) -> Reply:
        if request.life != self.life:
            return Answer(verdict=Verdict.EPOCH, reason="this worker was restarted")
        if not self._num_slots:
            return Answer(verdict=Verdict.REFUSED, reason="staging is off")
        caller = f"{request.caller}/{request.layout.worker}/{'push' if request.push else 'pull'}"
        for token, lease in list(self._leases.items()):
            if lease.caller == caller and lease.layout == request.layout:
                # A pull's slots are only read by the caller: its failed transfer can do no harm to the next one.
                if token != request.void or lease.push:
                    return self._ready(token, lease)
                self._spare.append(self._leases.pop(token).buffer)
        buffer = self._free_buffer()
        if buffer is None:
            logger.warning("%d peers hold staging slots: the pieces of %s go unstaged", MAX_CALLERS, caller)
            return Answer(verdict=Verdict.REFUSED, reason=f"{MAX_CALLERS} peers hold staging slots")
        token = secrets.token_hex(8)
        lease = _Lease(caller, request.push, request.layout, buffer, self._clock())
        self._leases[token] = lease
        return self._ready(token, lease)

    def _ready(self, token: str, lease: _Lease) -> StageReady:
        base = lease.buffer.range.address
        slots = tuple(base + i * self._slot_bytes for i in range(self._num_slots))
        return StageReady(token=token, slots=slots, slot_bytes=self._slot_bytes)

    def _free_buffer(self) -> Buffer | None:
        if self._spare:
            return self._spare.pop()
        if len(self._leases) < MAX_CALLERS:
            buffer = self._device.allocate(self._num_slots * self._slot_bytes)
            self._transport.register([buffer.range])
            return buffer
        oldest = min((t for t, lease in self._leases.items() if not lease.push), key=self._last_used, default=None)
        if oldest is None or self._clock() - self._last_used(oldest) <= self._idle_s:
            return None
        return self._leases.pop(oldest).buffer

    def _last_used(self, token: str) -> float:
        return self._leases[token].last_used

    def _stage(self, request: Stage) -> Reply:
        lease = self._leases.get(request.token)
        if lease is None or not 0 <= request.slot < self._num_slots:
            return Answer(verdict=Verdict.GONE, reason="this lease of staging slots has ended")
        lease.last_used = self._clock()
        last = lease.sequence.get(request.slot, 0)
        if request.sequence <= last:
            repeated = request.sequence == last
            return Answer(verdict=Verdict.OK if repeated else Verdict.GONE, reason="" if repeated else "late")
        self._copy(request.token, lease, self._pieces(lease, request))
        lease.sequence[request.slot] = request.sequence
        return Answer(verdict=Verdict.OK)

    def _pieces(self, lease: _Lease, request: Stage) -> tuple[Tiles, ...]:
        plan = self._plans.plan(lease.layout, request.choice, push=lease.push)
        if size_of(plan, request.cells) > self._slot_bytes:
            raise RemoteProtocolError("a staged batch is larger than a slot")
        slot = lease.buffer.range.address + request.slot * self._slot_bytes
        move = scatter if lease.push else gather
        return move(plan, request.cells, request.block_ids, slot)

    def _copy(self, token: str, lease: _Lease, parts: tuple[Tiles, ...]) -> None:
        deadline = time.monotonic() + COPY_TIMEOUT_S
        for part in parts:
            copy = self._device.copy(part)
            if not copy.wait(deadline):
                if lease.push:
                    # It may yet write into blocks: only a fence that has waited for it makes them safe.
                    self._given_up.append(copy)
                    self._lost.append(self._leases.pop(token).buffer)
                raise RemoteProtocolError(f"a staging copy did not finish within {COPY_TIMEOUT_S:g} s")
