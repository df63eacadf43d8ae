"""The stated versions are no combination that was built and tested together.

vllm-ascend is made for one vLLM, one CANN, one torch-npu and one Mooncake; the connectors have adapters for
certain vLLM versions only. The table is `ascend_pd/check/matrix.py`, from vllm-ascend's release compatibility
matrix. On a node, `--depth host` compares what is installed.

Fix: take one row of the table; the message names it.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, unknown, warning
from ascend_pd.check.matrix import (
    DRIVER_FLOOR,
    FABRIC_DRIVER_FLOOR,
    MOONCAKE_TCP_FLOOR,
    RELEASES,
    SUPPORTED_VLLM,
    base_version,
    numbers,
    release,
)
from ascend_pd.check.subject import Subject
from ascend_pd.spec.cluster import Versions

NAME = "versions"
SEVERITY = "error"
ZH = """所写版本不是一同构建和测试过的组合。

vllm-ascend 对应唯一的 vLLM、CANN、torch-npu 与 Mooncake；连接器只为某些 vLLM 版本提供适配。对照表在
`ascend_pd/check/matrix.py`，取自 vllm-ascend 的发布兼容矩阵。在节点上，`--depth host` 会比较实际安装的版本。

处理：采用表中的一行；提示会指出是哪一行。
"""
AT = "$.spec.engine.versions"


def check(subject: Subject) -> Iterator[Finding]:
    """The row of vllm-ascend, then drivers, then what the connectors support."""
    versions = subject.spec.engine.versions
    kinds = {pool.spec.hardware.value for pool in subject.pools if pool.is_npu}
    yield from _adapter(versions)
    if not kinds:
        yield from _cpu(subject, versions)
        return
    yield from _row(versions)
    yield from _driver(subject, versions, kinds)


def _adapter(versions: Versions) -> Iterator[Finding]:
    if versions.vllm and not any(base_version(versions.vllm).startswith(f"{v}.") for v in SUPPORTED_VLLM):
        message = f"the connectors have no adapter for vLLM {versions.vllm}"
        yield error(NAME, f"{AT}.vllm", message, f"use one of {', '.join(f'{v}.x' for v in SUPPORTED_VLLM)}")


def _row(versions: Versions) -> Iterator[Finding]:
    if not versions.vllm_ascend:
        return
    row = release(versions.vllm_ascend)
    if row is None:
        known = ", ".join(r.vllm_ascend for r in RELEASES)
        message = f"vllm-ascend {versions.vllm_ascend} is not in the table"
        yield unknown(NAME, f"{AT}.vllm-ascend", message, f"known: {known}")
        return
    wanted = {"vllm": row.vllm, "cann": row.cann, "torch-npu": row.torch_npu, "mooncake": row.mooncake}
    for key, value in wanted.items():
        stated = getattr(versions, key.replace("-", "_"))
        if not stated or not value or stated.removeprefix("v").partition("+")[0].lower() == value.lower():
            continue
        # Mooncake is an extra that is often upgraded by itself; the others are linked against each other.
        severity = warning if key == "mooncake" else error
        message = f"vllm-ascend {versions.vllm_ascend} goes with {key} {value}, not {stated}"
        yield severity(NAME, f"{AT}.{key}", message, f"use {key} {value}")


def _driver(subject: Subject, versions: Versions, kinds: set[str]) -> Iterator[Finding]:
    if not versions.driver:
        return
    have = numbers(versions.driver)
    for kind in sorted(kinds):
        if have < numbers(DRIVER_FLOOR[kind]):
            message = f"driver {versions.driver} is older than {DRIVER_FLOOR[kind]}, recommended for {kind}"
            yield warning(NAME, f"{AT}.driver", message, f"install HDK {DRIVER_FLOOR[kind]} or newer")
    fabric = any(pool.env.get("ASCEND_ENABLE_USE_FABRIC_MEM") == "1" for pool in subject.pools)
    if not fabric:
        return
    recent = numbers(versions.mooncake or "") >= (0, 3, 11)
    floor = DRIVER_FLOOR["A3"] if recent else FABRIC_DRIVER_FLOOR
    if have < numbers(floor):
        message = f"fabric memory needs driver {floor}, not {versions.driver}"
        yield error(NAME, f"{AT}.driver", message, f"install HDK {floor} or newer")
    if versions.cann and numbers(versions.cann) < (9, 0):
        yield error(NAME, f"{AT}.cann", f"fabric memory needs CANN 9.0, not {versions.cann}", "install CANN 9.0")


def _cpu(subject: Subject, versions: Versions) -> Iterator[Finding]:
    if versions.vllm_ascend:
        message = f"vllm-ascend {versions.vllm_ascend} is stated and every pool is cpu"
        yield warning(NAME, f"{AT}.vllm-ascend", message, "remove it")
    stated = versions.mooncake
    if stated and subject.spec.connector.protocol == "tcp" and numbers(stated) < numbers(MOONCAKE_TCP_FLOOR):
        message = f"Mooncake {stated} over TCP may report a write before it landed"
        yield error(NAME, f"{AT}.mooncake", message, f"use {MOONCAKE_TCP_FLOOR} or newer")
