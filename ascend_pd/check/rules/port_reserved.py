"""A port lies where the transport picks its own ports at random.

Mooncake's Ascend direct transport listens somewhere in 20000 … 20000 + 1000 · devices (27999 on A2, 35999 on
A3) on every NPU host. A listener of ours in there works or fails by luck. On CPU, Mooncake over TCP was seen to
take ports in 15000 … 17000.

Fix: `kvPort` 28000 or higher on A2, 36000 or higher on A3, and HTTP ports outside too; or set ASCEND_BASE_PORT.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Subject
from ascend_pd.models.hardware import CATALOGUE
from ascend_pd.spec.cluster import Hardware

NAME = "port-reserved"
SEVERITY = "error"
ZH = """端口落在传输层随机选取端口的区间内。

Mooncake 的 Ascend direct transport 在每台 NPU 主机上监听 20000 … 20000 + 1000 · 设备数（A2 到 27999,A3 到
35999）中的某个端口，其中的端口能否用全凭运气。在 CPU 上，Mooncake TCP 曾占用 15000 … 17000 的端口。

处理：A2 上 `kvPort` 不小于 28000,A3 上不小于 36000,HTTP 端口同样避开；或设置 ASCEND_BASE_PORT。
"""
CPU_RANGE = range(15000, 17001)


def check(subject: Subject) -> Iterator[Finding]:
    """One finding per place in the file."""
    if subject.spec.connector.transport != "mooncake":
        return
    hardware = {replica.pool: replica.hardware for replica in subject.topology.replicas}
    kinds = set(hardware.values())
    told = set()
    for listener in subject.topology.listeners:
        kind = hardware.get(listener.pool) or (next(iter(kinds)) if len(kinds) == 1 else Hardware.CPU)
        port = listener.address.port
        if listener.path in told:
            continue
        if kind is Hardware.CPU:
            if port in CPU_RANGE and subject.spec.connector.protocol == "tcp":
                told.add(listener.path)
                message = (
                    f"{listener.what}: port {port} is among those that Mooncake takes at random (15000-17000)"
                )
                yield warning(NAME, listener.path, message, "choose a port outside 15000-17000")
            continue
        window = _window(subject, listener.pool, kind)
        if port in window and subject.spec.connector.protocol == "ascend":
            told.add(listener.path)
            message = (
                f"{listener.what}: port {port} is in {window.start}-{window.stop - 1}, where the {kind} direct "
                "transport picks its own ports"
            )
            yield error(NAME, listener.path, message, f"{listener.path} must be {window.stop} or higher")


def _window(subject: Subject, pool_name: str, kind: Hardware) -> range:
    window = CATALOGUE[kind].reserved_ports
    env = next((p.env for p in subject.pools if p.name == pool_name), subject.spec.engine.env)
    base = env.get("ASCEND_BASE_PORT", "")
    return range(int(base), int(base) + len(window)) if base.isdecimal() else window
