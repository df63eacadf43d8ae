"""Small cluster files for tests."""

from __future__ import annotations

import json
from typing import Any

from ascend_pd.spec.cluster import PDCluster
from ascend_pd.spec.parse import parse_spec

Data = dict[str, Any]


def pool(name: str, role: str, port: int, **more: Any) -> Data:
    return {"name": name, "role": role, "hardware": "cpu", "port": port, **more}


def cluster_data(*pools: Data, **spec: Any) -> Data:
    """A cluster of one P and one D on CPU unless pools are given; `spec` replaces sections."""
    chosen = list(pools) or [pool("prefill", "prefill", 8100), pool("decode", "decode", 8200)]
    body: Data = {
        "model": {"path": "smollm2", "maxModelLen": 2048},
        "connector": {"protocol": "tcp"},
        "pools": chosen,
        **spec,
    }
    return {"apiVersion": "ascend-pd/v1", "kind": "PDCluster", "metadata": {"name": "test"}, "spec": body}


def text_of(data: Data) -> str:
    """JSON is YAML, and has no anchors for what appears twice."""
    return json.dumps(data, indent=1)


def cluster(*pools: Data, **spec: Any) -> PDCluster:
    return parse_spec(text_of(cluster_data(*pools, **spec))).cluster
