"""The connectors take nothing from what vLLM's and vllm-ascend's hooks pass along.

vllm-ascend gives `save_kv_layer` a dict of metadata for MLA and sparse attention, a list of tensors as cache, and an
empty layer name for GDN; its `notify_kv_cache_written` names no layer for GQA. So requests, blocks and layers come
from the connector's own metadata alone. `tests/engine/compat/cases_npu.py` shows the same at run time.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOREIGN = {"attn_metadata", "kv_layer", "forward_context", "kwargs"}


@pytest.mark.parametrize("package", ["pull", "layerwise"])
def test_no_hook_looks_at_what_the_backend_passes(package: str) -> None:
    tree = ast.parse((ROOT / "connectors" / package / "connector.py").read_text(encoding="utf-8"))
    hooks = {
        node.name: {
            name.id for statement in node.body for name in ast.walk(statement) if isinstance(name, ast.Name)
        }
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name in {"save_kv_layer", "start_load_kv", "wait_for_layer_load"}
    }
    assert set(hooks) == {"save_kv_layer", "start_load_kv", "wait_for_layer_load"}
    assert {name: used & FOREIGN for name, used in hooks.items() if used & FOREIGN} == {}


def test_a_layer_without_a_name_is_not_looked_up() -> None:
    text = (ROOT / "connectors/layerwise/worker.py").read_text(encoding="utf-8")
    assert "if self._pusher and layer_name:" in text


@pytest.mark.parametrize("package", ["pull", "layerwise"])
def test_no_hook_is_needed_that_only_vllm_ascend_has(package: str) -> None:
    for path in (ROOT / "connectors" / package).glob("*.py"):
        assert "on_kv_cache_written" not in path.read_text(encoding="utf-8"), path.name
