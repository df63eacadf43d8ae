"""Environment variables contradict each other, the other end, or the launcher.

Judged: the pair HCCL_INTRA_PCIE_ENABLE / HCCL_INTRA_ROCE_ENABLE (both 1, or one 0 with the other unset, is
invalid); ASCEND_TRANSFER_TIMEOUT, which must exceed 4.096 µs · 2^HCCL_RDMA_TIMEOUT · HCCL_RDMA_RETRY_CNT;
ranges of HCCL timers; HCCL_BUFFSIZE, equal on both ends; PYTHONHASHSEED, set and equal wherever a KV pool
hashes prompts; settings that a version no longer has or a generation never had; and variables that the launcher
sets itself.

Fix: as the message says.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.launch.engine_environment import transport_environment
from ascend_pd.spec.cluster import Hardware

NAME = "env-conflict"
SEVERITY = "error"
ZH = """环境变量互相矛盾、与另一端矛盾，或与启动器矛盾。

检查：HCCL_INTRA_PCIE_ENABLE / HCCL_INTRA_ROCE_ENABLE 组合（同为 1，或一个为 0 而另一个未设置，均无效）；
ASCEND_TRANSFER_TIMEOUT 必须大于 4.096 µs · 2^HCCL_RDMA_TIMEOUT · HCCL_RDMA_RETRY_CNT;HCCL 定时器的取值范
围；两端 HCCL_BUFFSIZE 相等；使用 KV 池时 PYTHONHASHSEED 已设置且相等；某版本已移除或某代硬件没有的设置；以及
由启动器自行设置的变量。

处理：按提示修改。
"""
RESERVED = frozenset(
    {
        "ASCEND_RT_VISIBLE_DEVICES",
        "ASCEND_VISIBLE_DEVICES",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "PYTHONSAFEPATH",
        "VLLM_DP_MASTER_IP",
        "VLLM_DP_MASTER_PORT",
        "VLLM_DP_RANK",
        "VLLM_DP_RANK_LOCAL",
        "VLLM_DP_SIZE",
        "VLLM_HOST_IP",
    }
)
"""Set by the launcher from the topology."""
INVALID_PAIRS = {("1", "1"), ("0", ""), ("", "0")}
RANGES = {"HCCL_CONNECT_TIMEOUT": (120, 7200), "HCCL_RDMA_TIMEOUT": (5, 20), "HCCL_RDMA_RETRY_CNT": (1, 7)}


def check(subject: Subject) -> Iterator[Finding]:
    """Per pool, each distinct message once; then per pair."""
    told = set()
    for pool in subject.pools:
        for found in _pool(subject, pool):
            if found.message not in told:
                told.add(found.message)
                yield found
    for p, d in subject.pairs:
        yield from _pair(p, d)


def _at(subject: Subject, pool: Pool, variable: str) -> str:
    own = variable in pool.spec.env or variable not in subject.spec.engine.env
    return f"{pool.path}.env" if own else "$.spec.engine.env"


def _pool(subject: Subject, pool: Pool) -> Iterator[Finding]:
    for variable in sorted(RESERVED & pool.env.keys()):
        path = f"{_at(subject, pool, variable)}.{variable}"
        yield error(NAME, path, f"{variable} is set by the launcher from the topology", "remove it")
    for variable in sorted(v for v in pool.env if v.startswith("ASCEND_PD_")):
        path = f"{_at(subject, pool, variable)}.{variable}"
        yield error(NAME, path, f"{variable} is this project's own and set by the launcher", "remove it")
    if pool.is_npu:
        yield from _npu(subject, pool)
    if _uses_kv_pool(pool) and "PYTHONHASHSEED" not in pool.env:
        message = "a KV pool hashes prompts, and PYTHONHASHSEED is not set: every process would hash differently"
        yield error(NAME, "$.spec.engine.env", message, 'set PYTHONHASHSEED: "0" for all pools')


def _uses_kv_pool(pool: Pool) -> bool:
    return any(v in pool.env for v in ("MOONCAKE_CONFIG_PATH", "MOONCAKE_MASTER", "MMC_LOCAL_CONFIG_PATH"))


def _npu(subject: Subject, pool: Pool) -> Iterator[Finding]:
    env = pool.env
    pair = (env.get("HCCL_INTRA_PCIE_ENABLE", ""), env.get("HCCL_INTRA_ROCE_ENABLE", ""))
    if pair in INVALID_PAIRS:
        shown = ", ".join(
            f"HCCL_INTRA_{k}_ENABLE {'=' + v if v else 'unset'}"
            for k, v in zip(("PCIE", "ROCE"), pair, strict=True)
        )
        path = _at(subject, pool, "HCCL_INTRA_ROCE_ENABLE")
        yield error(NAME, path, f"{shown} is no valid pair", "set PCIE=1 with ROCE=0, or PCIE=0 with ROCE=1")
    for variable, (low, high) in RANGES.items():
        if variable in env and not (env[variable].isdecimal() and low <= int(env[variable]) <= high):
            path = f"{_at(subject, pool, variable)}.{variable}"
            yield error(NAME, path, f"{variable}={env[variable]} is outside {low}-{high}", "choose a value inside")
    yield from _transfer_timeout(subject, pool)
    if "ASCEND_BUFFER_POOL" in env and (subject.spec.engine.versions.vllm_ascend or "0.23").startswith("0.23"):
        path = f"{_at(subject, pool, 'ASCEND_BUFFER_POOL')}.ASCEND_BUFFER_POOL"
        yield warning(NAME, path, "ASCEND_BUFFER_POOL has no effect since vllm-ascend 0.23", "remove it")
    if env.get("ASCEND_ENABLE_USE_FABRIC_MEM") == "1" and pool.spec.hardware is not Hardware.A3:
        path = f"{_at(subject, pool, 'ASCEND_ENABLE_USE_FABRIC_MEM')}.ASCEND_ENABLE_USE_FABRIC_MEM"
        yield error(NAME, path, f"fabric memory is A3's, pool {pool.name!r} is {pool.spec.hardware}", "remove it")


def _transfer_timeout(subject: Subject, pool: Pool) -> Iterator[Finding]:
    names = ("ASCEND_TRANSFER_TIMEOUT", "HCCL_RDMA_TIMEOUT", "HCCL_RDMA_RETRY_CNT")
    effective = {**transport_environment(subject.spec.connector), **pool.env}
    values = [effective.get(name, "") for name in names]
    if not all(value.isdecimal() for value in values):
        return
    transfer_ms, exponent, retries = int(values[0]), min(int(values[1]), 31), int(values[2])
    rdma_ms = 4.096e-3 * 2**exponent * retries
    if transfer_ms <= rdma_ms:
        variable = next((name for name in names if name in pool.env), names[0])
        message = (
            f"ASCEND_TRANSFER_TIMEOUT {transfer_ms} ms is not above the RDMA timers: "
            f"4.096 µs · 2^{exponent} · {retries} = {rdma_ms:.0f} ms"
        )
        fix = f"set ASCEND_TRANSFER_TIMEOUT above {rdma_ms:.0f}, or HCCL_RDMA_TIMEOUT lower"
        yield error(NAME, f"{_at(subject, pool, variable)}.{variable}", message, fix)


def _pair(p: Pool, d: Pool) -> Iterator[Finding]:
    for variable, severity in (("HCCL_BUFFSIZE", warning), ("PYTHONHASHSEED", error)):
        ours, theirs = p.env.get(variable, ""), d.env.get(variable, "")
        if ours != theirs:
            message = (
                f"{variable}: prefill pool {p.name!r} has {ours or 'none'},"
                f" decode pool {d.name!r} has {theirs or 'none'}"
            )
            yield severity(NAME, f"{d.path}.env", message, f"set {variable} once, in $.spec.engine.env")
