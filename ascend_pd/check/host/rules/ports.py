"""A port cannot be bound here, or the kernel may give it to somebody else.

Each port of this node is bound and let go. A port inside the ephemeral range (`ip_local_port_range`) can be
taken by any outgoing connection before our process starts, unless `ip_local_reserved_ports` has it.

Fix: stop who holds it; `sysctl -w net.ipv4.ip_local_reserved_ports=36000-36063`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-ports"
SEVERITY = "error"
ZH = """端口无法在此绑定，或内核可能把它分给别人。

逐一绑定并释放本节点的端口。临时端口范围（`ip_local_port_range`）内的端口可能在我们的进程启动前被任何外出连接
占用，除非列在 `ip_local_reserved_ports` 中。

处理：停止占用者；`sysctl -w net.ipv4.ip_local_reserved_ports=36000-36063`。
"""


def reserved(text: str) -> list[range]:
    """`36000-36063,50051` → ranges."""
    found = []
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.strip().isdecimal():
            last = high.strip()
            found.append(range(int(low), int(last if last.isdecimal() else low) + 1))
    return found


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Bind errors, then the ephemeral range."""
    where = f"host:{facts.hostname}"
    for port in facts.ports:
        if port.error:
            message = f"{port.what}: port {port.port} cannot be bound: {port.error}"
            yield error(NAME, where, message, f"stop who holds it (ss -ltnp), or move {port.path}")
    bounds = (facts.files.get("/proc/sys/net/ipv4/ip_local_port_range") or "").split()
    if len(bounds) != 2:
        yield unknown(NAME, where, "the kernel's ephemeral range cannot be read")
        return
    ephemeral = range(int(bounds[0]), int(bounds[1]) + 1)
    kept = reserved(facts.files.get("/proc/sys/net/ipv4/ip_local_reserved_ports") or "")
    exposed = sorted(p.port for p in facts.ports if p.port in ephemeral and not any(p.port in r for r in kept))
    if exposed:
        shown = f"{exposed[0]}-{exposed[-1]}" if len(exposed) > 1 else str(exposed[0])
        message = f"{len(exposed)} ports ({shown}) are in the ephemeral range {bounds[0]}-{bounds[1]}"
        yield warning(NAME, where, message, f"sysctl -w net.ipv4.ip_local_reserved_ports={shown}")
