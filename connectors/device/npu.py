"""An Ascend NPU as a device: streams, events and registrable memory of the rank's own die.

The only file that imports torch_npu. It uses what `tests/contract` lists of it, and plain torch operations: the
same lines run on a fake NPU in the tests. What only an NPU can show is in docs/hardware.md.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch_npu
from numpy.typing import NDArray

from ascend_pd.errors import LocalProtocolError, OperatorError
from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.device.base import Buffer, Event
from connectors.transport.base import MemoryRange

ALIGNMENT = 2 << 20
"""HCCL and ADXL register device memory from 2 MiB boundaries; vllm-ascend aligns every cache tensor so when a
kv_transfer_config is there (model_runner_v1.py, 0.23.0.post1)."""

MAX_REGIONS = 256
"""HCCL's limit of registered regions per process (vllm-ascend kv_transfer/utils/utils.py, 0.23.0.post1)."""

PLAIN_FORMATS = {-1: "undefined", 0: "NCHW", 2: "ND"}
"""ACL tensor formats without a private order: address arithmetic holds."""
FRACTAL_NZ = 29

FIRST_POLL_S, LAST_POLL_S = 50e-6, 1e-3


class NpuEvent:
    """A point in a stream. Waiting polls: `synchronize` takes no deadline, and was seen to hang under ADXL before
    CANN 8.5 (vllm-ascend mooncake_layerwise_connector.py)."""

    def __init__(self, point: Any) -> None:
        self.point = point
        """The `torch.npu.Event`."""

    def done(self) -> bool:
        return bool(self.point.query())

    def wait(self, deadline: float) -> bool:
        pause = FIRST_POLL_S
        while not self.done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_POLL_S)
        return True


@dataclass(frozen=True, slots=True)
class _Region:
    """Registrable memory and a flat int8 view of it."""

    range: MemoryRange
    flat: Any

    @property
    def end(self) -> int:
        return self.range.address + self.range.length


class NpuDevice:
    """See `connectors.device.base.Device`. Made by the worker's main thread, whose current device it takes."""

    def __init__(self) -> None:
        self._index = int(torch.npu.current_device())
        self._side = torch.npu.Stream()
        self._lock = threading.Lock()
        self._regions: list[_Region] = []

    @property
    def name(self) -> str:
        return f"npu:{self._index}"

    @property
    def index(self) -> int:
        return self._index

    def bind_thread(self) -> None:
        torch.npu.set_device(self._index)

    def adopt(self, tensors: Iterable[Any]) -> tuple[MemoryRange, ...]:
        views: dict[int, list[Any]] = {}
        for tensor in tensors:
            _check_format(tensor)
            views.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        regions = [_merged(storage, of_storage) for storage, of_storage in sorted(views.items())]
        for region in regions:
            if region.range.address % ALIGNMENT:
                raise OperatorError(
                    f"KV cache memory at {region.range.address:#x} does not begin at a 2 MiB boundary: the NPU "
                    "cannot register it",
                    "start the engine with --kv-transfer-config (vllm-ascend aligns its cache then), not with a "
                    "memory pool of its own",
                )
        self._remember(regions)
        return tuple(region.range for region in regions)

    def allocate(self, size: int) -> Buffer:
        try:
            owner = torch.empty(size + ALIGNMENT, dtype=torch.int8, device=f"npu:{self._index}")
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise OperatorError(
                f"{self.name} has no memory left for a staging buffer of {size} bytes",
                "lower memoryFraction or staging_bytes",
            ) from error
        skip = -owner.data_ptr() % ALIGNMENT
        flat = owner[skip : skip + size]
        region = _Region(MemoryRange(flat.data_ptr(), size), flat)
        self._remember([region])
        return Buffer(region.range, owner)

    def fetch(self, memory: MemoryRange) -> memoryview:
        with self._lock:
            regions = list(self._regions)
        region = regions[int(_place(regions, np.array([memory.address]), np.array([memory.length]))[0])]
        start = memory.address - region.range.address
        with torch.npu.stream(self._side):
            return memoryview(region.flat[start : start + memory.length].cpu().numpy())

    def record(self) -> Event:
        point = torch.npu.Event()
        point.record(torch.npu.current_stream())
        return NpuEvent(point)

    def copy(self, pieces: Pieces | Tiles, after: Event | None = None) -> Event:
        if after is not None and not isinstance(after, NpuEvent):
            raise LocalProtocolError(f"{self.name} cannot wait for a {type(after).__name__}")
        with self._lock:
            regions = list(self._regions)
        every = (pieces,) if isinstance(pieces, Tiles) else pieces.tiles()
        placed = [part for tiles in every for part in _placed(regions, tiles)]
        with torch.npu.stream(self._side):
            if after is not None:
                after.point.wait(self._side)
            for source, sink, tiles in placed:
                _move(source, sink, tiles)
            point = torch.npu.Event()
            point.record(self._side)
        return NpuEvent(point)

    def _remember(self, regions: list[_Region]) -> None:
        with self._lock:
            known = {region.range for region in self._regions}
            every = [*self._regions, *(region for region in regions if region.range not in known)]
            if len(every) > MAX_REGIONS:
                raise OperatorError(
                    f"{len(every)} memory regions on {self.name}, the NPU registers {MAX_REGIONS} per process",
                    "use a model or a parallel size with fewer layers per worker",
                )
            self._regions = sorted(every, key=lambda region: region.range.address)


def _check_format(tensor: Any) -> None:
    number = int(torch_npu.get_npu_format(tensor))
    if number not in PLAIN_FORMATS:
        what = "NZ (fractal)" if number == FRACTAL_NZ else f"number {number}"
        raise OperatorError(
            f"the KV cache is in tensor format {what}: its tokens and heads have no address of their own",
            "take enable_kv_nz out of --additional-config",
        )


def _merged(storage: int, tensors: list[Any]) -> _Region:
    """One region from the lowest to the highest byte that these views of one storage cover.

    Not the storage itself: vllm-ascend allocates 2 MiB too much and lets the views begin at a boundary.
    """
    start = min(tensor.data_ptr() for tensor in tensors)
    end = max(tensor.data_ptr() + _extent(tensor) for tensor in tensors)
    flat = tensors[0].view(torch.int8).as_strided((end - start,), (1,), start - storage)
    return _Region(MemoryRange(start, end - start), flat)


def _extent(tensor: Any) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def _place(regions: list[_Region], address: NDArray[np.int64], length: NDArray[np.int64]) -> NDArray[np.int64]:
    """The number of the region that each piece lies in.

    Raises:
        LocalProtocolError: a piece that is not wholly inside one.
    """
    starts = np.array([region.range.address for region in regions], dtype=np.int64)
    ends = np.array([region.end for region in regions], dtype=np.int64)
    place = np.searchsorted(starts, address, side="right") - 1
    outside = np.ones(address.shape, dtype=bool) if not regions else (place < 0) | (address + length > ends[place])
    if bool(outside.any()):
        wrong = int(address[int(np.argmax(outside))])
        raise LocalProtocolError(f"copy at {wrong:#x} is outside the memory of this worker")
    return place


def _placed(regions: list[_Region], tiles: Tiles) -> list[tuple[_Region, _Region, Tiles]]:
    """The tiles in groups that share both regions.

    Raises:
        LocalProtocolError: a tile that is not wholly inside one region on each side.
    """
    source = _place(regions, tiles.source, _extents(tiles, tiles.source_step))
    sink = _place(regions, tiles.sink, _extents(tiles, tiles.sink_step))
    pair = source * len(regions) + sink
    parts = []
    for number in np.unique(pair).tolist():
        here = pair == number
        part = replace(tiles, source=tiles.source[here], sink=tiles.sink[here])
        parts.append((regions[number // len(regions)], regions[number % len(regions)], part))
    return parts


def _extents(tiles: Tiles, step: int) -> NDArray[np.int64]:
    return np.full(len(tiles), (tiles.count - 1) * step + tiles.length, np.int64)


def _move(source: _Region, sink: _Region, tiles: Tiles) -> None:
    """One gather and one scatter when the addresses lie on a grid of the tiles' length, else one copy per piece.

    Rows are whole and never overlap: torch_npu may carry out an operation on a strided view by copying all of the
    view there and back, other blocks of the cache included.
    """
    if len(tiles) * tiles.count > 1:
        from_rows = _rows(source, tiles.source, tiles.source_step, tiles)
        to_rows = _rows(sink, tiles.sink, tiles.sink_step, tiles)
        if from_rows is not None and to_rows is not None:
            to_rows[0].index_copy_(0, to_rows[1], from_rows[0].index_select(0, from_rows[1]))
            return
    pieces = tiles.pieces()
    starts, ends = pieces.source - source.range.address, pieces.sink - sink.range.address
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        from_bytes = source.flat[start : start + tiles.length]
        sink.flat[end : end + tiles.length].copy_(from_bytes, non_blocking=True)


def _rows(region: _Region, address: NDArray[np.int64], step: int, tiles: Tiles) -> tuple[Any, Any] | None:
    """The part of a region that the tiles span as rows of their length, and on the device which rows are meant."""
    length, count = tiles.length, tiles.count
    first = int(address.min())
    index, rest = np.divmod(address - first, length)
    if bool(rest.any()) or (step % length and count > 1):
        return None
    num_rows = int(index.max()) + (count - 1) * step // length + 1
    begin = first - region.range.address
    rows = region.flat[begin : begin + num_rows * length].view(num_rows, length)
    chosen = np.add.outer(index, np.arange(count, dtype=np.int64) * (step // length)).ravel()
    return rows, torch.from_numpy(chosen).to(rows.device)
