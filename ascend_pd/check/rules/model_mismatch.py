"""Prefill and decode do not serve the same thing.

Pools may override the model's path, type, cache type, block size and longest request. The cache that moves must
mean the same on both ends, and decode must accept whatever prefill accepts: a request that P prefills and D
refuses holds P's memory for nothing.

Fix: remove the override, or give both pools the same one.
"""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, error
from ascend_pd.check.pairing import refusals
from ascend_pd.check.subject import Pool, Subject

NAME = "model-mismatch"
SEVERITY = "error"
ZH = """prefill 与 decode 服务的不是同一个东西。

池可以覆盖模型路径、类型、缓存类型、块大小与最长请求。搬运的缓存在两端含义必须相同，且 decode 必须接受 prefill
接受的一切：P 做完 prefill 而 D 拒绝的请求只会白占 P 的内存。

处理：去掉覆盖项，或让两个池使用相同的值。
"""
KEYS = {"model_path": "modelPath", "dtype": "dtype", "kv_dtype": "kvCacheDtype", "block_size": "blockSize"}


def check(subject: Subject) -> Iterator[Finding]:
    """Every pair that can meet."""
    for p, d in subject.pairs:
        for attribute, key in KEYS.items():
            ours, theirs = getattr(p, attribute), getattr(d, attribute)
            if ours != theirs and not (key == "modelPath" and _same_figures(p, d)):
                message = f"{key}: prefill pool {p.name!r} has {ours}, decode pool {d.name!r} has {theirs}"
                yield error(NAME, _overriding(p, d, attribute, key), message, "make them equal")
        if d.max_model_len < p.max_model_len:
            message = (
                f"decode pool {d.name!r} accepts {d.max_model_len} tokens,"
                f" prefill pool {p.name!r} up to {p.max_model_len}"
            )
            fix = f"raise it to {p.max_model_len}, or lower prefill's"
            yield error(NAME, _overriding(p, d, "max_model_len", "maxModelLen"), message, fix)
    for refusal in refusals(subject, NAME):
        message = f"prefill pool {refusal.prefill.name!r}, decode pool {refusal.decode.name!r}: {refusal.message}"
        yield error(NAME, f"{refusal.decode.path}.overrides", message, "make them equal")


def _same_figures(p: Pool, d: Pool) -> bool:
    """One model may lie at two places: known figures that are all equal are taken for it."""
    return bool(p.facts.layers) and p.facts == d.facts


def _overriding(p: Pool, d: Pool, attribute: str, key: str) -> str:
    at = d if getattr(d.spec.overrides, "kv_cache_dtype" if attribute == "kv_dtype" else attribute) else p
    return f"{at.path}.overrides.{key}"
