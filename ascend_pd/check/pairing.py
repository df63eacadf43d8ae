"""Asking the planner (`ascend_pd.layout`) whether a prefill pool's cache fits a decode pool, in the words of
the rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from ascend_pd.check.subject import Pool, Subject
from ascend_pd.layout.description import Group
from ascend_pd.layout.geometry import Geometry, Reason, judge
from ascend_pd.models.facts import LayerKind

_RULE_OF = {
    Reason.TP_NOT_MULTIPLE: "tp-not-multiple",
    Reason.KV_HEADS_NOT_DIVISIBLE: "tp-heads",
    Reason.KV_HEADS_DIFFER: "model-mismatch",
    Reason.LAYERS_DIFFER: "model-mismatch",
    Reason.ATTENTION_DIFFERS: "model-mismatch",
}
_TOLD_BY_MODEL_MISMATCH = frozenset({Reason.DTYPE_DIFFERS, Reason.HEAD_BYTES_DIFFER, Reason.PACKING_DIFFERS})
"""Judged from the file itself, in the file's words."""


@dataclass(frozen=True)
class PairRefusal:
    """The planner says no to a pair of pools."""

    prefill: Pool
    decode: Pool
    reason: str
    message: str


def refusals(subject: Subject, rule: str) -> list[PairRefusal]:
    """What the planner holds against any pair, as far as it belongs to `rule`."""
    found = []
    for prefill, decode in subject.pairs:
        ours, theirs = geometry_of(prefill), geometry_of(decode)
        for refusal in judge(ours, theirs, subject.spec.connector.mode.value):
            if refusal.reason in _TOLD_BY_MODEL_MISMATCH:
                continue
            if _RULE_OF.get(refusal.reason, "parallel-unsupported") == rule:
                found.append(PairRefusal(prefill, decode, refusal.reason.value, refusal.message))
    return found


def geometry_of(pool: Pool) -> Geometry:
    """The planner's view of a pool. Figures that are not known are replaced by ones that refuse nothing."""
    facts, parallel = pool.facts, pool.spec.parallel
    per_layer = facts.kv_bytes_per_token(pool.kv_dtype_bytes)
    heads = 1 if facts.mla else (facts.kv_heads or 0)
    token_bytes = per_layer // (facts.cached_layers or 1) // max(1, heads) if per_layer else 0
    kinds = sorted(set(facts.kinds), key=list(LayerKind).index) or [LayerKind.FULL]
    groups = tuple(
        Group(
            block_size=pool.block_size,
            sliding_window=(facts.sliding_window or 0) if kind is LayerKind.SLIDING else 0,
            recurrent=kind is LayerKind.RECURRENT,
        )
        for kind in kinds
    )
    return Geometry(
        tp_size=parallel.tp,
        pp_size=parallel.pp,
        cp_size=pool.context_parallel,
        num_layers=facts.layers or 1,
        num_kv_heads=heads or 1,
        token_bytes=token_bytes,
        dtype=pool.kv_dtype,
        mla=facts.mla,
        packed="cpu" if not pool.is_npu and not facts.mla else "",
        groups=groups,
    )
