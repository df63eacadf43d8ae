"""Prefill and decode capacity are far from what the workload needs.

Arithmetic, per engine. Prefill: devices · flops · 0.4 / bytes of weights a token passes through (2 operations
per bf16 parameter of 2 bytes). Decode: a step reads the active weights and the batch's cache at half the memory
bandwidth; the batch is what the cache holds, at most 64 per device. The workload's prompt and output tokens
then give how many requests per second each side carries. A side with four times the other's capacity or more is
a warning, and so is less than `workload.requestsPerSecond`. The figures come from public specifications: they
size, they do not predict.

Fix: move devices to the other side, or state the real `workload`.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, warning
from ascend_pd.check.subject import Pool, Subject

NAME = "ratio"
SEVERITY = "warning"
ZH = """prefill 与 decode 的能力与负载所需相差太远。

按引擎计算。prefill：设备数 · 算力 · 0.4 / 一个 token 经过的权重字节数（每个 2 字节的 bf16 参数 2 次运算）。
decode：一步以一半的内存带宽读取激活权重和整批缓存；批大小取缓存所能容纳的数量，每设备至多 64。由负载的输入与
输出 token 数得出两侧每秒各能承担多少请求。一侧达到另一侧的四倍以上给出警告，低于 `workload.requestsPerSecond`
也给出警告。数据来自公开规格：用于估算规模，不用于预测。

处理：把设备移到另一侧，或写明真实的 `workload`。
"""
EFFICIENCY, BANDWIDTH_SHARE, BATCH_PER_DEVICE, FAR = 0.4, 0.5, 64, 4.0


def prefill_tokens_per_second(pool: Pool) -> float | None:
    """Prompt tokens per second of the whole pool."""
    active = pool.facts.active_weight_bytes or pool.facts.weight_bytes
    if not active or not pool.hardware.flops:
        return None
    return pool.spec.replicas * pool.spec.parallel.world_size * pool.hardware.flops * EFFICIENCY / active


def decode_tokens_per_second(pool: Pool, context: float) -> float | None:
    """Output tokens per second of the whole pool, at this many cached tokens per request."""
    memory, facts, parallel = pool.memory, pool.facts, pool.spec.parallel
    if memory is None or facts.weight_bytes is None or not memory.tokens:
        return None
    devices = parallel.tp * parallel.pp
    batch = max(1.0, min(memory.tokens / context, BATCH_PER_DEVICE * devices))
    # A large batch reads every expert: the weights on the device, not the active ones.
    read = memory.weights + batch * context * memory.kv_per_token
    step_s = read / (pool.hardware.bytes_per_second * BANDWIDTH_SHARE) * parallel.pp
    return pool.spec.replicas * parallel.dp * batch / step_s


def check(subject: Subject) -> Iterator[Finding]:
    """One finding for the balance, one per side for the stated rate."""
    workload = subject.spec.workload
    context = workload.prompt_tokens + workload.output_tokens / 2
    ours = [prefill_tokens_per_second(p) for p in subject.prefill]
    theirs = [decode_tokens_per_second(d, context) for d in subject.decode]
    if not ours or not theirs:
        return
    known_ours, known_theirs = [v for v in ours if v is not None], [v for v in theirs if v is not None]
    if len(known_ours) < len(ours) or len(known_theirs) < len(theirs):
        return
    prefill_rate, decode_rate = sum(known_ours), sum(known_theirs)
    rates = {"prefill": prefill_rate / workload.prompt_tokens, "decode": decode_rate / workload.output_tokens}
    sums = (
        f"prefill {prefill_rate:.0f} tokens/s / {workload.prompt_tokens} = {rates['prefill']:.1f} requests/s, "
        f"decode {decode_rate:.0f} tokens/s / {workload.output_tokens} = {rates['decode']:.1f} requests/s"
    )
    more, less = sorted(rates, key=lambda side: -rates[side])
    if rates[more] >= FAR * rates[less]:
        factor = rates[more] / rates[less]
        message = f"{more} could carry {factor:.1f} times what {less} can: {sums}"
        yield warning(NAME, "$.spec.pools", message, f"give {less} more devices, or state spec.workload")
    wanted = workload.requests_per_second
    for side, rate in rates.items():
        if wanted and rate < wanted:
            message = f"{side} carries about {rate:.1f} requests/s of {wanted:g} wanted: {sums}"
            yield warning(NAME, "$.spec.workload.requestsPerSecond", message, f"add {side} replicas")
