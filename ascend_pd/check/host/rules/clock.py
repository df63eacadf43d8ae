"""The clock is not synchronised.

Nothing here is decided by wall clocks: leases are durations. But logs and traces of two hosts can be compared
only when their clocks agree.

Fix: start chrony or systemd-timesyncd.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-clock"
SEVERITY = "warning"
ZH = """时钟没有同步。

这里没有任何决定依赖墙上时钟：租约都是时长。但只有时钟一致，两台主机的日志与追踪才能对照。

处理：启动 chrony 或 systemd-timesyncd。
"""


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """What systemd says."""
    where = f"host:{facts.hostname}"
    seen = facts.command("timedatectl")
    answer = seen.output.strip() if seen and seen.state == "ran" else ""
    if answer == "no":
        yield warning(
            NAME,
            where,
            "the clock is not synchronised",
            "start chrony or systemd-timesyncd",
            seen.lines if seen else (),
        )
    elif answer != "yes":
        yield unknown(
            NAME, where, "no timedatectl to ask whether the clock is synchronised", "ask chronyc tracking"
        )
