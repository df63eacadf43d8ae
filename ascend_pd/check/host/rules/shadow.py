"""A foreign package called `proxy` or `connectors` shadows ours.

Other published packages use these import names. An engine would load the wrong connector, or fail with a
message about a missing class.

Fix: uninstall the other package, or use one image per process.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-shadow"
SEVERITY = "error"
ZH = """名为 `proxy` 或 `connectors` 的外来包遮住了我们的包。

其他已发布的包也用这些导入名。引擎会加载错误的连接器，或报告找不到某个类。

处理：卸载那个包，或每个进程使用单独的镜像。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Where each would be imported from."""
    for name, package in facts.shadows.items():
        if package.found != package.ours:
            message = f"import {name} finds {package.found}, ours is {package.ours}"
            yield error(NAME, f"host:{facts.hostname}", message, f"uninstall what provides {package.found}")
