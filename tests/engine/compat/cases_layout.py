"""Caches as vLLM itself allocates them: a described address holds the element that vLLM's view names."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

import connectors.compat as compat
from ascend_pd.errors import OperatorError
from ascend_pd.layout.description import KVLayout, Part, Region
from connectors.device.kv_layout import CacheGroup, Placement, describe

SERIES = os.environ["ASCEND_PD_TEST_SERIES"]
LAYERS = [f"model.layers.{i}.self_attn.attn" for i in range(3)]
BLOCKS, BLOCK, HEADS, SIZE, LATENT = 5, 32, 3, 16, 64


def spec(mla: bool) -> Any:
    if mla:
        return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT, dtype=torch.float32)
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32)


def allocate_0_32(mla: bool, layout_name: str) -> dict[str, torch.Tensor]:
    from vllm.v1.kv_cache_interface import compute_layout_strides
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

    layer = spec(mla)
    layer_stride, block_stride, *_ = compute_layout_strides(layer, BLOCKS, len(LAYERS), KVCacheLayout[layout_name])
    config = KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[
            KVCacheTensor(
                size=layer.page_size_bytes * BLOCKS * len(LAYERS),
                layers=LAYERS,
                layer_stride=layer_stride,
                block_stride=block_stride,
            )
        ],
        kv_cache_groups=[KVCacheGroupSpec(LAYERS, layer)],
    )
    caches: dict[str, torch.Tensor] = allocate_kv_cache(config, torch.device("cpu"), KVCacheLayout[layout_name])
    return caches


def allocate_0_23(mla: bool) -> dict[str, torch.Tensor]:
    if mla:
        from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

        shape = MLACommonBackend.get_kv_cache_shape(BLOCKS, BLOCK, 1, LATENT)
    else:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        shape = CPUAttentionBackend.get_kv_cache_shape(BLOCKS, BLOCK, HEADS, SIZE)
    return {name: torch.zeros(shape) for name in LAYERS}


def placement() -> Placement:
    return Placement(num_blocks=BLOCKS, num_kv_heads=HEADS, packed="vec")


def groups(mla: bool) -> tuple[CacheGroup, ...]:
    group = KVCacheGroupSpec(LAYERS, spec(mla))
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
    return compat.cache_groups(config)


def number_at(region: Region, block: int, head: int, token: int, element: int = 0) -> float:
    address = region.base + block * region.block_stride + head * region.head_stride + token * region.token_stride
    return ctypes.c_float.from_address(address + 4 * element).value


def check(caches: dict[str, torch.Tensor], mla: bool) -> KVLayout:
    """Number every element of every layer, then read the numbers back through the description."""
    for index, name in enumerate(LAYERS):
        view = caches[name]
        view.copy_(torch.arange(view.numel(), dtype=torch.float32).reshape(view.shape) + 1e5 * index)
    layout = describe(caches, placement(), groups(mla))
    assert [r.layer for r in layout.regions] == [0, 1, 2]
    for region, name in zip(layout.regions, LAYERS, strict=True):
        for block, head, token in ((0, 0, 0), (4, 0, 31), (2, 0 if mla else 2, 7)):
            view = caches[name]
            row = view[block, token] if view.ndim == 3 else view[block, head, token]
            assert region.token_bytes == 4 * row.numel()
            assert number_at(region, block, head, token) == row[0].item()
            assert number_at(region, block, head, token, row.numel() - 1) == row[-1].item()
    return layout


@pytest.mark.parametrize("mla", [False, True], ids=["gqa", "mla"])
def test_the_caches_of_the_cpu_engine_are_described(mla: bool) -> None:
    caches = allocate_0_23(mla) if SERIES == "0.23" else allocate_0_32(mla, "LBNHC" if mla else "LBHNC")
    layout = check(caches, mla)
    assert {r.part for r in layout.regions} == {Part.LATENT if mla else Part.KV}
    assert layout.packed == ("" if mla else "vec")


def test_every_layout_that_this_series_can_choose_is_described() -> None:
    # Layouts have names from 0.32 on; 0.23 knows the CPU's only, which is checked above.
    for layout_name in [] if SERIES == "0.23" else ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"]:
        check(allocate_0_32(False, layout_name), False)


def test_tuples_of_vllm_ascend_are_described() -> None:
    caches = {
        n: (torch.zeros(BLOCKS, BLOCK, HEADS, SIZE), torch.zeros(BLOCKS, BLOCK, HEADS, SIZE)) for n in LAYERS
    }
    for pair in caches.values():
        for tensor in pair:
            tensor.copy_(torch.randn(tensor.shape))
    layout = describe(caches, placement(), groups(False))
    for region in layout.regions:
        tensor = caches[LAYERS[region.layer]][region.part is Part.V]
        assert number_at(region, 3, 2, 9, 5) == tensor[3, 9, 2, 5].item()


def several_groups() -> KVCacheConfig:
    sliding = SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float32, sliding_window=96
    )
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["a.0"], spec(False)), KVCacheGroupSpec(["a.1"], sliding)],
    )


def test_several_groups_are_read_where_a_failed_load_of_them_can_be_reported() -> None:
    if not compat.FEATURES.fails_by_request:
        with pytest.raises(OperatorError, match="2 KV cache groups"):
            compat.cache_groups(several_groups())
        return
    read = compat.cache_groups(several_groups())
    assert [(g.layer_names, g.block_size, g.sliding_window, g.mla) for g in read] == [
        (("a.0",), BLOCK, 0, False),
        (("a.1",), BLOCK, 96, False),
    ]


def test_mla_is_read_from_vllms_spec() -> None:
    assert [g.mla for g in groups(True)] == [True]
    assert [g.mla for g in groups(False)] == [False]
