"""A request's bytes between this worker and one peer worker: large pieces as they are, small ones staged, with the
peer's help where it offers any, else by this worker alone as far as the layouts allow.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable
from functools import cache

from ascend_pd.errors import TransferError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.pieces import Pieces, Tiles
from ascend_pd.layout.staging import Cells, Efficiency, Split, Staging, read, size_of, split, write
from ascend_pd.wire.messages import WorkerInfo
from connectors.device.base import Device
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.base import Transport
from connectors.transport.stage_peer import StagedRequest, StagePeer
from connectors.transport.staging import Batch, SlotPool, StagingPipeline

MAX_PEERS = 256


class Mover:
    """One per worker and direction. Thread-safe; transfers with different peers run side by side.

    Args:
        me: names this life of this worker, a nonce; `layout`: its own.
        push: this worker writes (layer-wise P); otherwise it reads (pull D).
        staging_bytes: bound of this worker's staging memory; 0 moves every piece by itself.
    """

    def __init__(
        self,
        device: Device,
        transport: Transport,
        client: SideChannelClient,
        me: str,
        layout: KVLayout,
        *,
        push: bool,
        staging_bytes: int,
    ) -> None:
        self._transport = transport
        self._client = client
        self._me = me
        self._layout = layout
        self._push = push
        self._pool = SlotPool(device, transport, staging_bytes)
        self._pipeline = StagingPipeline(
            device, transport, self._pool, f"{'push' if push else 'pull'}-{layout.worker}"
        )
        self._peers: OrderedDict[str, StagePeer] = OrderedDict()
        self._sequence = itertools.count(1)
        self._lock = threading.Lock()

    def move(
        self,
        worker: WorkerInfo,
        request: StagedRequest,
        tokens: tuple[int, int],
        deadline: float,
        via: str = "",
        layers: Collection[int] | None = None,
    ) -> int:
        """Read or write the cache of `tokens` (first, end) of one request. Returns the number of bytes.

        Raises:
            TransferError: as `Transport.read` and `Transport.write`.
            RemoteProtocolError: block ids that cannot be right.
        """
        stage = self._stage(worker)
        if stage is None:
            return self._alone(worker, request, tokens, deadline, via, layers)
        with stage.lock:
            slot_bytes = stage.open(deadline)
            if slot_bytes:
                slot_bytes = min(slot_bytes, self._pool.slot_bytes)
                parts = self._split(request, tokens, Staging.BOTH, slot_bytes, layers)
                batches = (stage.write_batches if self._push else stage.read_batches)(
                    request, parts.staged, deadline
                )
                try:
                    return self._move(worker, parts, batches, request, deadline, via)
                except TransferError:
                    stage.failed()
                    raise
        return self._alone(worker, request, tokens, deadline, via, layers)

    def fenced(self) -> None:
        """The transport was rotated."""
        self._pool.fenced()

    def close(self) -> None:
        """End the copier's thread."""
        self._pipeline.close()

    def _stage(self, worker: WorkerInfo) -> StagePeer | None:
        if not worker.stages or not self._pool.num_slots:
            return None
        key = worker.service_life
        with self._lock:
            stage = self._peers.get(key)
            if stage is None:
                stage = self._peers[key] = StagePeer(
                    self._client,
                    (worker.service_host, worker.service_port),
                    key,
                    self._me,
                    self._layout,
                    self._sequence,
                    push=self._push,
                )
                idle = [life for life, peer in self._peers.items() if not peer.lock.locked() and life != key]
                for life in idle[: max(0, len(self._peers) - MAX_PEERS)]:
                    del self._peers[life]
            self._peers.move_to_end(key)
            return stage

    def _alone(
        self,
        worker: WorkerInfo,
        request: StagedRequest,
        tokens: tuple[int, int],
        deadline: float,
        via: str,
        layers: Collection[int] | None,
    ) -> int:
        """Without the peer's help."""
        staging = Staging.SOURCE if self._push else Staging.SINK
        if not self._pool.num_slots:
            staging = Staging.NONE
        parts = self._split(request, tokens, staging, self._pool.slot_bytes, layers)
        batches = (_one_sided(request, cells, push=self._push) for cells in parts.staged)
        return self._move(worker, parts, batches, request, deadline, via)

    def _split(
        self,
        request: StagedRequest,
        tokens: tuple[int, int],
        staging: Staging,
        slot_bytes: int,
        layers: Collection[int] | None,
    ) -> Split:
        return split(
            request.pair,
            request.source_block_ids,
            request.sink_block_ids,
            *tokens,
            staging=staging,
            efficiency=Efficiency(self._transport.efficient_piece_bytes, slot_bytes),
            layers=layers,
        )

    def _move(
        self,
        worker: WorkerInfo,
        parts: Split,
        batches: Iterable[Batch],
        request: StagedRequest,
        deadline: float,
        via: str,
    ) -> int:
        direct, staged = (
            (self._transport.write, self._pipeline.write)
            if self._push
            else (self._transport.read, self._pipeline.read)
        )
        if len(parts.direct):
            direct(worker.session, parts.direct, deadline, via)
        if parts.staged:
            staged(worker.session, batches, deadline, via)
        return parts.direct.num_bytes + sum(size_of(request.pair, cells) for cells in parts.staged)


def _one_sided(request: StagedRequest, cells: Cells, *, push: bool) -> Batch:
    """A batch in which only this worker stages; planned once, when its slot is known."""
    lists = request.source_block_ids, request.sink_block_ids

    @cache
    def planned(slot: int) -> tuple[Pieces, tuple[Tiles, ...]]:
        if push:
            gathered, wire = write(request.pair, cells, *lists, slot)
            return wire, gathered
        return read(request.pair, cells, *lists, slot)

    return Batch(wire=lambda slot: planned(slot)[0], local=lambda slot: planned(slot)[1])
