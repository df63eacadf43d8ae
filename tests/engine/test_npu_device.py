"""The NPU driver on a fake NPU whose streams lag behind the host."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ascend_pd.errors import LocalProtocolError, OperatorError
from ascend_pd.layout.pieces import Pieces, Tiles
from connectors.device.cpu import DONE
from connectors.device.kv_layout import CacheGroup, Placement, describe, tensors_of
from tests.fakes.torch_npu import FakeNpu, Registrar, ascend_tensor, install

pytestmark = pytest.mark.engine
MIB2 = 2 << 20
BLOCKS, BLOCK, HEADS, SIZE = 6, 16, 2, 32


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> FakeNpu:
    fake = FakeNpu()
    install(monkeypatch, fake)
    return fake


@pytest.fixture
def device(npu: FakeNpu) -> Iterator[Any]:
    yield importlib.import_module("connectors.device.npu").NpuDevice()


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    return ascend_tensor((BLOCKS, BLOCK, HEADS, SIZE)), ascend_tensor((BLOCKS, BLOCK, HEADS, SIZE))


def pieces(*moves: tuple[int, int, int]) -> Pieces:
    columns = np.array(moves, dtype=np.int64).reshape(-1, 3).T
    return Pieces(*(np.ascontiguousarray(column) for column in columns))


def soon() -> float:
    return time.monotonic() + 5


def bytes_at(tensor: torch.Tensor, offset: int, length: int) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).flatten()[offset : offset + length].numpy())


def test_caches_as_vllm_ascend_makes_them_are_adopted_and_accepted_for_registration(device: Any) -> None:
    caches = {f"model.layers.{i}.self_attn.attn": pair() for i in range(3)}
    ranges = device.adopt(tensor for cache in caches.values() for tensor in tensors_of(cache))
    assert len(ranges) == 6
    registrar = Registrar()
    assert [registrar.register(r.address, r.length) for r in ranges] == [0] * 6
    layout = describe(
        caches,
        Placement(num_blocks=BLOCKS, num_kv_heads=HEADS),
        [CacheGroup(layer_names=tuple(caches), block_size=BLOCK)],
    )
    assert {region.base for region in layout.regions} == {r.address for r in ranges}


def test_views_of_one_storage_are_one_region(device: Any) -> None:
    whole = ascend_tensor((4 * BLOCKS, BLOCK, HEADS, SIZE))
    (merged,) = device.adopt([whole[:BLOCKS], whole[3 * BLOCKS :], whole[BLOCKS : 2 * BLOCKS]])
    assert (merged.address, merged.length) == (whole.data_ptr(), whole.nbytes)


def test_a_strided_view_counts_to_its_last_byte(device: Any) -> None:
    whole = ascend_tensor((BLOCKS, 2, BLOCK, HEADS, SIZE))
    (merged,) = device.adopt([whole[:, 0]])
    assert merged.length == whole.nbytes - whole[0, 0].nbytes


def test_memory_between_boundaries_is_refused_as_the_hardware_does(device: Any) -> None:
    odd = ascend_tensor((BLOCKS, BLOCK, HEADS, SIZE))[1:]
    assert Registrar().register(odd.data_ptr(), odd.nbytes) != 0
    with pytest.raises(OperatorError, match="2 MiB"):
        device.adopt([odd])


def test_more_regions_than_the_hardware_registers_are_refused(device: Any) -> None:
    tensors = [ascend_tensor((1, 1, 1, 16)) for _ in range(257)]
    assert len(device.adopt(tensors[:256])) == 256
    with pytest.raises(OperatorError, match="257 memory regions on npu:0"):
        device.adopt(tensors[256:])


def test_nz_format_is_refused_with_the_option_to_take_out(npu: FakeNpu, device: Any) -> None:
    k, v = pair()
    npu.formats[v.data_ptr()] = 29
    with pytest.raises(OperatorError, match="NZ") as refused:
        device.adopt([k, v])
    assert "enable_kv_nz" in refused.value.fix


def test_staging_memory_is_aligned_for_registration(device: Any) -> None:
    buffer = device.allocate(3 << 20)
    assert buffer.range.address % MIB2 == 0
    assert Registrar().register(buffer.range.address, buffer.range.length) == 0


def test_no_memory_for_staging_is_the_operators_to_solve(npu: FakeNpu, device: Any) -> None:
    npu.free_bytes = 1 << 20
    with pytest.raises(OperatorError, match="npu:0 has no memory left"):
        device.allocate(1 << 20)


def test_an_event_is_done_when_the_layer_before_it_is_written_not_when_it_is_recorded(
    npu: FakeNpu, device: Any
) -> None:
    k, _ = pair()
    npu.compute(lambda: k.fill_(1))
    event = device.record()
    assert not event.done()
    assert not event.wait(time.monotonic() + 0.01)
    assert not bool(k.any())
    with npu.running():
        assert event.wait(soon())
    assert bool((k == 1).all())


def test_an_event_does_not_wait_for_later_layers(npu: FakeNpu, device: Any) -> None:
    npu.compute(lambda: None)
    event = device.record()
    npu.compute(lambda: pytest.fail("a later layer ran"))
    compute = npu.current_stream()
    assert npu.step(compute)
    assert npu.step(compute)
    assert event.done()


GRID = [(block * 1024, (5 - block) * 1024, 1024) for block in (0, 2, 5)]
OFF_GRID = [(0, 3, 100), (700, 220, 100), (1300, 1000, 100)]
MIXED = [(0, 4096, 64), (64, 0, 64), (512, 1024, 7), (4096, 5000, 4)]


@pytest.mark.parametrize("moves", [GRID, OFF_GRID, MIXED, GRID[:1]], ids=["grid", "off-grid", "mixed", "single"])
def test_a_copy_moves_exactly_its_pieces(npu: FakeNpu, device: Any, moves: list[tuple[int, int, int]]) -> None:
    k, _ = pair()
    k.view(torch.int16).random_(0, 30000)
    device.adopt([k])
    buffer = device.allocate(1 << 16)
    flat = buffer.owner[buffer.range.address - buffer.owner.data_ptr() :]
    flat.fill_(-1)
    event = device.copy(pieces(*[(k.data_ptr() + a, buffer.range.address + b, n) for a, b, n in moves]))
    npu.drain()
    assert event.done()
    expected = bytearray(b"\xff" * (1 << 16))
    for start, end, length in moves:
        expected[end : end + length] = bytes_at(k, start, length)
    assert bytes_at(flat, 0, 1 << 16) == bytes(expected)


@pytest.mark.parametrize("step", [128, 192, 100], ids=["next-head", "third-head", "off-grid"])
def test_tiles_scatter_one_head_between_the_others(npu: FakeNpu, device: Any, step: int) -> None:
    k, _ = pair()
    k.view(torch.int16).random_(0, 30000)
    device.adopt([k])
    buffer = device.allocate(1 << 16)
    flat = buffer.owner[buffer.range.address - buffer.owner.data_ptr() :]
    flat.copy_(torch.arange(flat.numel()) % 120)
    starts = np.array([4 * step, 12 * step, 0], np.int64)
    slot = buffer.range.address + np.arange(3, dtype=np.int64) * 256
    tiles = Tiles(slot, k.data_ptr() + starts, 64, 4, 64, step)
    expected = bytearray(bytes_at(k, 0, k.nbytes))
    for number, start in enumerate(starts.tolist()):
        for token in range(4):
            data = bytes_at(flat, number * 256 + token * 64, 64)
            expected[start + token * step : start + token * step + 64] = data
    event = device.copy(tiles)
    npu.drain()
    assert event.done()
    assert bytes_at(k, 0, k.nbytes) == bytes(expected)


def test_tiles_whose_last_repetition_is_outside_are_refused(device: Any) -> None:
    k, _ = pair()
    device.adopt([k])
    at = np.array([k.data_ptr()], np.int64)
    with pytest.raises(LocalProtocolError, match="outside"):
        device.copy(Tiles(at, at + 1024, 64, k.nbytes // 64 + 1, 0, 64))


def test_nothing_to_copy_is_done_in_order(npu: FakeNpu, device: Any) -> None:
    event = device.copy(pieces())
    npu.drain()
    assert event.done()


def test_a_copy_outside_the_workers_memory_is_refused(device: Any) -> None:
    k, v = pair()
    device.adopt([k])
    for wrong in (v.data_ptr(), k.data_ptr() + k.nbytes - 1, 0):
        with pytest.raises(LocalProtocolError, match="outside"):
            device.copy(pieces((wrong, k.data_ptr(), 2)))


def test_a_copy_waits_on_the_device_for_its_event_while_the_host_goes_on(npu: FakeNpu, device: Any) -> None:
    k, _ = pair()
    device.adopt([k])
    buffer = device.allocate(k.nbytes)
    npu.compute(lambda: k.fill_(7))
    copied = device.copy(pieces((k.data_ptr(), buffer.range.address, k.nbytes)), after=device.record())
    assert not copied.done()
    for seed in range(3):
        npu.drain(seed)
    assert copied.done()
    assert bytes_at(buffer.owner, buffer.range.address - buffer.owner.data_ptr(), k.nbytes) == bytes_at(
        k, 0, k.nbytes
    )


def test_an_event_of_another_device_is_refused(device: Any) -> None:
    with pytest.raises(LocalProtocolError, match="cannot wait for a Done"):
        device.copy(pieces(), after=DONE)


def test_a_thread_that_did_not_bind_is_on_another_die(npu: FakeNpu) -> None:
    npu.set_device(1)
    device = importlib.import_module("connectors.device.npu").NpuDevice()
    assert device.name == "npu:1"
    found = {}

    def look(bind: bool) -> None:
        if bind:
            device.bind_thread()
        found[bind] = npu.current_device()

    for bind in (False, True):
        thread = threading.Thread(target=look, args=(bind,), name="look")
        thread.start()
        thread.join()
    assert found == {False: 0, True: 1}
