"""What checking one file came to, and the exit code of it all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum

from ascend_pd.check.finding import Finding, Severity, in_order
from ascend_pd.check.rules.spec_invalid import NAME as SPEC_INVALID
from ascend_pd.check.subject import Subject
from ascend_pd.spec.document import Document
from ascend_pd.spec.problems import SpecError, location_of


class ExitCode(IntEnum):
    """GOOD may have warnings; FINDINGS has errors, or with --strict anything; UNUSABLE could not be judged."""

    GOOD = 0
    FINDINGS = 1
    UNUSABLE = 2


@dataclass(frozen=True)
class Outcome:
    """One file. `subject` is None when it could not be read; `unusable` says why it is no cluster file at all."""

    source: str
    findings: tuple[Finding, ...] = ()
    subject: Subject | None = None
    unusable: str = ""
    image: dict[str, str] = field(default_factory=dict)
    """With --depth host, what this image has: component → version."""

    def exit_code(self, *, strict: bool) -> ExitCode:
        """What this file alone comes to."""
        if self.unusable:
            return ExitCode.UNUSABLE
        bad = self.findings if strict else [f for f in self.findings if f.severity is Severity.ERROR]
        return ExitCode.FINDINGS if bad else ExitCode.GOOD


def outcome_of_error(source: str, problem: SpecError) -> Outcome:
    """A file that could not be read: not a cluster file, or one with mistakes, which are findings."""
    if not problem.is_cluster:
        return Outcome(source, unusable=str(problem))
    findings = (
        Finding(SPEC_INVALID, Severity.ERROR, p.path, p.message, p.fix, line=p.line) for p in problem.problems
    )
    return Outcome(source, tuple(findings))


def outcome_of_findings(
    source: str,
    findings: Iterable[Finding],
    subject: Subject,
    document: Document,
    image: dict[str, str] | None = None,
) -> Outcome:
    """A judged file; findings about it get their line."""
    located = [
        replace(f, line=document.line_of(location_of(f.path))) if f.path.startswith("$") else f for f in findings
    ]
    return Outcome(source, tuple(in_order(located)), subject, image=image or {})


def overall(outcomes: Iterable[Outcome], *, strict: bool) -> ExitCode:
    """The worst of all files; nothing judged is UNUSABLE, never a pass."""
    return max((outcome.exit_code(strict=strict) for outcome in outcomes), default=ExitCode.UNUSABLE)
