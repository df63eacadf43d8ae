"""What must hold of the adapter of whichever vLLM comes first on PYTHONPATH; run by `test_both_series.py`."""

from __future__ import annotations

import importlib
import inspect
import os
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock

import connectors.compat as compat
from ascend_pd.check.host.facts import ADAPTER_IMPORT
from ascend_pd.versions import ADAPTERS

SERIES = os.environ["ASCEND_PD_TEST_SERIES"]


class Bare(compat.ConnectorBase):
    """The least that a connector has to define."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return compat.KVConnectorMetadata()


def test_the_installed_version_chooses_the_adapter() -> None:
    assert vllm.__version__.startswith(SERIES)
    chosen = compat.ADAPTER
    assert chosen == "vllm_" + SERIES.replace(".", "_")


def test_what_preflight_imports_names_the_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    program = shlex.split(ADAPTER_IMPORT)[-1]
    exec(program, {})
    assert capsys.readouterr().out.splitlines() == [ADAPTERS[SERIES]]


def test_the_base_is_a_connector_that_supports_hybrid_caches() -> None:
    assert issubclass(compat.ConnectorBase, KVConnectorBase_V1)
    assert issubclass(compat.ConnectorBase, SupportsHMA)
    assert not inspect.isabstract(Bare)


def test_every_method_of_vllm_that_the_adapter_overrides_exists_there() -> None:
    ours = {n for n, v in vars(compat.ConnectorBase).items() if inspect.isfunction(v)}
    invented = {"transfer_results", "request_ended"}
    for name in ours - invented:
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name)
        assert list(inspect.signature(theirs).parameters) == list(
            inspect.signature(getattr(compat.ConnectorBase, name)).parameters
        ), name
    assert not any(hasattr(KVConnectorBase_V1, name) for name in invented)


def test_results_have_the_three_sets() -> None:
    results = compat.TransferResults(finished_sending={"a"}, failed_recving={"b"})
    assert (results.finished_sending, results.finished_recving, results.failed_recving) == ({"a"}, set(), {"b"})


def test_results_reach_the_method_that_the_runner_calls() -> None:
    class Reporting(Bare):
        def __init__(self) -> None: ...

        def transfer_results(self, finished_request_ids: set[str]) -> compat.TransferResults:
            return compat.TransferResults(
                finished_sending={"s"} & finished_request_ids, finished_recving={"r"}, failed_recving={"r"}
            )

    runner_asks = "get_transfer_results" if compat.FEATURES.fails_by_request else "get_finished"
    answer = getattr(Reporting(), runner_asks)({"s", "other"})
    if compat.FEATURES.fails_by_request:
        answer = (answer.finished_sending, answer.finished_recving, answer.failed_recving)
    assert tuple(answer) == ({"s"}, {"r"}, {"r"})[: len(tuple(answer))]


def test_flags_say_what_the_sources_say() -> None:
    has = {name: hasattr(KVConnectorBase_V1, name) for name in ("get_transfer_results", "has_pending_push_work")}
    assert compat.FEATURES.fails_by_request is has["get_transfer_results"]
    assert compat.FEATURES.steps_for_pending_push is has["has_pending_push_work"]
    scheduler = inspect.getsource(importlib.import_module("vllm.v1.core.sched.scheduler"))
    assert compat.FEATURES.defers_block_free is ("self.defer_block_free = True" in scheduler)
    assert compat.FEATURES.drops_output_of_preempted is hasattr(KVConnectorBase_V1, "requires_kv_delivery")


def test_block_ids_are_one_list_per_group() -> None:
    blocks = KVCacheBlocks(([KVCacheBlock(7), KVCacheBlock(3)], [KVCacheBlock(1)]))
    assert compat.allocated_block_ids(blocks) == ([7, 3], [1])


def test_params_are_a_copy() -> None:
    raw = {"do_remote_decode": True}
    params = compat.kv_params_of(SimpleNamespace(kv_transfer_params=raw))
    params["do_remote_decode"] = False
    assert raw == {"do_remote_decode": True}
    assert compat.kv_params_of(SimpleNamespace(kv_transfer_params=None)) == {}
