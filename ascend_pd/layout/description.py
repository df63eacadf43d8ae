"""What one worker's KV cache looks like in memory: addresses and strides in bytes, nothing about vLLM."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Part(StrEnum):
    """What a region holds."""

    KV = "kv"
    """K and V of a head side by side (joined)."""
    K = "k"
    V = "v"
    LATENT = "latent"
    """MLA's compressed KV, rope part included when joined."""
    ROPE = "rope"


class Region(msgspec.Struct, frozen=True):
    """One part of one layer, for all blocks of this worker. Element (block, head, token) of it starts at
    `base + block*block_stride + head*head_stride + token*token_stride` and is `token_bytes` long."""

    layer: int
    """Global layer index (0 is the model's first layer, whatever the pipeline stage)."""
    part: Part
    base: int
    block_stride: int
    head_stride: int
    token_stride: int
    token_bytes: int
    group: int = 0
    """KV cache group, for hybrid models."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's KV cache."""

    regions: tuple[Region, ...]
    dtype: str
    num_blocks: int
    block_size: int
    """Tokens per scheduler block."""
    kernel_blocks_per_block: int = 1
    tp_rank: int
    tp_size: int
    num_kv_heads: int
    """Of the whole model; 1 for MLA."""
    heads: tuple[int, ...]
    """Global KV head indices that this rank stores, in storage order."""
    mla: bool = False
    packed: str = ""
    """Non-empty when the bytes inside a (block, head) slab are packed by a kernel (CPU's ISA name): such slabs
    move whole, between equal block sizes and equal packing only."""
    pp_rank: int = 0
    pp_size: int = 1
