"""What the preflight says: findings, and the order they are told in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """ERROR: it cannot work. WARNING: it may hurt. UNKNOWN: it could not be judged, which is no pass."""

    ERROR = "error"
    WARNING = "warning"
    UNKNOWN = "unknown"


_ORDER = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.UNKNOWN: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing judged. `path` is a path in the cluster file, or `host:NAME` for what a probe saw there."""

    rule: str
    severity: Severity
    path: str
    message: str
    fix: str = ""
    line: int = 0
    """1-based line in the file; 0 when there is none."""
    evidence: tuple[str, ...] = ()
    """Raw lines that a tool printed."""


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Errors first, otherwise as found."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def has_errors(findings: Iterable[Finding]) -> bool:
    """Whether anything forbids a start."""
    return any(finding.severity is Severity.ERROR for finding in findings)


def error(rule: str, path: str, message: str, fix: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    """It cannot work."""
    return Finding(rule, Severity.ERROR, path, message, fix, evidence=evidence)


def warning(rule: str, path: str, message: str, fix: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    """It may hurt."""
    return Finding(rule, Severity.WARNING, path, message, fix, evidence=evidence)


def unknown(rule: str, path: str, message: str, fix: str = "", evidence: tuple[str, ...] = ()) -> Finding:
    """It could not be judged."""
    return Finding(rule, Severity.UNKNOWN, path, message, fix, evidence=evidence)
