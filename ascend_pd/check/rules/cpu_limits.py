"""A CPU pool asks for what vLLM's CPU build does not have.

Its attention kernel wants a block size that is a multiple of 32; its MLA kernel knows one head size,
kv_lora_rank + rope = 576 (512 + 64), and the engine dies at the first request with any other.

Fix: `blockSize: 128`; another model for MLA trials.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject

NAME = "cpu-limits"
SEVERITY = "error"
ZH = """CPU 池要求了 vLLM 的 CPU 构建所没有的东西。

其注意力内核要求块大小是 32 的倍数；其 MLA 内核只支持 kv_lora_rank + rope = 576(512 + 64)，其他尺寸的引擎会在
第一个请求时崩溃。

处理：`blockSize: 128`;MLA 试验换用其他模型。
"""
BLOCK_STEP, MLA_HEAD = 32, 576


def check(subject: Subject) -> Iterator[Finding]:
    """CPU pools only; the block size is told once when it is the engine's."""
    told = False
    for pool in subject.pools:
        if pool.is_npu:
            continue
        if pool.block_size % BLOCK_STEP and not (told and not pool.spec.overrides.block_size):
            own = pool.spec.overrides.block_size
            told = told or not own
            path = f"{pool.path}.overrides.blockSize" if own else "$.spec.engine.blockSize"
            fix = f"{max(BLOCK_STEP, pool.block_size // BLOCK_STEP * BLOCK_STEP)} or 128"
            yield error(NAME, path, f"block size {pool.block_size} is not a multiple of {BLOCK_STEP} on CPU", fix)
        head = (pool.facts.kv_lora_rank or 0) + (pool.facts.rope_head_dim or 0)
        if pool.facts.mla and head != MLA_HEAD:
            message = (
                f"pool {pool.name!r}: MLA with kv_lora_rank + rope = {head}; the CPU kernel has {MLA_HEAD} only"
            )
            yield error(NAME, "$.spec.model", message, "choose another model")
