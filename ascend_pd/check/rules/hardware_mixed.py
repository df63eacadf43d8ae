"""A prefill and a decode pool are of different hardware generations.

The cache's layout and the transport differ between A2, A3 and CPU: an A2 engine's cache cannot be read by an A3
engine. The engines would refuse each other when they first meet; this says so before they are started.

Fix: give both pools the same `hardware`, or make two clusters.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject

NAME = "hardware-mixed"
SEVERITY = "error"
ZH = """prefill 池与 decode 池的硬件代际不同。

A2、A3 与 CPU 的缓存布局和传输方式不同：A3 引擎读不了 A2 引擎的缓存。引擎首次相遇时也会互相拒绝，本规则在启动
之前指出。

处理：让两个池的 `hardware` 相同，或拆成两个集群。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Every pair that can meet, and one host that two pools call by different generations."""
    for p, d in subject.pairs:
        ours, theirs = p.spec.hardware, d.spec.hardware
        if ours is not theirs:
            message = f"prefill pool {p.name!r} is {ours} and decode pool {d.name!r} is {theirs}"
            yield error(NAME, f"{d.path}.hardware", message, f"put both on {ours} or both on {theirs}")
    declared: dict[str, tuple[str, str]] = {}
    for pool in subject.pools:
        for host in pool.spec.hosts:
            kind, name = declared.setdefault(host, (pool.spec.hardware.value, pool.name))
            if kind != pool.spec.hardware:
                message = f"host {host} is {kind} in pool {name!r} and {pool.spec.hardware} in pool {pool.name!r}"
                yield error(NAME, f"{pool.path}.hosts", message, "a host has one kind of hardware")
