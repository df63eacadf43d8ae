"""A derived port is past 65535.

Ports are counted up from the ones in the file, one per DP rank: a high start and many ranks run out of ports.

Fix: start lower.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject
from ascend_pd.spec.topology import Listener

NAME = "port-range"
SEVERITY = "error"
ZH = """推导出的端口超过 65535。

端口从文件中给出的值起，按每个 DP rank 一个往上数：起点太高而 rank 太多，端口就不够了。

处理：降低起始端口。
"""
LAST = 65535


def check(subject: Subject) -> Iterator[Finding]:
    """One finding per place in the file, naming the highest port."""
    worst: dict[str, Listener] = {}
    for listener in subject.topology.listeners:
        port = listener.address.port
        if port > LAST and (listener.path not in worst or port > worst[listener.path].address.port):
            worst[listener.path] = listener
    for path, listener in worst.items():
        over = listener.address.port - LAST
        message = f"{listener.what} would be on port {listener.address.port}, past {LAST}"
        yield error(NAME, path, message, f"lower it by at least {over}")
