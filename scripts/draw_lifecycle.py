"""Draw both machines of the life cycle, from their tables, into `docs/en/lifecycle.md` and `docs/zh/lifecycle.md`.

`draw_lifecycle.py` writes, `draw_lifecycle.py --check` says whether the pages are current (exit code 1 when not).
"""

from __future__ import annotations

import re
import sys
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from connectors.handoff.machine import Kind, Table  # noqa: E402
from connectors.handoff.sink_table import SINK, SINK_FINAL, SinkEvent, SinkState  # noqa: E402
from connectors.handoff.source_table import SOURCE, SOURCE_FINAL, SourceEvent, SourceState  # noqa: E402

PAGES = (ROOT / "docs/en/lifecycle.md", ROOT / "docs/zh/lifecycle.md")
Machine = tuple[Table[Any, Any, Any], type[StrEnum], type[StrEnum], frozenset[Any]]
MACHINES: dict[str, Machine] = {
    "source": (SOURCE, SourceState, SourceEvent, SOURCE_FINAL),
    "sink": (SINK, SinkState, SinkEvent, SINK_FINAL),
}
EVENTS_PER_LINE = 3


def diagram(machine: Machine) -> str:
    """A mermaid state diagram: one arrow per pair of states, with the events that lead along it."""
    table, states, _, final = machine
    arrows: dict[tuple[str, str], list[str]] = {}
    for event, row in table.items():
        for state in states:
            after = row[state].next
            if after is not None and not (event == "deadline" and after == "unknown"):
                arrows.setdefault((state, after), []).append(event)
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> unknown"]
    for (origin, after), events in arrows.items():
        groups = [events[i : i + EVENTS_PER_LINE] for i in range(0, len(events), EVENTS_PER_LINE)]
        lines.append(f"    {origin} --> {after}: {',<br/>'.join(', '.join(group) for group in groups)}")
    lines += [f"    {state} --> [*]" for state in sorted(final)]
    return "\n".join([*lines, "```"])


def cells(machine: Machine) -> str:
    """Every cell as a Markdown table: the next state, `=` allowed without one, `-` ignored, `x` refused."""
    table, states, events, _ = machine
    lines = [f"| | {' | '.join(states)} |", "|---" * (len(states) + 1) + "|"]
    for event in events:
        row = [_cell(table[event][state]) for state in states]
        lines.append(f"| **{event}** | {' | '.join(row)} |")
    return "\n".join(lines)


def _cell(cell: Any) -> str:
    if cell.kind is Kind.ALLOWED:
        return str(cell.next or "=")
    return "-" if cell.kind is Kind.IGNORED else "x"


def drawn(page: str) -> str:
    """The page with every generated part made anew."""
    for name, machine in MACHINES.items():
        for part, make in (("diagram", diagram), ("cells", cells)):
            pattern = re.compile(rf"(<!-- {name} {part} -->\n)(?:.*?\n)??(<!-- end -->)", re.DOTALL)
            if not pattern.search(page):
                raise SystemExit(f"a page has no part '{name} {part}'")
            made = make(machine)
            page = pattern.sub(lambda match, made=made: f"{match.group(1)}{made}\n{match.group(2)}", page)
    return page


def main() -> int:
    stale = [page for page in PAGES if drawn(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"stale: {page.relative_to(ROOT)}: run scripts/draw_lifecycle.py", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(drawn(page.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
