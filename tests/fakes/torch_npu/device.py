"""A fake NPU: streams that lag behind the host, over real torch tensors in host memory.

Work is queued, never done at once: the test decides when a stream moves on (`step`, `drain`, or a background
thread with `running`). Each stream keeps its order, the streams among themselves do not, and events complete only
when their stream gets there. So a program that touches memory before its event is done sees old bytes here too.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALIGNMENT = 2 << 20


class Event:
    """Like `torch.npu.Event`: done at once until it is recorded."""

    def __init__(self, npu: FakeNpu) -> None:
        self._npu = npu
        self._pending: object | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._npu.current_stream()
        mark = self._pending = object()

        def reached() -> None:
            if self._pending is mark:
                self._pending = None

        stream.queue.append(reached)

    def query(self) -> bool:
        return self._pending is None

    def wait(self, stream: Stream | None = None) -> None:
        """The stream goes on only when this event, as recorded by now, is done."""
        stream = stream or self._npu.current_stream()
        mark = self._pending
        stream.queue.append(_Gate(lambda: mark is None or self._pending is not mark))


class _Gate:
    def __init__(self, is_open: Callable[[], bool]) -> None:
        self.is_open = is_open


class Stream:
    """A queue of work on one die."""

    def __init__(self, npu: FakeNpu, device: int) -> None:
        self.device = device
        self.queue: deque[Callable[[], None] | _Gate] = deque()
        npu.streams.append(self)

    @property
    def blocked(self) -> bool:
        """Nothing to do, or waiting for an event that is not done."""
        return not self.queue or (isinstance(self.queue[0], _Gate) and not self.queue[0].is_open())


class _Deferred(TorchDispatchMode):
    """Queues what torch operations do to memory; views are made at once, for they touch none."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if func.is_view or packet in {torch.ops.aten.detach, torch.ops.aten._to_copy}:
            return func(*args, **kwargs)
        if packet in {torch.ops.aten.copy_, torch.ops.aten.index_copy_}:
            self._stream.queue.append(lambda: func(*args, **kwargs))
            return args[0]
        if packet is torch.ops.aten.index_select:
            source, dim, index = args
            shape = list(source.shape)
            shape[dim] = index.numel()
            out = source.new_empty(shape)
            self._stream.queue.append(lambda: out.copy_(func(source, dim, index)))
            return out
        raise NotImplementedError(f"the fake NPU does not know {func}")


class FakeNpu:
    """Several dies of one host. What `torch.npu` offers is here under the same names."""

    def __init__(self, dies: int = 2, memory_bytes: int = 1 << 30) -> None:
        self.dies = dies
        self.free_bytes = memory_bytes
        self.streams: list[Stream] = []
        self.formats: dict[int, int] = {}
        """ACL format by data pointer; ND when absent."""
        self._default = [Stream(self, die) for die in range(dies)]
        self._thread = threading.local()
        self._guard = threading.RLock()

    # torch.npu

    def Event(self) -> Event:
        return Event(self)

    def Stream(self) -> Stream:
        return Stream(self, self.current_device())

    def set_device(self, index: int) -> None:
        if not 0 <= index < self.dies:
            raise RuntimeError(f"Invalid device ID {index}: this host has {self.dies}")
        self._thread.device = index

    def current_device(self) -> int:
        """Of the calling thread; a new thread is on die 0, whatever the others chose."""
        return getattr(self._thread, "device", 0)

    def current_stream(self) -> Stream:
        chosen = getattr(self._thread, "stream", None)
        return chosen or self._default[self.current_device()]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_device(), getattr(self._thread, "stream", None)
        self._thread.device, self._thread.stream = stream.device, stream
        try:
            with _Deferred(stream):
                yield
        finally:
            self._thread.device, self._thread.stream = before

    # torch_npu

    def get_npu_format(self, tensor: torch.Tensor) -> int:
        return self.formats.get(tensor.data_ptr(), 2)

    # torch factories with a device

    def empty(
        self, real: Callable[..., torch.Tensor], *size: Any, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        if not str(device).startswith("npu"):
            return real(*size, device=device, **kwargs)
        wanted = real(*size, device="meta", **kwargs)
        if wanted.nbytes > self.free_bytes:
            raise RuntimeError(f"NPU out of memory. Tried to allocate {wanted.nbytes} bytes")
        self.free_bytes -= wanted.nbytes
        return real(*size, **kwargs)

    # for tests

    def compute(self, work: Callable[[], Any]) -> None:
        """Queue a kernel on the calling thread's current stream."""
        self.current_stream().queue.append(work)

    def step(self, stream: Stream) -> bool:
        """Let one stream do its next piece of work; says whether it could."""
        with self._guard:
            if stream.blocked:
                return False
            work = stream.queue.popleft()
            if not isinstance(work, _Gate):
                work()
            return True

    def drain(self, seed: int = 0) -> None:
        """Let all streams finish, interleaved by chance."""
        choose = random.Random(seed)
        while ready := [stream for stream in self.streams if not stream.blocked]:
            self.step(choose.choice(ready))
        stuck = [stream for stream in self.streams if stream.queue]
        if stuck:
            raise AssertionError(f"{len(stuck)} streams wait for events that nobody will complete")

    @contextmanager
    def running(self, seed: int = 0, lag_s: float = 0.0005) -> Iterator[None]:
        """Streams move on in the background, each piece of work late by up to `lag_s`."""
        stop = threading.Event()
        choose = random.Random(seed)

        def run() -> None:
            while not stop.is_set():
                with self._guard:
                    ready = [stream for stream in list(self.streams) if not stream.blocked]
                    if ready:
                        self.step(choose.choice(ready))
                time.sleep(choose.random() * lag_s)

        thread = threading.Thread(target=run, name="fake-npu", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(5)


class Registrar:
    """Registers device memory and refuses what the real one refuses, with its kind of error code."""

    LIMIT = 256

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []

    def register(self, address: int, length: int) -> int:
        """0, or the error that HCCL gives for an address between boundaries or a region too many."""
        if address % ALIGNMENT or length <= 0:
            return 103900
        if len(self.ranges) >= self.LIMIT:
            return 103900
        self.ranges.append((address, length))
        return 0


def ascend_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A cache tensor as vllm-ascend makes them: 2 MiB too many raw bytes, cut at a boundary, viewed."""
    count = torch.empty(shape, dtype=dtype, device="meta").nbytes
    raw = torch.zeros(count + ALIGNMENT, dtype=torch.int8)
    skip = -raw.data_ptr() % ALIGNMENT
    return raw[skip : skip + count].view(dtype).view(shape)
