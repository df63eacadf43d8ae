"""Processes on other machines are told an address that means their own.

127.0.0.1 and 0.0.0.0 are not addresses of the metaserver or of an engine as seen from another machine.

Fix: the machine's address in the network that the engines share.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject, is_loopback
from ascend_pd.spec.topology import WILDCARDS

NAME = "address-unreachable"
SEVERITY = "error"
ZH = """告诉其他机器上进程的地址其实指向它们自己。

从另一台机器看，127.0.0.1 与 0.0.0.0 都不是 metaserver 或引擎的地址。

处理：填写该机器在引擎共用网络中的地址。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Hosts of pools, then the metaserver."""
    hosts = subject.topology.hosts
    for pool in subject.pools:
        for index, host in enumerate(pool.spec.hosts):
            if host in WILDCARDS:
                message = f"pool {pool.name!r}: {host} is no host"
                yield error(NAME, f"{pool.path}.hosts[{index}]", message, "name the machine's address")
            elif is_loopback(host) and any(not is_loopback(other) for other in hosts):
                message = f"pool {pool.name!r}: {host} cannot be reached from {_other(hosts)}"
                yield error(NAME, f"{pool.path}.hosts[{index}]", message, "name the machine's address")
    metaserver = subject.topology.metaserver
    in_kubernetes = any(replica.in_kubernetes for replica in subject.topology.replicas)
    if metaserver is None or in_kubernetes:
        return
    unreachable = metaserver.host in WILDCARDS or (is_loopback(metaserver.host) and subject.off_loopback)
    if unreachable and not (metaserver.host in WILDCARDS and not subject.off_loopback):
        message = f"engines on {_other(hosts)} are told to reach the metaserver at {metaserver.host}"
        yield error(NAME, "$.spec.metaserver.host", message, "name the machine's address")


def _other(hosts: tuple[str, ...]) -> str:
    return next((host for host in hosts if not is_loopback(host)), hosts[0])
