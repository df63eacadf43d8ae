"""`loadFailurePolicy: recompute` where decode cannot recompute.

When a load fails, decode computes the prompt itself. vLLM names failed blocks for one KV cache group only;
models with several groups (sliding windows beside full attention) or with recurrent layers (Mamba, gated delta
net) cannot go back to the first bad block.

Fix: `loadFailurePolicy: fail`; the proxy then retries elsewhere or falls back to a union pool.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject

NAME = "load-failure"
SEVERITY = "error"
ZH = """在 decode 无法重算之处使用 `loadFailurePolicy: recompute`。

加载失败时由 decode 自行计算提示词。vLLM 只能为一个 KV 缓存组指明失败的块；有多个组（滑动窗口与全注意力并存）
或带循环层（Mamba、gated delta net）的模型无法回到第一个坏块。

处理：`loadFailurePolicy: fail`；代理会在别处重试或退回 union 池。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """One finding: the policy is the cluster's."""
    if subject.spec.connector.load_failure_policy != "recompute":
        return
    for pool in subject.decode:
        facts = pool.facts
        if facts.num_groups > 1 or facts.recurrent:
            kinds = " and ".join(sorted({kind.value for kind in facts.kinds}))
            message = (
                f"{facts.architecture or 'the model'} has {kinds} layers, and recompute works for one group only"
            )
            yield error(NAME, "$.spec.connector.loadFailurePolicy", message, "set loadFailurePolicy: fail")
            return
