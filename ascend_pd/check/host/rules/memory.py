"""Disk, shared memory or huge pages are short.

A full root or /tmp stops logs and caches. vLLM's processes share /dev/shm: 4 GiB at least, 32 GiB for long
prompts with a KV pool. A KV pool over RoCE needs 2 MB huge pages.

Fix: clean up; `--shm-size`; `sysctl -w vm.nr_hugepages=N`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ascend_pd.check.finding import Finding, unknown, warning
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.subject import Pool, Subject

NAME = "host-memory"
SEVERITY = "warning"
ZH = """磁盘、共享内存或大页不足。

根目录或 /tmp 写满会使日志与缓存停住。vLLM 各进程共用 /dev/shm：至少 4 GiB，长提示词加 KV 池需 32 GiB。走 RoCE
的 KV 池需要 2 MB 大页。

处理：清理；`--shm-size`；`sysctl -w vm.nr_hugepages=N`。
"""
FULL_PERCENT, SHM_BYTES = 85.0, 4 << 30


def check(subject: Subject, pool: Pool, facts: HostFacts) -> Iterator[Finding]:
    """Each in turn."""
    where = f"host:{facts.hostname}"
    for path, used in facts.disk_used_percent.items():
        if used > FULL_PERCENT:
            yield warning(NAME, where, f"{path} is {used:.0f} % full", "clean up, or use another disk")
    if facts.shm_bytes is None:
        yield unknown(NAME, where, "/dev/shm cannot be read")
    elif facts.shm_bytes < SHM_BYTES and pool.is_npu:
        gib = facts.shm_bytes / (1 << 30)
        yield warning(
            NAME, where, f"/dev/shm has {gib:.1f} GiB, 4 at least", "start the container with --shm-size=32g"
        )
    pooled = any(v in pool.env for v in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER"))
    if pool.is_npu and pooled and pool.env.get("HCCL_INTRA_ROCE_ENABLE") == "1":
        match = re.search(r"HugePages_Total:\s*(\d+)", facts.files.get("/proc/meminfo") or "")
        if match is None:
            yield unknown(NAME, where, "huge pages cannot be read from /proc/meminfo")
        elif not int(match.group(1)):
            yield warning(
                NAME, where, "no huge pages, and the KV pool goes over RoCE", "sysctl -w vm.nr_hugepages=N"
            )
