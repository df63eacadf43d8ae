"""The TLS switch is not the same on all devices.

Devices with TLS on and off cannot connect: the link times out (EI0005, EI0006) minutes later. The switch must
be equal on all devices of all nodes.

Fix: `hccn_tool -i N -tls -s enable 0` on every device of every node.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.hccn import answers, tool_trouble
from ascend_pd.check.host.tools import tls_switch
from ascend_pd.check.subject import Pool, Subject

NAME = "host-tls"
SEVERITY = "error"
ZH = """各设备的 TLS 开关不一致。

TLS 开与关的设备之间无法连接：几分钟后链路超时（EI0005、EI0006）。所有节点所有设备的开关必须一致。

处理：在每个节点的每个设备上 `hccn_tool -i N -tls -s enable 0`。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """One switch for all."""
    if not pool.is_npu:
        return
    if trouble := tool_trouble(facts, NAME):
        yield trouble
        return
    where = f"host:{facts.hostname}"
    runs = list(answers(facts, "-tls -g"))
    switches = {device: tls_switch(run.output) for device, run in runs}
    evidence = tuple(line for _, run in runs for line in run.lines if "switch" in line)
    unread = [str(device) for device, value in switches.items() if not value]
    if unread:
        yield unknown(NAME, where, f"no TLS switch on devices {', '.join(unread)}", "", evidence)
    on = [str(device) for device, value in switches.items() if value == "1"]
    off = [str(device) for device, value in switches.items() if value == "0"]
    if on and off:
        message = f"TLS is on for devices {', '.join(on)} and off for {', '.join(off)}"
        yield error(NAME, where, message, "hccn_tool -i N -tls -s enable 0 on every device", evidence)
