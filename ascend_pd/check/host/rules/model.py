"""The model directory cannot be used on this node.

It must be readable, have a config.json, and every weight file that its index names.

Fix: mount or copy the whole directory.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-model"
SEVERITY = "error"
ZH = """此节点上的模型目录不可用。

它必须可读、有 config.json，并包含索引所列的全部权重文件。

处理：挂载或复制整个目录。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """As gathered."""
    if facts.model_problem:
        message = f"{facts.model_dir}: {facts.model_problem}"
        yield error(NAME, f"host:{facts.hostname}", message, "mount or copy the whole model directory")
