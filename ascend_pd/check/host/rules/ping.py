"""A peer's device does not answer.

`hccn_tool -ping` (A2) or `-hccs_ping` (A3) to the addresses given with `--peer`. The tool exits with 0 and
prints "Cmd executed successfully!" even when nothing came back, so the packets are counted.

Fix: same subnet or gateways on both sides; same SuperPoD for HCCS.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.hccn import tool_trouble
from ascend_pd.check.host.tools import ping_counts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-ping"
SEVERITY = "error"
ZH = """对端设备没有应答。

对 `--peer` 给出的地址运行 `hccn_tool -ping`(A2)或 `-hccs_ping`(A3)。即使没有任何应答，工具也以 0 退出并打印
"Cmd executed successfully!"，因此要数包。

处理：两侧同一子网或配好网关；HCCS 需同一 SuperPoD。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Every peer."""
    if not pool.is_npu or not facts.peers:
        return
    if trouble := tool_trouble(facts, NAME):
        yield trouble
        return
    where = f"host:{facts.hostname}"
    for line, run in facts.commands.items():
        if "ping -g address" not in line:
            continue
        peer = line.rsplit(" ", 1)[-1]
        counts = ping_counts(run.output)
        failed = "fail" in run.output.lower() or "time out" in run.output.lower()
        if run.state == "timeout":
            yield error(NAME, where, f"{peer}: the ping did not end in time", "check the path to it", run.lines)
        elif counts is None and not failed:
            yield unknown(NAME, where, f"{peer}: the tool counted no packets", "", run.lines)
        elif counts is None or not counts[1]:
            sent = f" to {counts[0]} packets" if counts else ""
            yield error(NAME, where, f"{peer}: no answer{sent}", "check subnet, gateway, SuperPoD", run.lines)
        elif counts[1] < counts[0]:
            message = f"{peer}: {counts[1]} of {counts[0]} packets came back"
            yield warning(NAME, where, message, "check cable and switch for errors", run.lines)
