"""`maxModelLen` is past what the model was made for.

vLLM refuses to start with a longest request past `max_position_embeddings`, unless the configuration stretches
positions.

Fix: lower `maxModelLen`, or add `rope_scaling` to config.json where the model's authors describe it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject

NAME = "model-length"
SEVERITY = "error"
ZH = """`maxModelLen` 超过模型设计的长度。

最长请求超过 `max_position_embeddings` 时，除非配置对位置做了伸缩，否则 vLLM 拒绝启动。

处理：降低 `maxModelLen`，或在模型作者说明的情况下为 config.json 加上 `rope_scaling`。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Each value once."""
    told = set()
    for pool in subject.pools:
        longest = pool.facts.max_position
        if not longest or pool.facts.has_scaled_positions or pool.max_model_len <= longest:
            continue
        own = pool.spec.overrides.max_model_len
        path = f"{pool.path}.overrides.maxModelLen" if own else "$.spec.model.maxModelLen"
        if path not in told:
            told.add(path)
            yield error(NAME, path, f"{pool.max_model_len} is past the model's {longest}", f"at most {longest}")
