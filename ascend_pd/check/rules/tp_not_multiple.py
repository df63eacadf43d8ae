"""Prefill's tensor parallel size is not a multiple of decode's.

Each decode rank takes its heads from a whole number of prefill ranks. With a prefill TP smaller than decode's,
or one that does not divide evenly, some rank would need parts of heads from ranks that do not line up. The
judgement is the planner's own (`ascend_pd.layout`).

Fix: raise the prefill pool's `tp` to a multiple of the decode pool's, or lower the decode pool's and use more
`dp`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.pairing import refusals
from ascend_pd.check.subject import Subject

NAME = "tp-not-multiple"
SEVERITY = "error"
ZH = """prefill 的张量并行度不是 decode 的整数倍。

每个 decode rank 从整数个 prefill rank 取它的头。prefill 的 TP 更小或除不尽时，某些 rank 会需要对不齐的 rank
上的部分头。判断由规划器本身（`ascend_pd.layout`）给出。

处理：把 prefill 池的 `tp` 提高到 decode 池的整数倍，或降低 decode 池的 `tp` 并增大 `dp`。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Every pair that can meet."""
    for refusal in refusals(subject, NAME):
        p, d = refusal.prefill, refusal.decode
        ours, theirs = p.spec.parallel.tp, d.spec.parallel.tp
        message = (
            f"prefill pool {p.name!r} has tp {ours}, decode pool {d.name!r} has tp {theirs}: {refusal.message}"
        )
        fitting = [t for t in range(theirs, 0, -1) if ours % t == 0]
        fix = f"set {p.path}.parallel.tp to {-(-ours // theirs) * theirs} or {d.path}.parallel.tp to {fitting[0]}"
        yield error(NAME, f"{p.path}.parallel.tp", message, fix)
