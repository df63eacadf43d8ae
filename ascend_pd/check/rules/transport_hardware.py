"""The transport or its protocol does not run on this hardware.

`ascend` (Mooncake) and MemFabric need NPUs; `device_sdma` is A3's fabric; `device_rdma` and `device_sdma`
belong to MemFabric, the others to Mooncake. HCCS reaches as far as one SuperPoD: between two, only RDMA works.
`tcp` between NPUs works through host memory and is slow, which is a warning.

Fix: the protocol that the message names.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.cluster import Hardware

NAME = "transport-hardware"
SEVERITY = "error"
ZH = """传输层或其协议不能在此硬件上运行。

`ascend`(Mooncake)与 MemFabric 需要 NPU;`device_sdma` 是 A3 的互联；`device_rdma` 与 `device_sdma` 属于
MemFabric，其余属于 Mooncake。HCCS 只在一个 SuperPoD 内可达：跨 SuperPoD 只能用 RDMA。NPU 之间用 `tcp` 要经过
主机内存，能用但慢，给出警告。

处理：改用提示中的协议。
"""
OF_TRANSPORT = {"mooncake": ("ascend", "tcp", "rdma"), "memfabric": ("device_sdma", "device_rdma")}
PATH = "$.spec.connector.protocol"


def check(subject: Subject) -> Iterator[Finding]:
    """Transport with protocol, each with every generation present, SuperPoDs per pair."""
    connector = subject.spec.connector
    protocol, transport = connector.protocol, connector.transport
    if protocol not in OF_TRANSPORT[transport]:
        message = f"{transport} has no protocol {protocol}"
        yield error(NAME, PATH, message, f"choose {' or '.join(OF_TRANSPORT[transport])}")
        return
    if transport == "memfabric" and not connector.memfabric_store:
        message = "MemFabric needs a configuration store and none is named"
        yield error(NAME, "$.spec.connector.memfabricStore", message, "set memfabricStore: tcp://HOST:PORT")
    pools = [pool for pool in subject.pools if pool in subject.prefill or pool in subject.decode]
    kinds = {pool.spec.hardware: pool for pool in pools}
    for pool in kinds.values():
        if found := _on(pool, transport, protocol):
            yield found
    for p, d in subject.pairs:
        if found := _between(p, d, protocol):
            yield found


def _on(pool: Pool, transport: str, protocol: str) -> Finding | None:
    kind = pool.spec.hardware
    if kind is Hardware.CPU and (protocol == "ascend" or transport == "memfabric"):
        what = "protocol ascend" if protocol == "ascend" else "transport memfabric"
        return error(
            NAME, PATH, f"{what} needs NPUs, pool {pool.name!r} is cpu", "transport: mooncake, protocol: tcp"
        )
    if protocol == "device_sdma" and kind is not Hardware.A3:
        return error(NAME, PATH, f"device_sdma runs on A3, pool {pool.name!r} is {kind}", "protocol: device_rdma")
    if protocol == "tcp" and kind is not Hardware.CPU:
        message = f"tcp moves the cache of pool {pool.name!r} ({kind}) through host memory: slow, for trials only"
        return warning(NAME, PATH, message, "protocol: ascend")
    return None


def _between(p: Pool, d: Pool, protocol: str) -> Finding | None:
    ours, theirs = p.spec.super_pod, d.spec.super_pod
    if not ours or not theirs or ours == theirs:
        return None
    what = f"prefill pool {p.name!r} is in SuperPoD {ours}, decode pool {d.name!r} in {theirs}"
    if protocol == "device_sdma":
        return error(NAME, f"{d.path}.superPod", f"{what}: HCCS does not reach across", "protocol: device_rdma")
    over_rdma = all(pool.env.get("HCCL_INTRA_ROCE_ENABLE") == "1" for pool in (p, d))
    if protocol == "ascend" and not over_rdma:
        fix = "put both in one SuperPoD, or set HCCL_INTRA_ROCE_ENABLE=1 on both"
        return warning(NAME, f"{d.path}.superPod", f"{what}: the cache must go over RoCE", fix)
    return None
