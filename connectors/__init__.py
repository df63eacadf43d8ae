"""The two KV connectors, loaded by vLLM through `kv_connector_module_path: connectors`.

The names resolve lazily: importing this package costs nothing and needs neither vllm nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "MooncakeConnector": "connectors.pull.connector:MooncakeConnector",
    "MooncakeConnectorV1": "connectors.pull.connector:MooncakeConnector",
    "MooncakeLayerwiseConnector": "connectors.layerwise.connector:MooncakeLayerwiseConnector",
}

__all__ = ["MooncakeConnector", "MooncakeConnectorV1", "MooncakeLayerwiseConnector"]


def __getattr__(name: str) -> Any:
    target = _LAZY.get(name)
    if target is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)
