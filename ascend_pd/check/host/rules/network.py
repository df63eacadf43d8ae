"""A device's network port is down, unhealthy or without a gateway.

`hccn_tool -link`, `-net_health` and `-gateway` for every device. On an A3 these describe the RoCE plane, which
a SuperPoD may not use: there a port that is down is a warning. Health Init means that no detect address is set
yet.

Fix: cable and switch; `hccn_tool -i N -netdetect -s address GATEWAY`; `hccn_tool -i N -gateway -s gateway …`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.hccn import answers, tool_trouble
from ascend_pd.check.host.tools import gateway, link_up, net_health
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.spec.cluster import Hardware

NAME = "host-network"
SEVERITY = "error"
ZH = """设备的网口断开、不健康或没有网关。

对每个设备运行 `hccn_tool -link`、`-net_health` 与 `-gateway`。在 A3 上它们描述 RoCE 平面，SuperPoD 可能不用
它：此时断开只是警告。健康状态 Init 表示尚未设置检测地址。

处理：检查线缆与交换机；`hccn_tool -i N -netdetect -s address GATEWAY`；
`hccn_tool -i N -gateway -s gateway …`。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Link, health, gateway of each device."""
    if not pool.is_npu:
        return
    if trouble := tool_trouble(facts, NAME):
        yield trouble
        return
    where = f"host:{facts.hostname}"
    bad = error if pool.spec.hardware is Hardware.A2 else warning
    for device, run in answers(facts, "-link -g"):
        up = link_up(run.output)
        if up is None:
            yield unknown(NAME, where, f"device {device}: no link status", "", run.lines)
        elif not up:
            yield bad(NAME, where, f"device {device}: link is DOWN", "check cable and switch port", run.lines)
    for device, run in answers(facts, "-net_health -g"):
        health = net_health(run.output)
        if not health:
            yield unknown(NAME, where, f"device {device}: no network health", "", run.lines)
        elif health == "Init":
            fix = f"hccn_tool -i {device} -netdetect -s address GATEWAY"
            yield warning(NAME, where, f"device {device}: network health Init, no detect address", fix, run.lines)
        elif health != "Success":
            message = f"device {device}: network health {health}"
            yield bad(NAME, where, message, "check switch, VLAN and gateway", run.lines)
    for device, run in answers(facts, "-gateway -g"):
        if not gateway(run.output):
            message = f"device {device}: no gateway: hosts in another subnet cannot be reached"
            yield warning(NAME, where, message, f"hccn_tool -i {device} -gateway -s gateway ADDRESS", run.lines)
