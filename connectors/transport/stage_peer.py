"""The active end of two-sided staging: makes batches whose other half a peer's `WorkerService` does.

Reading, the peer is asked for one batch more than is being read, so that its gather overlaps with the wire.
Writing, a slot of the peer is written again only after the peer has scattered what it held.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec
import numpy as np

from ascend_pd.errors import ProtocolError, TransferError, UnreachableError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.pieces import Pieces
from ascend_pd.layout.plan import BlockIds, PairPlan
from ascend_pd.layout.staging import Cells, gather, scatter, size_of
from ascend_pd.wire.messages import Answer, Reply, Stage, StageOpen, StageReady, Verdict
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.staging import Batch

WIRE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StagedRequest:
    """One request between this worker and one peer worker."""

    pair: PairPlan
    choice: int
    source_block_ids: BlockIds
    sink_block_ids: BlockIds


class StagePeer:
    """One peer worker, in one direction. One transfer at a time: hold `lock` from `open` to the end of it.

    Args:
        address: the peer's host and `WorkerInfo.service_port`.
        life: the peer's `WorkerInfo.service_life`.
        me, layout: this worker.
        sequence: numbers the batches, never twice the same for one `me`: a lease may outlive this object.
    """

    def __init__(
        self,
        client: SideChannelClient,
        address: tuple[str, int],
        life: str,
        me: str,
        layout: KVLayout,
        sequence: Iterator[int],
        *,
        push: bool,
    ) -> None:
        self.lock = threading.Lock()
        self._client = client
        self._address = address
        self._opening = StageOpen(life=life, caller=me, layout=layout, push=push)
        self._ready: StageReady | None = None
        self._void = ""
        self._sequence = sequence

    def open(self, deadline: float) -> int:
        """Size of the peer's slots; 0 when it has none for us, and pieces go unstaged.

        Raises:
            TransferError: no answer; nothing was submitted.
        """
        if self._ready is None:
            opening = msgspec.structs.replace(self._opening, void=self._void)
            reply = self._result(self._client.submit(self._address, opening, self._patience(deadline)))
            if isinstance(reply, StageReady) and reply.token != self._void:
                self._ready = reply
        return self._ready.slot_bytes if self._ready and self._ready.slots else 0

    def read_batches(self, request: StagedRequest, staged: Sequence[Cells], deadline: float) -> Iterator[Batch]:
        """Batches for `StagingPipeline.read`, to be consumed one by one."""
        slots = self._slots()

        def ask(index: int) -> Future[Reply] | None:
            if index >= len(staged):
                return None
            blocks = request.source_block_ids
            return self._ask(index % len(slots), request.choice, staged[index], blocks, deadline)

        def batch(cells: Cells, remote: int, asked: Future[Reply] | None) -> Batch:
            size = size_of(request.pair, cells)
            return Batch(
                wire=lambda slot: _whole(remote, slot, size),
                local=lambda slot: scatter(request.pair, cells, request.sink_block_ids, slot),
                before=lambda until: self._granted(asked, quiesced=True),
            )

        current = ask(0)
        for index, cells in enumerate(staged):
            # Whoever takes this batch has read the one before it, so that one's slot is free for the next.
            following = ask(index + 1)
            yield batch(cells, slots[index % len(slots)], current)
            current = following

    def write_batches(self, request: StagedRequest, staged: Sequence[Cells], deadline: float) -> Iterator[Batch]:
        """Batches for `StagingPipeline.write`."""
        slots = self._slots()
        asked: dict[int, Future[Reply]] = {}

        def ask(index: int, cells: Cells) -> None:
            slot, blocks = index % len(slots), request.sink_block_ids
            asked[index] = self._ask(slot, request.choice, cells, blocks, deadline)

        def batch(index: int, cells: Cells) -> Batch:
            remote, size = slots[index % len(slots)], size_of(request.pair, cells)
            return Batch(
                local=lambda slot: gather(request.pair, cells, request.source_block_ids, slot),
                before=lambda until: self._granted(asked.pop(index - len(slots), None), quiesced=False),
                wire=lambda slot: _whole(slot, remote, size),
                after=lambda until: ask(index, cells),
                settle=lambda until: self._granted(asked.pop(index, None), quiesced=False),
            )

        for index, cells in enumerate(staged):
            yield batch(index, cells)

    def failed(self) -> None:
        """A transfer failed: bytes of it may still land in the peer's slots, so this lease is not used again."""
        if self._ready is not None:
            self._void = self._ready.token
            self._ready = None

    def _slots(self) -> tuple[int, ...]:
        if self._ready is None or not self._ready.slots:
            raise TransferError("the peer has no staging slots for us", quiesced=True)
        return self._ready.slots

    def _ask(self, slot: int, choice: int, cells: Cells, block_ids: BlockIds, deadline: float) -> Future[Reply]:
        if self._ready is None:
            raise TransferError("the lease of the peer's staging slots has ended", quiesced=True)
        message = Stage(
            token=self._ready.token,
            sequence=next(self._sequence),
            slot=slot,
            choice=choice,
            cells=cells,
            block_ids=tuple(tuple(ids) for ids in block_ids),
        )
        return self._client.submit(self._address, message, self._patience(deadline))

    def _granted(self, future: Future[Reply] | None, *, quiesced: bool) -> None:
        if future is None:
            return
        reply = self._result(future, quiesced=quiesced)
        if not isinstance(reply, Answer) or reply.verdict is not Verdict.OK:
            why = f"{reply.verdict.value}: {reply.reason}" if isinstance(reply, Answer) else type(reply).__name__
            raise TransferError(f"the peer did not stage a batch ({why})", quiesced=quiesced)

    def _result(self, future: Future[Reply], *, quiesced: bool = True) -> Reply:
        try:
            return future.result()
        except (ProtocolError, UnreachableError) as error:
            raise TransferError(f"staging with the peer: {error}", quiesced=quiesced) from error

    def _patience(self, deadline: float) -> float:
        return max(0.01, deadline - time.monotonic())


def _whole(source: int, sink: int, size: int) -> Pieces:
    """A slot's content in pieces that the transport can send on several connections at once."""
    at = np.arange(0, size, WIRE_BYTES, dtype=np.int64)
    return Pieces(source + at, sink + at, np.minimum(WIRE_BYTES, size - at))
