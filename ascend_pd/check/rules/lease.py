"""Leases and deadlines are not in an order that can work.

A hold must outlive the transfer it covers: `leaseSeconds` and `transferSeconds` against the estimated time to
move one longest request; a lease past 600 s keeps a dead request's memory for as long. P must hold longer than
D may take: `maxHoldSeconds` above `transferSeconds` + `quarantineSeconds`. And Mooncake's own timers must end
before its caller gives up, or bytes land after the error: MC_TCP_STATUS_TIMEOUT_SEC and
MC_TCP_PROGRESS_TIMEOUT_SEC below MC_TRANSFER_TIMEOUT below `transferSeconds`.

Fix: as the message says.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Pool, Subject
from ascend_pd.wire.environment import mooncake_environment, mooncake_environment_problems

NAME = "lease"
SEVERITY = "error"
ZH = """租约与截止时间的顺序不可行。

持有必须长于它所覆盖的传输：`leaseSeconds` 与 `transferSeconds` 对照搬运一个最长请求的估计时间；租约超过 600
秒，死掉的请求就会占用内存这么久。P 的持有必须长于 D 可能用的时间：`maxHoldSeconds` 大于 `transferSeconds` +
`quarantineSeconds`。Mooncake 自己的定时器必须先于调用者放弃，否则报错之后仍有字节落地：
MC_TCP_STATUS_TIMEOUT_SEC 与 MC_TCP_PROGRESS_TIMEOUT_SEC 小于 MC_TRANSFER_TIMEOUT，后者小于
`transferSeconds`。

处理：按提示修改。
"""
LONGEST_S = 600
BYTES_PER_SECOND = {"tcp": 0.5e9, "rdma": 5e9, "ascend": 5e9, "device_sdma": 5e9, "device_rdma": 5e9}
"""Per decode rank, deliberately low: TCP as measured on one connection, the rest a fifth of a 200 Gbit/s port."""
AT = "$.spec.connector"


def transfer_seconds(pool: Pool, protocol: str) -> float | None:
    """Estimated time for one decode rank to receive one request of the longest length."""
    per_token = pool.facts.kv_bytes_per_token_and_rank(pool.spec.parallel.tp, 1, pool.kv_dtype_bytes)
    return per_token * pool.max_model_len / BYTES_PER_SECOND[protocol] if per_token else None


def check(subject: Subject) -> Iterator[Finding]:
    """The file's own durations, then the transport's timers."""
    connector = subject.spec.connector
    lease_s, hold_s, transfer_s = connector.lease_seconds, connector.max_hold_seconds, connector.transfer_seconds
    if lease_s > LONGEST_S:
        yield error(NAME, f"{AT}.leaseSeconds", f"a lease of {lease_s:g} s is past {LONGEST_S} s", "30 is usual")
    if lease_s > hold_s:
        message = f"leaseSeconds {lease_s:g} is past maxHoldSeconds {hold_s:g}: no lease could run out by itself"
        yield error(NAME, f"{AT}.leaseSeconds", message, f"at most {hold_s:g}")
    if hold_s <= transfer_s + connector.quarantine_seconds:
        message = (
            f"maxHoldSeconds {hold_s:g} is not above transferSeconds {transfer_s:g}"
            f" + quarantineSeconds {connector.quarantine_seconds:g}: P would let go while D may still read"
        )
        yield error(NAME, f"{AT}.maxHoldSeconds", message, "raise maxHoldSeconds")
    yield from _estimates(subject)
    yield from _timers(subject)


def _estimates(subject: Subject) -> Iterator[Finding]:
    connector = subject.spec.connector
    estimates = [(s, d) for _, d in subject.pairs if (s := transfer_seconds(d, connector.protocol)) is not None]
    if not estimates:
        return
    slowest_s, pool = max(estimates, key=lambda pair: pair[0])
    for key, value in (("leaseSeconds", connector.lease_seconds), ("transferSeconds", connector.transfer_seconds)):
        if value < slowest_s:
            message = (
                f"{key} {value:g} is shorter than moving {pool.max_model_len} tokens to a rank of pool"
                f" {pool.name!r} over {connector.protocol}, about {slowest_s:.1f} s"
            )
            yield error(NAME, f"{AT}.{key}", message, f"at least {slowest_s:.0f}")


def _timers(subject: Subject) -> Iterator[Finding]:
    """The transport's own, by the function that a connector asks at its start."""
    connector = subject.spec.connector
    if connector.transport != "mooncake" or connector.protocol != "tcp":
        return
    told = set()
    for pool in subject.pools:
        effective = {**mooncake_environment(connector.protocol), **pool.env}
        problems = mooncake_environment_problems(effective)
        for problem in problems:
            if problem not in told:
                told.add(problem)
                yield error(NAME, f"{pool.path}.env", problem, "remove it: the launcher sets timers in order")
        whole = effective["MC_TRANSFER_TIMEOUT"]
        message = f"MC_TRANSFER_TIMEOUT={whole} is not below transferSeconds {connector.transfer_seconds:g}"
        late = whole.isdecimal() and int(whole) >= connector.transfer_seconds
        if not problems and late and message not in told:
            told.add(message)
            fix = f"at least {int(whole) + 1}, or lower MC_TRANSFER_TIMEOUT"
            yield error(NAME, f"{AT}.transferSeconds", message, fix)
