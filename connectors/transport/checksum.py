"""Whether what was received is what was sent: each end adds up its own cache, the end that moved the bytes compares.

For hunting corrupt transfers, off by default (`connector.checksum`): both ends pass over the bytes once more. A batch
at a time is packed into a scratch slot, so that equal caches are equal bytes whatever their layouts are.
"""

from __future__ import annotations

import threading
import time
import uuid
import zlib
from collections.abc import Callable, Collection

from ascend_pd.errors import AscendPdError, ProtocolError, RemoteProtocolError, TransferError, UnreachableError
from ascend_pd.layout.description import KVLayout
from ascend_pd.layout.digest import batches, packed
from ascend_pd.layout.plan import BlockIds, PairPlan
from ascend_pd.layout.staging import Cells, size_of
from ascend_pd.wire.messages import Checksum, ChecksumReply, Reply, WorkerInfo
from connectors.device.base import Buffer, Device
from connectors.sidechannel.client import SideChannelClient
from connectors.transport.base import MemoryRange
from connectors.transport.stage_peer import StagedRequest
from connectors.transport.staging import DEFAULT_SLOT_BYTES as SLOT_BYTES

COPY_TIMEOUT_S = 5.0


class Adder:
    """Adds up parts of this worker's cache. Thread-safe; takes its scratch memory at the first use."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._scratch: Buffer | None = None
        self._lock = threading.Lock()

    def crc32(self, pair: PairPlan, cells: Cells, block_ids: BlockIds, *, of_source: bool) -> int:
        """Of one batch, `of_source` if this worker is the source of the pair.

        Raises:
            RemoteProtocolError: a batch or block ids that do not exist, or a batch larger than a slot.
            TransferError: the device did not copy in time.
        """
        size = size_of(pair, cells)
        if size > SLOT_BYTES:
            raise RemoteProtocolError(f"a batch of {size} bytes to add up, the limit is {SLOT_BYTES}")
        with self._lock:
            if self._scratch is None:
                self._scratch = self._device.allocate(SLOT_BYTES)
            slot = self._scratch.range.address
            deadline = time.monotonic() + COPY_TIMEOUT_S
            for part in packed(pair, cells, block_ids, slot, of_source=of_source):
                if not self._device.copy(part).wait(deadline):
                    raise TransferError("the device did not copy a batch to be added up in time", quiesced=True)
            return zlib.crc32(self._device.fetch(MemoryRange(slot, size)))


class Verifier:
    """The active end. Thread-safe.

    Args:
        layout: this worker's; `push`: it is the source.
    """

    def __init__(self, device: Device, client: SideChannelClient, layout: KVLayout, *, push: bool) -> None:
        self._adder = Adder(device)
        self._client = client
        self._layout = layout
        self._push = push

    def verify(
        self,
        worker: WorkerInfo,
        request: StagedRequest,
        tokens: tuple[int, int],
        deadline: float,
        layers: Collection[int] | None = None,
        given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Compare the cache of `tokens` (first, end) on both ends, after it was moved.

        Args:
            given_up: asked between batches; what it leaves unchecked is no error.

        Raises:
            TransferError: it differs, the peer does not say in time, or cannot; nothing is in flight.
        """
        try:
            self._compare(worker, request, tokens, deadline, layers, given_up)
        except TransferError:
            raise
        except AscendPdError as error:
            raise TransferError(f"comparing with the peer: {error}", quiesced=True) from error

    def _compare(
        self,
        worker: WorkerInfo,
        request: StagedRequest,
        tokens: tuple[int, int],
        deadline: float,
        layers: Collection[int] | None,
        given_up: Callable[[], bool],
    ) -> None:
        if not worker.checksums:
            raise RemoteProtocolError("connector.checksum is on here and off at the peer: set it for both pools")
        lists = request.source_block_ids, request.sink_block_ids
        parts = batches(request.pair, *lists, *tokens, slot_bytes=SLOT_BYTES, layers=layers)
        ours, theirs = lists if self._push else (lists[1], lists[0])
        their_ids = tuple(tuple(map(int, ids)) for ids in theirs)
        for cells in parts:
            if given_up():
                return
            message = Checksum(
                question=uuid.uuid4().hex,
                life=worker.service_life,
                layout=self._layout,
                push=self._push,
                choice=request.choice,
                cells=cells,
                block_ids=their_ids,
            )
            # Both ends add up at the same time.
            asked = self._client.submit(
                (worker.service_host, worker.service_port), message, max(0.01, deadline - time.monotonic())
            )
            here = self._adder.crc32(request.pair, cells, ours, of_source=self._push)
            try:
                there = _value(asked.result())
            except (ProtocolError, UnreachableError) as error:
                raise TransferError(f"the peer's checksum: {error}", quiesced=True) from error
            if here != there:
                raise TransferError(_differs(request.pair, cells), quiesced=True)


def _value(reply: Reply) -> int:
    if not isinstance(reply, ChecksumReply):
        why = getattr(reply, "reason", "") or type(reply).__name__
        raise TransferError(f"the peer gave no checksum: {why}", quiesced=True)
    return reply.crc32


def _differs(pair: PairPlan, cells: Cells) -> str:
    strand = pair.strands[cells.strand]
    layers = sorted({int(strand.layers[region]) for region in cells.regions})
    unit = strand.source.unit_tokens
    first, end = cells.units[0][0] * unit, sum(cells.units[-1]) * unit
    return (
        f"checksum: layers {layers[0]}-{layers[-1]} of tokens {first}-{end - 1} are not received as they were sent"
    )
