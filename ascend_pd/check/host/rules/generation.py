"""The node is not of the generation that the file says.

Judged by chip names and the number of devices: an A3 may print just Ascend910, so 16 devices with a SuperPoD
answer count as A3. The SuperPoD of all cards must be one, and the file's if the file names one by number.

Fix: correct `hardware`, or run this on the right node.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.tools import Device, field, smi_devices
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.cluster import Hardware

NAME = "host-generation"
SEVERITY = "error"
ZH = """节点的硬件代际与文件不符。

由芯片名和设备数判断：A3 可能只显示 Ascend910，因此有 16 个设备且能回答 SuperPoD 查询的算作 A3。所有卡的
SuperPoD 必须是同一个；文件以数字写明时还须一致。

处理：修正 `hardware`，或在正确的节点上运行。
"""


def generation(devices: list[Device], in_super_pod: bool) -> Hardware | None:
    """A2, A3, or None when it cannot be told."""
    names = {device.name.removeprefix("Ascend") for device in devices}
    if names and all(name.startswith("910B") for name in names):
        return Hardware.A2
    if any(name.startswith(("910_93", "910C")) for name in names) or in_super_pod:
        return Hardware.A3
    return None


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Names, count, SuperPoD."""
    seen = facts.command("npu-smi info")
    if not pool.is_npu or seen is None or seen.state != "ran":
        return
    where = f"host:{facts.hostname}"
    devices = smi_devices(seen.output)
    rows = tuple(line for line in seen.lines if any(device.name in line for device in devices))[:2]
    pods = [
        (name, found)
        for name, run in facts.commands.items()
        if "spod-info" in name and (found := field(run.output, "Super Pod ID"))
    ]
    kind = generation(devices, bool(pods))
    if kind is None:
        names = ", ".join(sorted({d.name for d in devices})) or "nothing"
        yield unknown(NAME, where, f"npu-smi names {names}: no known generation", "", rows)
    elif kind is not pool.spec.hardware:
        message = (
            f"this node is {kind} ({devices[0].name}, {len(devices)} devices), the file says {pool.spec.hardware}"
        )
        yield error(NAME, where, message, f"set hardware: {kind}, or use another node", rows)
    ids = {found for _, found in pods}
    if len(ids) > 1:
        yield error(
            NAME, where, f"cards are in different SuperPoDs: {', '.join(sorted(ids))}", "check the cabling"
        )
    declared = (pool.spec.super_pod or "").rpartition("-")[2]
    if len(ids) == 1 and declared.isdecimal() and declared not in ids:
        message = f"this node is in SuperPoD {ids.pop()}, the file says {pool.spec.super_pod}"
        yield error(NAME, where, message, "correct superPod, or use another node")
