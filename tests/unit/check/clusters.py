"""A good NPU cluster and ways to change it."""

from __future__ import annotations

from typing import Any

from ascend_pd.check.finding import Finding
from ascend_pd.check.judge import judge_spec
from ascend_pd.spec.parse import parse_spec
from tests.unit.spec.texts import text_of

Data = dict[str, Any]
QWEN3_32B = {
    "layers": 64,
    "attentionHeads": 64,
    "kvHeads": 8,
    "headDim": 128,
    "hiddenSize": 5120,
    "vocabSize": 151936,
    "weightBytes": 65524246528,
}


def good(hardware: str = "A3") -> Data:
    """Prefill TP 8 and decode TP 4 of Qwen3-32B on two hosts; no rule says anything."""
    return {
        "apiVersion": "ascend-pd/v1",
        "kind": "PDCluster",
        "metadata": {"name": "good"},
        "spec": {
            "model": {"path": "/models/Qwen3-32B", "maxModelLen": 32768, "geometry": dict(QWEN3_32B)},
            "connector": {
                "protocol": "ascend",
                "kvPort": 36000,
                "secretFile": "/etc/ascend-pd/secret",
                "closedNetwork": True,
            },
            "pools": [
                {
                    "name": "prefill",
                    "role": "prefill",
                    "hardware": hardware,
                    "parallel": {"tp": 8},
                    "hosts": ["10.0.0.1"],
                    "port": 8100,
                },
                {
                    "name": "decode",
                    "role": "decode",
                    "hardware": hardware,
                    "parallel": {"tp": 4},
                    "hosts": ["10.0.0.2"],
                    "port": 8200,
                },
            ],
            "proxy": {"host": "0.0.0.0", "port": 8000},
        },
    }


def findings(data: Data, rule: str = "") -> list[Finding]:
    """What the static rules say, of one rule when named."""
    found = judge_spec(parse_spec(text_of(data)).cluster)
    return [f for f in found if not rule or f.rule == rule]
