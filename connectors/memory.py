"""This rank's KV cache as the planner sees it, from what vLLM registered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ascend_pd.layout.description import KVLayout
from connectors.compat import cache_groups, cpu_attention_isa
from connectors.device.kv_layout import Placement, describe


def describe_worker(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any], hardware: str
) -> KVLayout:
    """The layout of the calling worker.

    Raises:
        OperatorError: a cache that cannot be transferred, naming layer and reason.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    groups = cache_groups(kv_cache_config)
    parallel = vllm_config.parallel_config
    placement = Placement(
        num_blocks=kv_cache_config.num_blocks,
        num_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
        tp_rank=get_tp_group().rank_in_group,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
        packed=cpu_attention_isa(vllm_config, groups[0].spec) if hardware == "cpu" else "",
        nz=bool((vllm_config.additional_config or {}).get("enable_kv_nz")),
    )
    return describe(kv_caches, placement, groups)
