"""A CPU pool asks for what vLLM's CPU build does not have.

Its attention kernel wants a block size that is a multiple of 32. Its MLA kernel has blocks of 16 and knows one head
size, kv_lora_rank + rope = 576 (512 + 64): the engine dies at the first request with any other. MLA with plain
rotary embedding, without YaRN, answers wrong text there (vLLM 0.32: a position's logits change with what follows).

Fix: `blockSize: 128`, for MLA `blockSize: 16`; another model for MLA trials.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Pool, Subject

NAME = "cpu-limits"
SEVERITY = "error"
ZH = """CPU 池要求了 vLLM 的 CPU 构建所没有的东西。

其注意力内核要求块大小是 32 的倍数。其 MLA 内核的块大小为 16，只支持 kv_lora_rank + rope = 576(512 + 64)，其他尺寸的
引擎会在第一个请求时崩溃。使用普通旋转位置编码（没有 YaRN）的 MLA 模型在 CPU 上会给出错误的文本
（vLLM 0.32 实测：某个位置的 logits 会随其后的内容而变）。

处理：`blockSize: 128`,MLA 用 `blockSize: 16`；MLA 试验换用其他模型。
"""
BLOCK_STEP, MLA_BLOCK, MLA_HEAD = 32, 16, 576


def check(subject: Subject) -> Iterator[Finding]:
    """CPU pools only; the block size is told once when it is the engine's."""
    told = False
    for pool in subject.pools:
        if pool.is_npu:
            continue
        wrong, fix = _block_size(pool)
        own = pool.spec.overrides.block_size
        if wrong and not (told and not own):
            told = told or not own
            yield error(NAME, f"{pool.path}.overrides.blockSize" if own else "$.spec.engine.blockSize", wrong, fix)
        if pool.facts.mla:
            yield from _mla(pool)


def _block_size(pool: Pool) -> tuple[str, str]:
    """What is wrong, or nothing, and what to write."""
    size = pool.block_size
    if pool.facts.mla:
        wrong = f"block size {size} with MLA; the CPU kernel has {MLA_BLOCK} only" if size != MLA_BLOCK else ""
        return wrong, str(MLA_BLOCK)
    wrong = f"block size {size} is not a multiple of {BLOCK_STEP} on CPU" if size % BLOCK_STEP else ""
    return wrong, f"{max(BLOCK_STEP, size // BLOCK_STEP * BLOCK_STEP)} or 128"


def _mla(pool: Pool) -> Iterator[Finding]:
    head = (pool.facts.kv_lora_rank or 0) + (pool.facts.rope_head_dim or 0)
    if head != MLA_HEAD:
        message = f"pool {pool.name!r}: MLA with kv_lora_rank + rope = {head}; the CPU kernel has {MLA_HEAD} only"
        yield error(NAME, "$.spec.model", message, "choose another model")
    if pool.facts.has_scaled_positions is False:
        message = f"pool {pool.name!r}: MLA with plain rotary embedding gives wrong text on vLLM's CPU kernel"
        yield error(NAME, "$.spec.model", message, "choose a model with YaRN")
