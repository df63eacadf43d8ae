"""Both connectors on a fake NPU: vllm-ascend's tensors and hooks, compute that lags behind, rank 1 of the host."""

from __future__ import annotations

import importlib
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_pd.errors import OperatorError
from ascend_pd.wire.params import LayerwiseDecode, LayerwisePrefill, PullPrefill, to_dict
from connectors import transport
from connectors.transport.base import MemoryRange
from tests.engine.compat.engine_rig import BLOCK, BLOCKS, HEADS, SIZE, Cache, Engine, one_rank, step_until
from tests.fakes.loopback_transport import LoopbackTransport
from tests.fakes.torch_npu import FakeNpu, Registrar, ascend_tensor, install
from tests.unit.metaserver_fixture import metaserver

DIE = 1
LENGTHS = [BLOCK - 1, 3 * BLOCK + 5, 300]


class Untouchable:
    """Attention metadata whose every use is an error: the connectors have their own."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"attention metadata was asked for {name}")


def gqa_hook(worker: Any, name: str, cache: Cache) -> None:
    """vLLM's decorator: the layer's tuple, this backend's metadata."""
    notify(worker)
    worker.save_kv_layer(name, cache, Untouchable())


def mla_hook(worker: Any, name: str, cache: Cache) -> None:
    """vllm-ascend's MLA: a list of tensors, and the metadata of all layers in a dict."""
    notify(worker, name)
    worker.save_kv_layer(name, list(cache), {name: Untouchable()})


def gdn_hook(worker: Any, name: str, cache: Cache) -> None:
    """A hybrid model: between the attention layers GDN calls without name or tensors."""
    worker.save_kv_layer("", [], {name: Untouchable()})
    gqa_hook(worker, name, cache)


def notify(worker: Any, *name: str) -> None:
    """vllm-ascend's `notify_kv_cache_written`, which names no layer for GQA: ours must not want it."""
    assert getattr(worker, "on_kv_cache_written", None) is None


class DeviceTransport(LoopbackTransport):
    """Registers and moves memory only as an NPU lets it."""

    def __init__(self, npu: FakeNpu) -> None:
        super().__init__(self._check)
        self._npu = npu
        self._registrar = Registrar()
        self.foreign: list[str] = []

    def register(self, ranges: Any) -> None:
        for item in ranges:
            assert isinstance(item, MemoryRange)
            code = self._registrar.register(item.address, item.length)
            if code:
                raise OperatorError(f"register_memory: {code}")
        super().register(ranges)

    def _check(self) -> None:
        if self._npu.current_device() != DIE:
            self.foreign.append(threading.current_thread().name)


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    install(monkeypatch, fake)
    one_rank(monkeypatch)
    fake.set_device(DIE)
    monkeypatch.setitem(transport.TRANSPORTS, "mooncake", lambda *_: DeviceTransport(fake))
    return fake


def ascend_cache(mla: bool = False) -> Cache:
    """K and V, or MLA's latent and rope."""
    shapes = [(1, 32), (1, 16)] if mla else [(HEADS, SIZE)] * 2
    return tuple(ascend_tensor((BLOCKS, BLOCK, *shape)) for shape in shapes)


@contextmanager
def pair(
    directory: Path, npu: FakeNpu, connector: str, hook: Any, *, waits_for_sampling: bool = True
) -> Iterator[tuple[Engine, Engine]]:
    compute, mla = npu.current_stream(), hook is mla_hook

    def synchronize() -> None:
        deadline = time.monotonic() + 20
        while compute.queue:
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    def engine(role: str) -> Engine:
        return Engine(
            directory / "m",
            connector,
            role,
            [ascend_cache(mla), ascend_cache(mla)],
            mla=mla,
            extra={"hardware": "A2", "max_unreserved_blocks": BLOCKS},
            hook=hook,
            compute=npu.compute,
            synchronize=synchronize if waits_for_sampling else lambda: None,
        )

    prefill = engine("kv_producer")
    try:
        decode = engine("kv_consumer")
        try:
            yield prefill, decode
            for one in (prefill, decode):
                assert one.worker._worker.rank.transport.foreign == []
        finally:
            decode.close()
    finally:
        prefill.close()


def add_layerwise(prefill: Engine, decode: Engine, url: str, num_tokens: int) -> None:
    """One request to both, decode first."""
    transfer_id = str(uuid.uuid4())
    decode.add("d", num_tokens, to_dict(LayerwiseDecode(transfer_id=transfer_id, metaserver=url)), 3, "x")
    decode.run_step()
    prefill.add("p", num_tokens, to_dict(LayerwisePrefill(transfer_id=transfer_id, metaserver=url)), 1, "x")


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("hook", [gqa_hook, mla_hook, gdn_hook], ids=lambda h: h.__name__)
def test_layerwise_pushes_what_the_device_has_written(
    tmp_path: Path, npu: FakeNpu, hook: Any, num_tokens: int
) -> None:
    with (
        npu.running(num_tokens),
        metaserver() as served,
        pair(tmp_path, npu, "MooncakeLayerwiseConnector", hook) as (prefill, decode),
    ):
        free = prefill.free_blocks
        add_layerwise(prefill, decode, served.url, num_tokens)
        step_until(lambda: decode.scheduler.running, prefill, decode)
        assert decode.wrong_cells("d", num_tokens - 1) == []
        step_until(lambda: prefill.free_blocks == free, prefill, decode)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_pull_reads_what_the_device_has_written(tmp_path: Path, npu: FakeNpu, num_tokens: int) -> None:
    with npu.running(num_tokens), pair(tmp_path, npu, "MooncakeConnector", gqa_hook) as (prefill, decode):
        free = prefill.free_blocks
        prefill.add("p", num_tokens, to_dict(PullPrefill(transfer_id=str(uuid.uuid4()))), prompt_of="x")
        step_until(lambda: prefill.finished(), prefill)
        decode.add("d", num_tokens, prefill.finished()["p"].kv_transfer_params, max_tokens=3, prompt_of="x")
        step_until(lambda: decode.scheduler.running, prefill, decode)
        assert decode.wrong_cells("d", num_tokens - 1) == []
        step_until(lambda: prefill.free_blocks == free, prefill, decode)


@pytest.mark.parametrize("driver_waits", [True, False])
def test_nothing_is_pushed_while_the_device_stands_still(
    tmp_path: Path, npu: FakeNpu, monkeypatch: pytest.MonkeyPatch, driver_waits: bool
) -> None:
    """And a driver that does not wait is caught: else the tests above would prove nothing."""
    driver = importlib.import_module("connectors.device.npu")
    if not driver_waits:
        monkeypatch.setattr(driver.NpuEvent, "wait", lambda self, deadline: True)
    hooked = pair(tmp_path, npu, "MooncakeLayerwiseConnector", gqa_hook, waits_for_sampling=False)
    with metaserver() as served, hooked as (prefill, decode):
        add_layerwise(prefill, decode, served.url, 100)
        transfers = prefill.worker._worker.rank.transport.moves
        if driver_waits:
            until = time.monotonic() + 1.0
            step_until(lambda: time.monotonic() > until, prefill, decode)
            assert transfers == [] and not decode.scheduler.running
            with npu.running():
                step_until(lambda: decode.scheduler.running, prefill, decode)
                assert decode.wrong_cells("d", 99) == []
        else:
            step_until(lambda: decode.scheduler.running, prefill, decode)
            assert len(decode.wrong_cells("d", 99)) > 0
            npu.drain()


def test_a_cache_between_boundaries_is_refused_at_start(tmp_path: Path, npu: FakeNpu) -> None:
    odd = tuple(torch.zeros(BLOCKS, BLOCK, HEADS, SIZE, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(OperatorError, match="2 MiB"):
        Engine(tmp_path / "m", "MooncakeConnector", "kv_producer", [odd, odd], extra={"hardware": "A2"})


def test_nz_format_is_refused_at_start(tmp_path: Path, npu: FakeNpu) -> None:
    caches = [ascend_cache(), ascend_cache()]
    npu.formats[caches[1][0].data_ptr()] = 29
    with pytest.raises(OperatorError, match="enable_kv_nz"):
        Engine(tmp_path / "m", "MooncakeConnector", "kv_consumer", caches, extra={"hardware": "A2"})
