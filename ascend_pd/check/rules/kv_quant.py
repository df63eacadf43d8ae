"""An int8 KV cache of grouped-query attention is not handed off by pulling.

With GQA, prefill keeps its cache in bf16 when asked for int8, and decode quantises as it writes: the bytes that
decode pulls are of another type than its own. MLA models and equal types on both ends are fine.

Fix: `kvCacheDtype: auto`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Subject
from ascend_pd.spec.cluster import Mode

NAME = "kv-quant"
SEVERITY = "error"
ZH = """分组查询注意力（GQA）的 int8 KV 缓存不能以拉取方式交接。

GQA 下即使要求 int8,prefill 仍以 bf16 保存缓存，decode 写入时才量化：decode 拉到的字节与它自己的类型不同。MLA
模型以及两端类型相同的情况没有问题。

处理：`kvCacheDtype: auto`。
"""


def check(subject: Subject) -> Iterator[Finding]:
    """Decode pools that keep int8, in pull mode."""
    if subject.spec.connector.mode is not Mode.PULL:
        return
    for pool in {id(q): q for pair in subject.pairs for q in pair}.values():
        if pool.kv_dtype == "int8" and pool.is_npu and not pool.facts.mla:
            own = pool.spec.overrides.kv_cache_dtype
            path = f"{pool.path}.overrides.kvCacheDtype" if own else "$.spec.model.kvCacheDtype"
            message = f"pool {pool.name!r}: int8 KV cache on a GQA model, while prefill keeps bf16"
            yield error(NAME, path, message, "set kvCacheDtype: auto")
            return
