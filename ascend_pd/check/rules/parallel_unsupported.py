"""The planner cannot move a cache between these two layouts.

Decode has no pipeline stages; prefill has them in pull mode only; context parallelism, recurrent state and, on
CPU, unequal block sizes are refused. Whatever the planner refuses at run time is refused here, by the same
function (`ascend_pd.layout`).

Fix: as the message says; usually trade `pp` for `tp` or `dp`, or `mode: pull` for `mode: layerwise`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.pairing import refusals
from ascend_pd.check.subject import Subject

NAME = "parallel-unsupported"
SEVERITY = "error"
ZH = """规划器无法在这两种布局之间搬运缓存。

decode 不支持流水线并行；prefill 仅在 pull 模式下支持；上下文并行、循环状态以及 CPU 上不相等的块大小都会被拒
绝。运行时规划器拒绝的组合，由同一个函数（`ascend_pd.layout`）在此拒绝。

处理：按提示修改；通常用 `tp` 或 `dp` 代替 `pp`，或把 `mode: layerwise` 改为 `mode: pull`。
"""

FIXES = {
    "pipeline-decode": "set the decode pool's pp to 1",
    "pipeline-layerwise": "set the prefill pool's pp to 1, or mode: pull",
    "context-parallel": "remove the context parallel flags from extraArgs",
    "block-size-packed": "give both pools one block size",
    "block-size-not-divisible": "give both pools one block size",
    "recurrent-state": "serve this model with a union pool",
}


def check(subject: Subject) -> Iterator[Finding]:
    """Every pair that can meet, one finding per reason and side at fault."""
    told = set()
    for refusal in refusals(subject, NAME):
        at = refusal.prefill if refusal.message.startswith("prefill") else refusal.decode
        if (at.index, refusal.reason) in told:
            continue
        told.add((at.index, refusal.reason))
        message = (
            f"prefill pool {refusal.prefill.name!r} with decode pool {refusal.decode.name!r}: {refusal.message}"
        )
        yield error(NAME, f"{at.path}.parallel", message, FIXES.get(refusal.reason, "choose equal layouts"))
