"""The node's NPUs are not all there, not healthy, or already in use.

Seen by `npu-smi info` and as `/dev/davinciN`. Health other than OK, fewer devices than the pool's generation
has, or device memory that somebody else holds.

Fix: `npu-smi info -t health -i N`; mount the devices into the container; stop what uses them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.tools import smi_devices
from ascend_pd.check.subject import Pool, Subject

NAME = "host-devices"
SEVERITY = "error"
ZH = """节点上的 NPU 不全、不健康，或已被占用。

由 `npu-smi info` 与 `/dev/davinciN` 得出：健康状态不是 OK、设备少于该代硬件应有的数量，或设备显存被他人占用。

处理：`npu-smi info -t health -i N`；把设备挂载进容器；停止占用它们的进程。
"""
IDLE_SHARE = 0.15


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Count, health, memory in use."""
    where = f"host:{facts.hostname}"
    seen = facts.command("npu-smi info")
    wanted = pool.hardware.devices_per_node
    if not pool.is_npu or seen is None:
        return
    if seen.state != "ran":
        yield unknown(NAME, where, f"npu-smi: {seen.state}", "run this where the driver's tools are mounted")
        return
    devices = smi_devices(seen.output)
    if not devices and "fail" not in seen.output.lower():
        yield unknown(NAME, where, "the table that npu-smi prints cannot be read", "", seen.lines[:6])
        return
    if len(devices) < wanted:
        message = f"npu-smi lists {len(devices)} devices, {pool.spec.hardware} has {wanted}"
        yield error(NAME, where, message, "look for a dead card or a partial mount", seen.lines[:6])
    elif len(facts.devices) < wanted:
        message = f"{len(facts.devices)} of {wanted} /dev/davinciN are here"
        yield error(NAME, where, message, "mount all of them into the container", facts.devices)
    for number, device in enumerate(devices):
        if device.health.upper() != "OK":
            message = f"device {number} ({device.name}) has health {device.health}"
            yield error(NAME, where, message, "npu-smi info -t health; reset or replace it")
        if device.memory_used_mb > IDLE_SHARE * device.memory_total_mb > 0:
            message = f"device {number} already holds {device.memory_used_mb} of {device.memory_total_mb} MB"
            yield warning(NAME, where, message, "stop what uses it: npu-smi info lists processes")
