"""Looking up hccn_tool's answers among the gathered commands."""

from __future__ import annotations

from collections.abc import Iterator

from ascend_pd.check.finding import Finding, unknown
from ascend_pd.check.host.facts import CommandFacts, HostFacts

_PREFIX = "hccn_tool -i "


def answers(facts: HostFacts, question: str) -> Iterator[tuple[int, CommandFacts]]:
    """(device, run) for every device that was asked this question, in device order."""
    for line, run in facts.commands.items():
        if line.startswith(_PREFIX) and line.endswith(question):
            yield int(line.removeprefix(_PREFIX).split()[0]), run


def tool_trouble(facts: HostFacts, rule: str) -> Finding | None:
    """Unknown, when hccn_tool is missing: neither a failure nor a pass."""
    runs = [run for line, run in facts.commands.items() if line.startswith("hccn_tool")]
    if not runs or runs[0].state == "missing":
        fix = "mount /usr/local/Ascend/driver/tools/hccn_tool, or run this on the node"
        return unknown(rule, f"host:{facts.hostname}", "there is no hccn_tool here", fix)
    return None
