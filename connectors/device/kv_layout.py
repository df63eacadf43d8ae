"""What vLLM registers as KV cache, described by addresses and strides; the tensors are only asked for facts.

Two conventions, told apart by whether a layer has one tensor or a tuple of them:

* one tensor (vLLM; CPU in both series): `[blocks, heads, tokens, content]` with K and V of a head side by side in
  `content`, or `[blocks, tokens, content]` for MLA. The physical order is in the strides.
* a tuple (vllm-ascend): `(K, V)`, each `[blocks, tokens, heads, head size]`; for MLA `(latent, rope)`, each
  `[blocks, tokens, 1, size]`.

torch is not imported: anything with `data_ptr`, `shape`, `stride`, `element_size` and `dtype` will do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from ascend_pd.errors import OperatorError
from ascend_pd.layout.description import Group, KVLayout, Part, Region
from ascend_pd.layout.geometry import heads_of_rank


class Tensor(Protocol):
    """The part of torch.Tensor that is needed here."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...


LayerCache = Tensor | Sequence[Tensor]
"""What `register_kv_caches` gives for one layer."""

REPORT = "report this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group of vLLM: layers that share a list of block ids. `connectors.compat.cache_groups` reads
    them."""

    layer_names: tuple[str, ...]
    block_size: int
    """Tokens per scheduler block."""
    mla: bool = False
    sparse: bool = False
    """vllm-ascend's sparse attention: an indexer's keys lie next to the cache, with or without the rope part."""
    sliding_window: int = 0
    """Tokens; 0 is full attention."""
    recurrent: bool = False
    """A state per request instead of a cache per token."""
    spec: Any = None
    """vLLM's own `KVCacheSpec`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the tensors cannot tell about the worker that holds them."""

    num_blocks: int
    """Scheduler blocks (`KVCacheConfig.num_blocks`)."""
    num_kv_heads: int
    """Of the whole model; ignored for MLA."""
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    packed: str = ""
    """CPU attention's packing, see `KVLayout.packed`."""
    nz: bool = False
    """vllm-ascend's `enable_kv_nz`: the cache is written in fractal order."""


@dataclass(frozen=True, slots=True)
class _Axes:
    """One tensor with its axes named; strides in bytes, `tokens` per kernel block."""

    base: int
    blocks: int
    heads: int
    tokens: int
    block_stride: int
    head_stride: int
    token_stride: int
    token_bytes: int


def describe(kv_caches: Mapping[str, LayerCache], placement: Placement, groups: Sequence[CacheGroup]) -> KVLayout:
    """One worker's layout.

    Args:
        kv_caches: what vLLM passed to `register_kv_caches`. Layers of other workers (pipeline stages) may be named
            in `groups`; layers that no group names are left out.
        placement: where this worker stands in the model.
        groups: all KV cache groups, in vLLM's order.

    Raises:
        OperatorError: a cache that cannot be transferred (NZ format, indexer or state tensors, layers that
            differ in what the planner takes as equal), naming layer and reason.
    """
    _check_kind(placement, groups)
    mla = groups[0].mla
    parts = [
        (group, name, part, axes)
        for group, cache_group in enumerate(groups)
        for name in cache_group.layer_names
        if name in kv_caches
        for part, axes in _parts(name, kv_caches[name], mla)
    ]
    if not parts:
        raise OperatorError("vLLM registered no KV cache to transfer", "this model cannot be served with P/D")
    parts.sort(key=lambda item: layer_index(item[1]))
    for group, name, _, axes in parts:
        _check_blocks(name, axes, placement.num_blocks, groups[group].block_size)
    heads = _stored_heads(placement, mla)
    _check_heads({axes.heads for *_, axes in parts}, len(heads), placement)
    described = tuple(_group(number, group, parts) for number, group in enumerate(groups))
    return KVLayout(
        regions=tuple(
            Region(
                layer=layer_index(name),
                part=part,
                base=axes.base,
                block_stride=axes.block_stride,
                head_stride=axes.head_stride,
                token_stride=axes.token_stride,
                token_bytes=axes.token_bytes,
                group=group,
            )
            for group, name, part, axes in parts
        ),
        dtype=_dtype(tensor for name in {item[1] for item in parts} for tensor in tensors_of(kv_caches[name])),
        num_blocks=placement.num_blocks,
        block_size=described[0].block_size,
        kernel_blocks_per_block=described[0].kernel_blocks_per_block,
        groups=described if len(described) > 1 or described[0].sliding_window else (),
        tp_rank=placement.tp_rank,
        tp_size=placement.tp_size,
        num_kv_heads=1 if mla else placement.num_kv_heads,
        heads=heads,
        mla=mla,
        packed="" if mla else placement.packed,
        pp_rank=placement.pp_rank,
        pp_size=placement.pp_size,
    )


def layer_index(name: str) -> int:
    """`model.layers.7.self_attn.attn` → 7: the number after the last `layers`-like component, or the only number.

    Raises:
        OperatorError: no number, or several and no telling which counts the layers.
    """
    words = name.split(".")
    numbered = [i for i, word in enumerate(words) if word.isdigit()]
    if len(numbered) > 1:
        numbered = [i for i in numbered if i and words[i - 1] in {"layers", "h", "blocks", "block"}][-1:]
    if len(numbered) != 1:
        raise OperatorError(f"cannot tell the layer's index from its name {name!r}", REPORT)
    return int(words[numbered[0]])


def tensors_of(cache: LayerCache) -> tuple[Tensor, ...]:
    """The tensors of one layer, whichever convention it has."""
    return tuple(cache) if isinstance(cache, tuple | list) else (cast(Tensor, cache),)


def _parts(name: str, cache: LayerCache, mla: bool) -> Iterable[tuple[Part, _Axes]]:
    tensors = tensors_of(cache)
    if not isinstance(cache, tuple | list):
        yield (Part.LATENT if mla else Part.KV), _joined(name, tensors[0])
        return
    if len(tensors) == 1:
        yield (Part.LATENT if mla else Part.KV), _apart(name, tensors[0])
        return
    if len(tensors) != 2:
        raise OperatorError(
            f"{name} has {len(tensors)} cache tensors: sparse attention's indexer cache is not supported",
            "serve this model without P/D",
        )
    first, second = (Part.LATENT, Part.ROPE) if mla else (Part.K, Part.V)
    yield first, _apart(name, tensors[0])
    yield second, _apart(name, tensors[1])


def _joined(name: str, tensor: Tensor) -> _Axes:
    """`[blocks, heads, tokens, content]`, or `[blocks, tokens, content]` with one head."""
    if len(tensor.shape) == 4:
        return _axes(name, tensor, block=0, head=1, token=2)
    if len(tensor.shape) == 3:
        return _axes(name, tensor, block=0, head=None, token=1)
    raise _unknown_shape(name, tensor)


def _apart(name: str, tensor: Tensor) -> _Axes:
    """`[blocks, tokens, heads, size]`."""
    if len(tensor.shape) != 4:
        raise _unknown_shape(name, tensor)
    return _axes(name, tensor, block=0, head=2, token=1)


def _unknown_shape(name: str, tensor: Tensor) -> OperatorError:
    return OperatorError(f"{name} has a cache of shape {tuple(tensor.shape)}, which is unknown here", REPORT)


def _axes(name: str, tensor: Tensor, *, block: int, head: int | None, token: int) -> _Axes:
    strides, size = tensor.stride(), tensor.element_size()
    if strides[-1] != 1 and tensor.shape[-1] != 1:
        raise OperatorError(
            f"{name}: the values of one head and token are not contiguous (strides {tuple(strides)})",
            REPORT,
        )
    token_bytes = tensor.shape[-1] * size
    return _Axes(
        base=tensor.data_ptr(),
        blocks=tensor.shape[block],
        heads=1 if head is None else tensor.shape[head],
        tokens=tensor.shape[token],
        block_stride=strides[block] * size,
        head_stride=token_bytes if head is None else strides[head] * size,
        token_stride=strides[token] * size,
        token_bytes=token_bytes,
    )


def _check_kind(placement: Placement, groups: Sequence[CacheGroup]) -> None:
    if placement.nz:
        raise OperatorError(
            "the KV cache is in NZ (fractal) format, whose blocks have no token or head stride",
            "take enable_kv_nz out of --additional-config",
        )
    if any(group.sparse for group in groups):
        raise OperatorError(
            "this model's sparse attention keeps an indexer cache, which is not transferred",
            "serve this model without P/D",
        )
    recurrent = next((group for group in groups if group.recurrent), None)
    if recurrent is not None:
        raise OperatorError(
            f"{recurrent.layer_names[0]} keeps a recurrent state (Mamba, GDN), which is not transferred",
            "serve this model without P/D",
        )
    if len({group.mla for group in groups}) != 1:
        raise OperatorError(
            "this model mixes MLA with other attention, or has no KV cache", "serve it without P/D"
        )


def _check_blocks(name: str, axes: _Axes, num_blocks: int, block_size: int) -> None:
    """The tensor may count smaller blocks than the scheduler, whole ones only."""
    if block_size % axes.tokens or axes.blocks < num_blocks * (block_size // axes.tokens):
        raise OperatorError(
            f"{name} has {axes.blocks} blocks of {axes.tokens} tokens, "
            f"the scheduler has {num_blocks} of {block_size}",
            "choose a block size that is a multiple of the attention kernel's",
        )


def _check_heads(found: set[int], stored: int, placement: Placement) -> None:
    if found != {stored}:
        raise OperatorError(
            f"layers of this model store {sorted(found)} KV heads per rank, {stored} were expected "
            f"({placement.num_kv_heads} heads on {placement.tp_size} ranks)",
            "models whose layers differ in KV heads cannot be transferred",
        )


def _stored_heads(placement: Placement, mla: bool) -> tuple[int, ...]:
    heads, ranks = 1 if mla else placement.num_kv_heads, placement.tp_size
    if heads % ranks and ranks % heads:
        raise OperatorError(f"{heads} KV heads cannot be spread over {ranks} ranks", "choose another tp")
    return heads_of_rank(heads, ranks, placement.tp_rank)


def _group(number: int, group: CacheGroup, parts: Iterable[tuple[int, str, Part, _Axes]]) -> Group:
    """A group without layers on this worker (another pipeline stage's) counts its blocks like the kernel."""
    tokens = {axes.tokens for of, _, _, axes in parts if of == number} or {group.block_size}
    if len(tokens) != 1:
        raise OperatorError(
            f"layers of KV cache group {number} have attention blocks of {sorted(tokens)} tokens",
            "models whose layers differ in block size cannot be transferred",
        )
    return Group(
        block_size=group.block_size,
        kernel_blocks_per_block=group.block_size // tokens.pop(),
        sliding_window=group.sliding_window,
    )


def _dtype(tensors: Iterable[Tensor]) -> str:
    names = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    if len(names) != 1:
        raise OperatorError(f"the KV cache mixes {', '.join(sorted(names))}", "choose one --kv-cache-dtype")
    return names.pop()
