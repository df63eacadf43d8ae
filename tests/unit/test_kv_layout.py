"""Registered KV caches described by addresses and strides, with tensors that only have facts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from ascend_pd.errors import OperatorError
from ascend_pd.layout.description import KVLayout, Part
from connectors.device.kv_layout import CacheGroup, Placement, describe, layer_index


@dataclass(frozen=True)
class FakeTensor:
    """Row-major unless `strides` (in elements) says otherwise; two bytes per element."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dtype: str = "torch.bfloat16"

    def data_ptr(self) -> int:
        return self.address

    def stride(self) -> Sequence[int]:
        return self.strides or tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def element_size(self) -> int:
        return 2


def placement(**changes: Any) -> Placement:
    return replace(Placement(num_blocks=10, num_kv_heads=4), **changes)


def one_group(caches: dict[str, Any], **changes: Any) -> list[CacheGroup]:
    return [replace(CacheGroup(layer_names=tuple(caches), block_size=128), **changes)]


def described(caches: dict[str, Any], where: Placement | None = None, **group: Any) -> KVLayout:
    return describe(caches, where or placement(), one_group(caches, **group))


def name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


def address(layout: KVLayout, layer: int, part: Part, block: int, head: int, token: int) -> int:
    (region,) = [r for r in layout.regions if (r.layer, r.part) == (layer, part)]
    return region.base + block * region.block_stride + head * region.head_stride + token * region.token_stride


def test_one_packed_tensor_per_layer_is_head_major_with_k_and_v_joined() -> None:
    caches = {name(i): FakeTensor(1 << 20 | i << 30, (10, 4, 128, 64)) for i in range(12)}
    layout = described(caches, placement(packed="vec"))
    assert [r.layer for r in layout.regions] == list(range(12))
    assert {r.part for r in layout.regions} == {Part.KV}
    assert address(layout, 11, Part.KV, 3, 2, 5) == (1 << 20 | 11 << 30) + 2 * (((3 * 4 + 2) * 128 + 5) * 64)
    assert layout.regions[0].token_bytes == 128
    assert (layout.packed, layout.dtype, layout.heads, layout.kernel_blocks_per_block) == (
        "vec",
        "bfloat16",
        (0, 1, 2, 3),
        1,
    )


def test_physical_order_comes_from_the_strides() -> None:
    token_major = FakeTensor(4096, (10, 4, 128, 64), strides=(128 * 4 * 64, 64, 4 * 64, 1))
    layout = described({name(0): token_major})
    assert address(layout, 0, Part.KV, 1, 1, 1) == 4096 + 2 * (128 * 4 * 64 + 64 + 4 * 64)


def test_layers_interleaved_in_one_storage_keep_their_block_stride() -> None:
    slab, layers = 4 * 128 * 64, 3
    caches = {
        name(i): FakeTensor(4096 + 2 * i * slab, (10, 4, 128, 64), strides=(layers * slab, 128 * 64, 64, 1))
        for i in range(layers)
    }
    layout = described(caches)
    assert address(layout, 2, Part.KV, 4, 0, 0) == 4096 + 2 * (4 * layers + 2) * slab


@pytest.mark.parametrize("shape", [(10, 1, 128, 576), (10, 128, 576)])
def test_joined_mla_is_one_latent_of_one_head(shape: tuple[int, ...]) -> None:
    layout = described({name(0): FakeTensor(64, shape)}, placement(packed="vec", tp_rank=3, tp_size=8), mla=True)
    assert (layout.mla, layout.heads, layout.num_kv_heads, layout.packed) == (True, (0,), 1, "")
    assert [(r.part, r.token_bytes, r.token_stride) for r in layout.regions] == [(Part.LATENT, 1152, 1152)]


def test_a_tuple_is_k_and_v_token_major() -> None:
    k, v = FakeTensor(2 << 20, (10, 128, 4, 32)), FakeTensor(4 << 20, (10, 128, 4, 32))
    layout = described({name(0): (k, v)})
    assert address(layout, 0, Part.K, 2, 1, 5) == (2 << 20) + 2 * (((2 * 128 + 5) * 4 + 1) * 32)
    assert address(layout, 0, Part.V, 0, 0, 0) == 4 << 20
    assert {r.token_bytes for r in layout.regions} == {64}


def test_a_tuple_of_mla_is_latent_and_rope() -> None:
    latent, rope = FakeTensor(2 << 20, (10, 128, 1, 512)), FakeTensor(4 << 20, (10, 128, 1, 64))
    layout = described({name(0): (latent, rope)}, mla=True)
    assert [(r.part, r.token_bytes) for r in layout.regions] == [(Part.LATENT, 1024), (Part.ROPE, 128)]


def test_a_kernel_with_smaller_blocks_is_described_in_its_own_blocks() -> None:
    layout = described({name(0): FakeTensor(64, (40, 4, 32, 64))})
    assert (layout.num_blocks, layout.block_size, layout.kernel_blocks_per_block) == (10, 128, 4)
    assert layout.regions[0].block_stride == 2 * 4 * 32 * 64


@pytest.mark.parametrize("shape", [(10, 4, 96, 64), (9, 4, 128, 64), (5, 4, 256, 64)])
def test_blocks_that_do_not_make_whole_scheduler_blocks_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(OperatorError, match="the scheduler has 10 of 128"):
        described({name(0): FakeTensor(64, shape)})


def test_groups_select_and_number_the_layers() -> None:
    caches = {name(i): FakeTensor(i << 30, (10, 4, 128, 64)) for i in range(3)}
    groups = [
        CacheGroup(layer_names=(name(2), name(7)), block_size=128),
        CacheGroup(layer_names=(name(0),), block_size=256, sliding_window=4096),
    ]
    caches[name(0)] = FakeTensor(0, (20, 4, 128, 64))
    layout = describe(caches, placement(), groups)
    assert [(r.layer, r.group) for r in layout.regions] == [(0, 1), (2, 0)]
    assert [(g.block_size, g.kernel_blocks_per_block, g.sliding_window) for g in layout.groups] == [
        (128, 1, 0),
        (256, 2, 4096),
    ]


@pytest.mark.parametrize(
    ("caches", "changes", "reason"),
    [
        (lambda: {name(0): (FakeTensor(0, (10, 128, 4, 32)),) * 2}, {"nz": True}, "NZ"),
        (lambda: {name(0): (FakeTensor(0, (10, 128, 1, 512)),) * 3}, {"mla": True}, "indexer"),
        (lambda: {name(0): (FakeTensor(0, (10, 128, 1, 512)),) * 2}, {"mla": True, "sparse": True}, "indexer"),
        (lambda: {name(0): FakeTensor(0, (10, 2, 128, 64))}, {}, "4 were expected"),
        (lambda: {name(0): FakeTensor(0, (2, 10, 4, 128, 64))}, {}, "shape"),
        (lambda: {name(0): FakeTensor(0, (10, 4, 128, 64), strides=(1 << 16, 1 << 14, 1, 128))}, {}, "contiguous"),
        (
            lambda: {
                name(0): FakeTensor(0, (10, 4, 128, 64)),
                name(1): FakeTensor(0, (10, 4, 128, 64), dtype="torch.int8"),
            },
            {},
            "mixes bfloat16, int8",
        ),
        (dict, {}, "no KV cache"),
        (lambda: {name(0): FakeTensor(0, (10, 4, 128, 64))}, {"recurrent": True}, "recurrent"),
    ],
)
def test_what_cannot_be_transferred_is_refused_with_a_reason(
    caches: Callable[[], dict[str, Any]], changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(OperatorError, match=reason):
        described(caches(), placement(nz=changes.pop("nz", False)), **changes)


@pytest.mark.parametrize(
    ("layer_name", "index"),
    [
        ("model.layers.7.self_attn.attn", 7),
        ("language_model.model.layers.12.self_attn.attn", 12),
        ("3.attn", 3),
        ("model.layers.61.mtp.0.self_attn", 61),
        ("transformer.h.5.attn", 5),
    ],
)
def test_the_layer_is_in_its_name(layer_name: str, index: int) -> None:
    assert layer_index(layer_name) == index


@pytest.mark.parametrize("layer_name", ["", "attn", "a.1.b.2"])
def test_a_name_that_does_not_tell_is_refused(layer_name: str) -> None:
    with pytest.raises(OperatorError, match="index"):
        layer_index(layer_name)


def test_heads_are_shared_or_replicated() -> None:
    caches = {name(0): FakeTensor(0, (10, 1, 128, 64))}
    assert described(caches, placement(num_kv_heads=4, tp_size=4, tp_rank=2)).heads == (2,)
    assert described(caches, placement(num_kv_heads=2, tp_size=8, tp_rank=4)).heads == (1,)


def test_heads_that_cannot_be_spread_are_refused() -> None:
    with pytest.raises(OperatorError, match="6 KV heads cannot be spread over 4"):
        described({name(0): FakeTensor(0, (10, 1, 128, 64))}, placement(num_kv_heads=6, tp_size=4))


def test_a_mix_of_mla_and_other_attention_is_refused() -> None:
    caches = {name(i): FakeTensor(0, (10, 1, 128, 64)) for i in range(2)}
    groups = [CacheGroup(layer_names=(name(i),), block_size=128, mla=bool(i)) for i in range(2)]
    with pytest.raises(OperatorError, match="mixes MLA"):
        describe(caches, placement(), groups)
