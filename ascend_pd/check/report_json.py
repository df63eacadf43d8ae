"""The report for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ascend_pd.check.finding import Finding
from ascend_pd.check.outcome import ExitCode, Outcome, overall
from ascend_pd.check.subject import Subject


def render_json(outcomes: Sequence[Outcome], *, strict: bool) -> str:
    """`{"ok": bool, "findings": […], "clusters": […]}`; `ok` is True exactly when the exit code is 0."""
    report = {
        "ok": overall(outcomes, strict=strict) is ExitCode.GOOD,
        "findings": [_finding(o.source, f) for o in outcomes for f in o.findings],
        "clusters": [_cluster(outcome) for outcome in outcomes],
    }
    return json.dumps(report, indent=2, ensure_ascii=False)


def _finding(source: str, finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "severity": finding.severity.value,
        "path": finding.path,
        "message": finding.message,
        "fix": finding.fix,
        "file": source,
        "line": finding.line,
        "evidence": list(finding.evidence),
    }


def _cluster(outcome: Outcome) -> dict[str, Any]:
    pools = [] if outcome.subject is None else _pools(outcome.subject)
    return {"file": outcome.source, "unusable": outcome.unusable, "pools": pools, "image": outcome.image}


def _pools(subject: Subject) -> list[dict[str, Any]]:
    return [
        {
            "name": pool.name,
            "role": pool.spec.role.value,
            "hardware": pool.spec.hardware.value,
            "instances": pool.spec.replicas * pool.spec.parallel.dp,
            "devices": pool.spec.replicas * pool.spec.parallel.world_size if pool.is_npu else 0,
            "kv_capacity_tokens": pool.memory.tokens if pool.memory else None,
        }
        for pool in subject.pools
    ]
