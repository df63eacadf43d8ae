"""Attention heads or KV heads cannot be spread over the TP ranks.

vLLM splits attention heads evenly: their number must be divisible by TP. KV heads are split when there are at
least as many as ranks, and repeated when there are fewer: one number must divide the other. MLA has one latent
that every rank holds.

Fix: choose a `tp` that divides the model's heads.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.pairing import refusals
from ascend_pd.check.subject import Pool, Subject

NAME = "tp-heads"
SEVERITY = "error"
ZH = """注意力头或 KV 头无法分到各 TP rank。

vLLM 平均切分注意力头：头数必须能被 TP 整除。KV 头不少于 rank 数时切分，少于时复制：两数之一必须整除另一数。
MLA 只有一份每个 rank 都持有的潜变量。

处理：选择能整除模型头数的 `tp`。
"""


def fitting(pool: Pool) -> str:
    """The sizes that would do, for the fix."""
    heads, kv_heads = pool.facts.attention_heads or 1, (1 if pool.facts.mla else pool.facts.kv_heads) or 1
    sizes = [t for t in (1, 2, 4, 8, 16, 32) if heads % t == 0 and (kv_heads % t == 0 or t % kv_heads == 0)]
    return ", ".join(map(str, sizes))


def check(subject: Subject) -> Iterator[Finding]:
    """Attention heads per pool; KV heads per pool and, through the planner, per pair."""
    told = set()
    for pool in subject.pools:
        tp, facts = pool.spec.parallel.tp, pool.facts
        path = f"{pool.path}.parallel.tp"
        if facts.attention_heads and facts.attention_heads % tp:
            message = f"pool {pool.name!r}: {facts.attention_heads} attention heads cannot be split over tp {tp}"
            yield error(NAME, path, message, f"tp may be {fitting(pool)}")
            told.add(pool.index)
        elif facts.kv_heads and not facts.mla and facts.kv_heads % tp and tp % facts.kv_heads:
            message = (
                f"pool {pool.name!r}: {facts.kv_heads} KV heads can be neither split nor repeated over tp {tp}"
            )
            yield error(NAME, path, message, f"tp may be {fitting(pool)}")
            told.add(pool.index)
    for refusal in refusals(subject, NAME):
        if not told & {refusal.prefill.index, refusal.decode.index}:
            message = (
                f"prefill pool {refusal.prefill.name!r}, decode pool {refusal.decode.name!r}: {refusal.message}"
            )
            yield error(
                NAME, f"{refusal.decode.path}.parallel.tp", message, f"tp may be {fitting(refusal.decode)}"
            )
