"""Speculative settings of prefill and decode do not fit each other.

A draft model or MTP layer has a cache of its own: decode finds it only if prefill filled it with the same
method and model. Prefill needs one speculative token at most; a model with recurrent layers needs the same
number on both ends.

Fix: give both pools the same `--speculative-config`, with `num_speculative_tokens: 1` on prefill.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error, warning
from ascend_pd.check.subject import Pool, Subject

NAME = "spec-decode"
SEVERITY = "error"
ZH = """prefill 与 decode 的投机解码设置不匹配。

草稿模型或 MTP 层有自己的缓存：只有 prefill 用同样的方法和模型填好，decode 才找得到。prefill 至多需要一个投机
token；带循环层的模型两端数目必须相同。

处理：两个池使用相同的 `--speculative-config`,prefill 上 `num_speculative_tokens: 1`。
"""
KEYS = ("method", "model", "quantization", "draft_tensor_parallel_size")


def check(subject: Subject) -> Iterator[Finding]:
    """Readability per pool, agreement per pair."""
    for pool in subject.pools:
        if pool.speculative == {}:
            yield error(
                NAME, f"{pool.path}.extraArgs", "--speculative-config is not a JSON object", "see vLLM's docs"
            )
    for p, d in subject.pairs:
        yield from _pair(p, d)


def _pair(p: Pool, d: Pool) -> Iterator[Finding]:
    ours, theirs = p.speculative, d.speculative
    path = f"{(d if ours is None else p).path}.extraArgs"
    if (ours is None) != (theirs is None):
        has, lacks = (d, p) if ours is None else (p, d)
        message = (
            f"pool {has.name!r} speculates and pool {lacks.name!r} does not: the draft's cache would be missing"
        )
        yield error(NAME, path, message, "give both the same --speculative-config, or neither")
        return
    if not ours or not theirs:
        return
    for key in KEYS:
        if ours.get(key) != theirs.get(key):
            message = (
                f"{key}: prefill pool {p.name!r} has {ours.get(key)}, decode pool {d.name!r} has {theirs.get(key)}"
            )
            yield error(NAME, path, message, "make them equal")
    mine, other = ours.get("num_speculative_tokens"), theirs.get("num_speculative_tokens")
    if p.facts.recurrent and mine != other:
        message = f"num_speculative_tokens: {mine} on prefill and {other} on decode, with recurrent layers"
        yield error(NAME, path, message, "make them equal")
    elif not p.facts.recurrent and mine not in (None, 1, "1"):
        message = f"prefill pool {p.name!r} speculates {mine} tokens, and samples one at most"
        yield warning(NAME, path, message, "set num_speculative_tokens to 1 on prefill")
