"""Control ports can be reached from other machines without a secret; data ports can be reached at all.

Whoever reaches a side channel can learn addresses and release requests; the metaserver hands out reservations;
the admin API removes instances. Off loopback each needs its secret. The transports' data ports authenticate
nobody: the network itself must be closed, which the operator confirms with `closedNetwork: true`.

Fix: `connector.secretFile` and `proxy.adminKeyFile`; a closed network for the listed ports.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Subject, is_loopback
from ascend_pd.models.hardware import CATALOGUE
from ascend_pd.spec.cluster import Hardware

NAME = "secret"
SEVERITY = "error"
ZH = """控制端口无需密钥即可从其他机器访问；数据端口任何人可达。

能访问旁路通道的人可以得知地址并释放请求；metaserver 分发预留；管理接口可以移除实例。离开回环地址后，各自都需
要密钥。传输层的数据端口不认证任何人：网络本身必须封闭，由运维人员以 `closedNetwork: true` 确认。

处理：设置 `connector.secretFile` 与 `proxy.adminKeyFile`；为所列端口封闭网络。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Side channel, metaserver, admin, data ports."""
    connector, proxy = subject.spec.connector, subject.spec.proxy
    moves = bool(subject.pairs)
    path = "$.spec.connector.secretFile"
    if moves and subject.off_loopback and not connector.secret_file:
        message = f"side channels on {_hosts(subject)} answer anybody who reaches them"
        yield error(NAME, path, message, "set connector.secretFile to a file present on every host")
    metaserver = subject.topology.metaserver
    if metaserver and not is_loopback(metaserver.host) and not connector.secret_file and not subject.off_loopback:
        message = f"the metaserver on {metaserver.host}:{metaserver.port} answers anybody who reaches it"
        yield error(NAME, path, message, "set connector.secretFile, or bind it to 127.0.0.1")
    admin = subject.topology.admin
    if admin and not is_loopback(admin.host) and not proxy.admin_key_file:
        message = f"the admin API on {admin.host}:{admin.port} obeys anybody who reaches it"
        yield error(NAME, "$.spec.proxy.adminKeyFile", message, "set proxy.adminKeyFile, or adminHost: 127.0.0.1")
    if moves and subject.off_loopback and not connector.closed_network:
        message = f"data ports are unauthenticated ({_data_ports(subject)}); the network must be closed to others"
        fix = "close the network to others, then say closedNetwork: true"
        yield warning(NAME, "$.spec.connector.closedNetwork", message, fix)


def _hosts(subject: Subject) -> str:
    hosts = [host for host in subject.topology.hosts if not is_loopback(host)]
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _data_ports(subject: Subject) -> str:
    kinds = {pool.spec.hardware for pool in subject.pools}
    if subject.spec.connector.transport == "memfabric":
        return "chosen by MemFabric at random"
    ranges = sorted({(r.start, r.stop - 1) for k in kinds if (r := CATALOGUE[k].reserved_ports)})
    shown = [f"{low}-{high}" for low, high in ranges]
    return ", ".join(shown + (["15000-17000"] if Hardware.CPU in kinds else []))
