"""The report for people: verdict, findings by pool with errors first, then what the cluster derives to.

Lines are pairs of (style, text); they become colour on a terminal and plain text elsewhere.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from ascend_pd.check.finding import Finding, Severity
from ascend_pd.check.outcome import ExitCode, Outcome
from ascend_pd.check.subject import Pool, Subject

Line = tuple[str, str]
STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.UNKNOWN: "cyan"}
MAX_EVIDENCE = 8


def report_lines(outcome: Outcome, *, strict: bool) -> Iterator[Line]:
    """One file's report."""
    code = outcome.exit_code(strict=strict)
    if outcome.unusable:
        yield "bold red", outcome.unusable
        return
    counts = [
        f"{n} {severity.value}{'s' if n > 1 and severity is not Severity.UNKNOWN else ''}"
        for severity in Severity
        if (n := sum(f.severity is severity for f in outcome.findings))
    ]
    verdict = "good" if code is ExitCode.GOOD else "refused"
    yield (
        ("bold green" if code is ExitCode.GOOD else "bold red"),
        (f"{outcome.source}: {verdict}" + (f" ({', '.join(counts)})" if counts else "")),
    )
    for title, findings in _grouped(outcome):
        yield "bold", f"  {title}"
        for finding in findings:
            yield from _finding_lines(finding)
    if outcome.image:
        yield "", "  this image: " + ", ".join(f"{name} {version}" for name, version in outcome.image.items())
    if outcome.subject:
        yield from _derived(outcome.subject)


def _grouped(outcome: Outcome) -> Iterator[tuple[str, list[Finding]]]:
    """By pool, in the order of the worst finding of each."""
    groups: dict[str, list[Finding]] = {}
    for finding in outcome.findings:
        groups.setdefault(_group(outcome, finding), []).append(finding)
    yield from groups.items()


def _group(outcome: Outcome, finding: Finding) -> str:
    if finding.path.startswith("host:"):
        return f"host {finding.path.removeprefix('host:')}"
    head, _, tail = finding.path.partition("$.spec.pools[")
    if head or not tail or outcome.subject is None:
        return "cluster"
    pool = outcome.subject.pools[int(tail.partition("]")[0])]
    return f"pool {pool.name} ({pool.spec.role}, {pool.spec.hardware})"


def _finding_lines(finding: Finding) -> Iterator[Line]:
    where = f"line {finding.line}, {finding.path}" if finding.line else finding.path
    yield STYLES[finding.severity], f"    {finding.severity.value} {finding.rule}  {where}"
    yield from (("", f"      {line}") for line in textwrap.wrap(finding.message, 100) or [""])
    if finding.fix:
        yield from (("green", f"      {line}") for line in textwrap.wrap(f"fix: {finding.fix}", 100))
    for raw in finding.evidence[:MAX_EVIDENCE]:
        yield "dim", f"      | {raw}"


def _derived(subject: Subject) -> Iterator[Line]:
    head = ("pool", "role", "hardware", "instances", "tp x pp x dp", "KV tokens", "HTTP", "side channel")
    rows = [head, *(_row(subject, pool) for pool in subject.pools)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for number, row in enumerate(rows):
        text = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield ("bold" if not number else ""), f"  {text.rstrip()}"
    topology = subject.topology
    front = [("proxy", topology.proxy), ("metaserver", topology.metaserver), ("admin", topology.admin)]
    yield "", "  " + "  ".join(f"{name} {a.host}:{a.port}" for name, a in front if a)


def _row(subject: Subject, pool: Pool) -> tuple[str, ...]:
    engines = [e for e in subject.topology.engines if e.pool == pool.name]
    parallel = pool.spec.parallel
    union = pool.spec.role.value == "union"
    return (
        pool.name,
        pool.spec.role.value,
        pool.spec.hardware.value,
        str(len(engines)),
        f"{parallel.tp} x {parallel.pp} x {parallel.dp}",
        str(pool.memory.tokens) if pool.memory else "-",
        _span(e.http_port for e in engines),
        "-" if union else _span(e.side_channel_port for e in engines),
    )


def _span(ports: Iterable[int]) -> str:
    known = sorted(set(ports))
    return str(known[0]) if len(known) == 1 else f"{known[0]}-{known[-1]}"


def render_plain(outcomes: Sequence[Outcome], *, strict: bool) -> str:
    """The whole report without colour."""
    return "\n".join(text for outcome in outcomes for _, text in report_lines(outcome, strict=strict))


def print_coloured(outcomes: Sequence[Outcome], *, strict: bool) -> None:
    """The whole report on a terminal."""
    from rich.console import Console  # 60 ms that a pipe does not need
    from rich.text import Text

    console = Console(highlight=False)
    for outcome in outcomes:
        for style, text in report_lines(outcome, strict=strict):
            console.print(Text(text, style=style), soft_wrap=True)
