"""Two processes of this cluster would listen on one port of one host.

Every engine (DP rank) has an HTTP port, `pool.port + i`, and a side channel port, `connector.kvPort` + its
place on the host; the metaserver, the proxy and its admin API have one each. A proxy bound to every address
clashes with any of them on its machine.

Fix: move one of the two ranges; `ascend-pd check --format text` lists all ports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Subject, is_loopback
from ascend_pd.spec.topology import WILDCARDS, Listener

NAME = "port-overlap"
SEVERITY = "error"
ZH = """本集群的两个进程会监听同一主机的同一端口。

每个引擎（DP rank）有一个 HTTP 端口 `pool.port + i` 和一个旁路通道端口（`connector.kvPort` 加上它在主机上的位
置）；metaserver、代理及其管理接口各有一个。绑定所有地址的代理会与同机的任何一个冲突。

处理：移开其中一段端口；`ascend-pd check --format text` 会列出全部端口。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Listeners with a host of their own first, then those that may be on any host."""
    by_port: dict[tuple[str, int], list[Listener]] = defaultdict(list)
    floating: list[Listener] = []
    for listener in subject.topology.listeners:
        host = _host(subject, listener)
        (by_port[(host, listener.address.port)] if host else floating).append(listener)
    told = set()
    for (host, port), listeners in by_port.items():
        for other in listeners[1:]:
            key = (listeners[0].path, other.path, listeners[0].pool, other.pool)
            if key not in told:
                told.add(key)
                message = f"{listeners[0].what} and {other.what} both listen on {host} port {port}"
                yield error(NAME, other.path, message, f"move {other.path} or {listeners[0].path}")
    pods = {host for r in subject.topology.replicas if r.in_kubernetes for host in r.hosts}
    yield from _floating({key: value for key, value in by_port.items() if key[0] not in pods}, floating)


def _host(subject: Subject, listener: Listener) -> str:
    """The machine, or empty when the file does not say which."""
    host = listener.address.host
    if listener.pool or not (host in WILDCARDS or is_loopback(host)):
        return "127.0.0.1" if is_loopback(host) else host
    if subject.single_host and not subject.topology.replicas[0].in_kubernetes:
        only = subject.topology.hosts[0]
        return "127.0.0.1" if is_loopback(only) else only
    return ""


def _floating(by_port: dict[tuple[str, int], list[Listener]], floating: list[Listener]) -> Iterator[Finding]:
    taken: dict[int, tuple[str, Listener]] = {}
    for (host, port), listeners in by_port.items():
        taken.setdefault(port, (host, listeners[0]))
    for listener in floating:
        port = listener.address.port
        if port in taken:
            host, other = taken[port]
            message = f"{listener.what} and {other.what} both use port {port}: they cannot both run on {host}"
            yield warning(NAME, listener.path, message, f"move {listener.path} or keep them on different machines")
        taken[port] = (listener.address.host, listener)
