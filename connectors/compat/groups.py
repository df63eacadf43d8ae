"""vLLM's KV cache groups in our words; the class names are the same in every series."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from connectors.device.kv_layout import CacheGroup


def group_of(group: Any) -> CacheGroup:
    """One `KVCacheGroupSpec`."""
    spec = group.kv_cache_spec
    kinds = list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]
    return CacheGroup(
        layer_names=tuple(group.layer_names),
        block_size=spec.block_size,
        mla=all(isinstance(kind, MLAAttentionSpec | SlidingWindowMLASpec) for kind in kinds),
        sparse=any(getattr(kind, "sparse_head_dim", None) is not None for kind in kinds),
        sliding_window=_window(kinds[0]),
        recurrent=any(isinstance(kind, MambaSpec) for kind in kinds),
        spec=kinds[0],
    )


def _window(spec: Any) -> int:
    """A full-attention spec may name a window too; its blocks are all kept, so for a transfer it is full."""
    if isinstance(spec, SlidingWindowSpec):
        return int(spec.sliding_window)
    return int(spec.attention_chunk_size) if isinstance(spec, ChunkedLocalAttentionSpec) else 0
