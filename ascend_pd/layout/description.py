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
    INDEXER = "indexer"
    """Keys of sparse attention's indexer (DSA), one head on every rank."""
    INDEXER_SCALE = "indexer_scale"


class Region(msgspec.Struct, frozen=True):
    """One part of one layer, for all blocks of this worker. Element (block, head, token) of it starts at
    `base + block*block_stride + head*head_stride + token*token_stride` and is `token_bytes` long.

    `block` counts the attention kernel's blocks (see `Group`), `head` the rank's own heads in storage order.
    """

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


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One KV cache group: layers that share a list of block ids."""

    block_size: int
    """Tokens per scheduler block."""
    kernel_blocks_per_block: int = 1
    """Scheduler block b is kernel blocks `b*k … b*k + k-1` of `block_size/k` tokens each."""
    sliding_window: int = 0
    """Tokens; 0 is full attention. Block id 0 in such a group stands for a block that left the window."""
    recurrent: bool = False
    """A state per request instead of a cache per token (Mamba, GDN)."""


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's KV cache."""

    regions: tuple[Region, ...]
    dtype: str
    num_blocks: int
    """Scheduler blocks."""
    block_size: int
    """Tokens per scheduler block."""
    kernel_blocks_per_block: int = 1
    groups: tuple[Group, ...] = ()
    """One per KV cache group; empty when there is one group, which `block_size` and `kernel_blocks_per_block`
    describe."""
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

    @property
    def worker(self) -> int:
        """This worker's number in its engine: `pp_rank * tp_size + tp_rank`. Plans are keyed by it."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def all_groups(self) -> tuple[Group, ...]:
        """The KV cache groups, one at least."""
        own = Group(block_size=self.block_size, kernel_blocks_per_block=self.kernel_blocks_per_block)
        return self.groups or (own,)
