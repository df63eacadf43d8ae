"""What a version of vLLM does where two versions differ: facts for the connectors, without importing vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BlockIds = tuple[list[int], ...]
"""Block ids in token order, one list per KV cache group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Behaviour of one vLLM series. Where a flag is False the connector must live without it."""

    fails_by_request: bool
    """`TransferResults.failed_recving` reaches the scheduler. Without it a failed load is reported by its
    block ids, which works for a single KV cache group only."""
    block_failures_need_one_group: bool = True
    """Reporting block ids of failed loads with several KV cache groups kills the engine core (both series)."""
    saves_on_empty_steps: bool
    """`wait_for_save` is called in steps without a forward too."""
    loads_after_forward: bool
    """`start_load_kv` of asynchronous loads runs after the forward, so after the layer hooks. Never prepare the
    step's sends there: `bind_connector_metadata` is the first call of a step in both series."""
    local_hit_block_aligned: bool
    """`num_computed_tokens` given to `get_num_new_matched_tokens` is a multiple of the block size."""
    defers_block_free: bool
    """Of a consumer with overlapping steps (async scheduling): blocks go back to the pool only after every step that
    may still write them. Without it such a step could write over a cache that has just been received."""
    steps_for_pending_push: bool
    """`has_pending_push_work` keeps the engine stepping. Without it only a request with a delayed free does."""
    drops_output_of_preempted: bool
    """`requires_kv_delivery`: a preempted producer's sampled output is dropped and computed again."""
    one_kv_storage: bool
    """All layers are views of one allocation; else there is one allocation per KV cache tensor."""
    generate_reads_kv_params: bool
    """`/inference/v1/generate` takes `kv_transfer_params` at the top level; else it must be sent inside
    `sampling_params.extra_args`."""
    cpu_block_multiple: int
    """The CPU attention's block size must be a multiple of this."""


@dataclass(slots=True)
class StandInResults:
    """`KVConnectorTransferResults` for versions that have none: same fields, same meaning."""

    finished_sending: set[str] = field(default_factory=set)
    finished_recving: set[str] = field(default_factory=set)
    failed_recving: set[str] = field(default_factory=set)


def kv_params_of(request: Any) -> dict[str, Any]:
    """A request's `kv_transfer_params`, empty when it has none. A copy: vLLM hands out its own mutable dict."""
    raw = request.kv_transfer_params
    return dict(raw) if raw else {}


def allocated_block_ids(blocks: Any) -> BlockIds:
    """The ids inside the `KVCacheBlocks` that `update_state_after_alloc` gets, a prefix hit's included."""
    ids: BlockIds = blocks.get_block_ids()
    return ids
