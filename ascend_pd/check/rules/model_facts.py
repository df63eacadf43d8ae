"""The model's figures are not known, so memory, heads and transfer times cannot be judged.

They are read from `config.json` and the safetensors index in `model.path`. Where the check runs away from the
weights, `model.geometry` gives them.

Fix: run the check where the model directory is, or fill `model.geometry`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, unknown
from ascend_pd.check.subject import Subject

NAME = "model-facts"
SEVERITY = "unknown"
ZH = """不知道模型的参数，因此无法判断显存、注意力头与传输时间。

参数取自 `model.path` 中的 `config.json` 与 safetensors 索引。检查不在权重所在机器上运行时，由
`model.geometry` 给出。

处理：在有模型目录的机器上运行检查，或填写 `model.geometry`。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """One finding per model path."""
    seen = set()
    for pool in subject.pools:
        if pool.model_path in seen:
            continue
        seen.add(pool.model_path)
        if missing := pool.facts.missing():
            message = f"{pool.model_path}: no {', '.join(missing)} in {pool.facts.source}"
            yield unknown(NAME, "$.spec.model.geometry", message, f"give {', '.join(missing)}")
