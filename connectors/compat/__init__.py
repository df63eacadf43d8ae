"""vLLM's version differences, and nothing else: the connectors import vLLM's connector classes from here.

Importing this package picks the adapter of the installed vLLM and refuses an unknown one (OperatorError with the
known ones). Every adapter has the same names:

`ConnectorBase`
    `KVConnectorBase_V1` with support for hybrid caches. Override, instead of vLLM's own methods,
    * `transfer_results(finished_request_ids) -> TransferResults` in the worker (for `get_finished` and
      `get_transfer_results`): what finished since the last call. On a series without
      `FEATURES.fails_by_request` its `failed_recving` is not delivered: report the blocks through
      `get_block_ids_with_load_errors` as well, in this step or an earlier one;
    * `request_ended(request, block_ids) -> (delay_free, kv_transfer_params)` in the scheduler (for
      `request_finished` and `request_finished_all_groups`): `block_ids` covers the computed tokens only, in every
      series, one list per KV cache group.
    All other methods of vLLM's base class have the same meaning in every series, save where `FEATURES` says so.
`TransferResults`, `KVConnectorMetadata`, `KVConnectorWorkerMetadata`, `KVConnectorRole`
    vLLM's classes, or a stand-in.
`FEATURES`
    what this series does and does not do.
`cache_groups`, `allocated_block_ids`, `kv_params_of`, `cpu_attention_isa`
    facts read from vLLM's objects.

Three things that hold in every series and are easily taken for granted:
* `update_connector_output` runs at every step only behind an executor that aggregates (multiprocess, Ray). With
  one worker in the engine's own process an output without news is dropped before it: a scheduler side that has
  to be asked at each step must see to it that its worker has news (`build_connector_worker_meta`).
* `get_block_ids_with_load_errors` must not name a request's blocks later than the step that reports it in
  `finished_recving`.
* An unknown or repeated request id in the results kills the engine core.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from ascend_pd.versions import VLLM_DISTRIBUTIONS, vllm_adapter
from connectors.compat.features import BlockIds, Features, allocated_block_ids, kv_params_of
from connectors.device.kv_layout import CacheGroup


def _installed() -> dict[str, str]:
    found = {}
    for name in VLLM_DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


ADAPTER = vllm_adapter(_installed())
"""The chosen module's name."""

if TYPE_CHECKING or ADAPTER == "vllm_0_32":
    from connectors.compat.vllm_0_32 import (
        FEATURES,
        ConnectorBase,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        TransferResults,
        cache_groups,
        cpu_attention_isa,
    )
else:
    from connectors.compat.vllm_0_23 import (
        FEATURES,
        ConnectorBase,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorWorkerMetadata,
        TransferResults,
        cache_groups,
        cpu_attention_isa,
    )

__all__ = [
    "ADAPTER",
    "FEATURES",
    "BlockIds",
    "CacheGroup",
    "ConnectorBase",
    "Features",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "KVConnectorWorkerMetadata",
    "TransferResults",
    "allocated_block_ids",
    "cache_groups",
    "cpu_attention_isa",
    "kv_params_of",
]
