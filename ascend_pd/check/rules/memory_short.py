"""The weights, one step's activations and the cache of one longest request do not fit a device.

Per device: usable = memory · memoryFraction; weights = (dense + experts / dp) / tp / pp; activations = 2 GiB +
12 · batched tokens · hidden size · 2 bytes (an estimate); the rest is cache. One request of `maxModelLen` must
fit, or vLLM does not start. The report shows each pool's capacity in tokens. On CPU the budget is
VLLM_CPU_KVCACHE_SPACE (GiB) when the file sets it.

Fix: more `tp` (or `dp` with experts), a shorter `maxModelLen`, fewer `maxNumBatchedTokens`, a smaller
`kvCacheDtype` or quantised weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.subject import Pool, Subject

NAME = "memory-short"
SEVERITY = "error"
ZH = """权重、一步的激活值与一个最长请求的缓存放不进一个设备。

每个设备：可用 = 显存 · memoryFraction；权重 =（稠密部分 + 专家 / dp）/ tp / pp；激活 = 2 GiB + 12 · 批内
token 数 · 隐层宽度 · 2 字节（估算）；其余为缓存。必须放得下一个 `maxModelLen` 的请求，否则 vLLM 不会启动。
报告列出每个池以 token 计的容量。在 CPU 上，文件设置了 VLLM_CPU_KVCACHE_SPACE(GiB)时以它为预算。

处理：增大 `tp`（有专家时也可增大 `dp`）、缩短 `maxModelLen`、减小 `maxNumBatchedTokens`、用更小的
`kvCacheDtype` 或量化权重。
"""
GIB = float(1 << 30)


def check(subject: Subject) -> Iterator[Finding]:
    """One finding per pool."""
    for pool in subject.pools:
        found = _npu(pool) if pool.is_npu else _cpu(pool)
        if found:
            yield found


def _npu(pool: Pool) -> Finding | None:
    memory = pool.memory
    if memory is None:
        return None
    sums = (
        f"{memory.usable / GIB:.1f} GiB usable - {memory.weights / GIB:.1f} weights"
        f" - {memory.activation / GIB:.1f} activations = {memory.kv_bytes / GIB:.1f} for the cache"
    )
    path = f"{pool.path}.parallel"
    if memory.kv_bytes <= 0:
        message = f"pool {pool.name!r}: the weights do not fit a device: {sums}"
        return error(NAME, path, message, "raise tp (or dp with experts), or use quantised weights")
    if memory.tokens < pool.max_model_len:
        needed = f"one request may have {pool.max_model_len}"
        message = f"pool {pool.name!r}: room for {memory.tokens} tokens, {needed}: {sums}"
        return error(NAME, path, message, "raise tp, shorten maxModelLen or lower maxNumBatchedTokens")
    return None


def _cpu(pool: Pool) -> Finding | None:
    space = pool.env.get("VLLM_CPU_KVCACHE_SPACE", "")
    per_token = pool.facts.kv_bytes_per_token_and_rank(
        pool.spec.parallel.tp, pool.spec.parallel.pp, pool.kv_dtype_bytes
    )
    if not space.isdecimal() or not int(space) or not per_token:
        return None
    tokens = int(int(space) * GIB / per_token)
    if tokens >= pool.max_model_len:
        return None
    message = f"pool {pool.name!r}: VLLM_CPU_KVCACHE_SPACE={space} holds {tokens} tokens, not {pool.max_model_len}"
    return error(NAME, f"{pool.path}.env", message, "raise VLLM_CPU_KVCACHE_SPACE or shorten maxModelLen")
