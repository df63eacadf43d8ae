"""Running the static rules over a cluster file. Reads the model directory's config.json; judges purely."""

from __future__ import annotations

from ascend_pd.check.finding import Finding, Severity, in_order
from ascend_pd.check.rules import RULES
from ascend_pd.check.subject import Subject
from ascend_pd.errors import OperatorError
from ascend_pd.models.load import load_facts
from ascend_pd.spec.cluster import PDCluster


def subject_of(cluster: PDCluster) -> Subject:
    """The rules' view of a cluster, with the facts of every model that a pool uses."""
    model = cluster.spec.model
    paths = {pool.overrides.model_path or model.path for pool in cluster.spec.pools}
    return Subject(cluster, {path: load_facts(path, model.geometry) for path in paths})


def judge(subject: Subject) -> list[Finding]:
    """All findings of all static rules, errors first."""
    return in_order(finding for rule in RULES.values() for finding in rule.check(subject))


def judge_spec(cluster: PDCluster) -> list[Finding]:
    """All findings of all static rules over a cluster file, errors first."""
    return judge(subject_of(cluster))


def require_startable(cluster: PDCluster, source: str) -> list[Finding]:
    """Refuse a cluster that cannot work; return the other findings.

    Raises:
        OperatorError: the first error and the number of the others.
    """
    findings = judge_spec(cluster)
    errors = [finding for finding in findings if finding.severity is Severity.ERROR]
    if errors:
        first = errors[0]
        more = f" (and {len(errors) - 1} more: ascend-pd check {source})" if len(errors) > 1 else ""
        raise OperatorError(f"{source}: {first.rule}: {first.path}: {first.message}{more}", first.fix)
    return findings
