"""The one file that is sent back, and its verdict."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass
class Check:
    """One thing that held or did not."""

    name: str
    passed: bool
    detail: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass
class Part:
    """One part of a run. Without any check it has not passed: nothing was shown."""

    name: str
    checks: list[Check] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return bool(self.checks) and all(check.passed for check in self.checks)

    @contextmanager
    def check(self, name: str) -> Iterator[Check]:
        """A check that fails when its body raises."""
        found = Check(name, True)
        self.checks.append(found)
        try:
            yield found
        except Exception as error:  # noqa: BLE001 - the report is where it goes
            found.passed = False
            found.detail = f"{type(error).__name__}: {error}"[:4000]


def run_part(name: str, run: Callable[[Part], None], say: Callable[[str], None] = print) -> Part:
    """Run one part to its end, whatever happens in it."""
    part = Part(name)
    say(f"{name} …")
    started = time.monotonic()
    with part.check("ran to its end"):
        run(part)
    if part.checks[0].passed and len(part.checks) > 1:
        part.checks.pop(0)
    elif part.checks[0].passed:
        part.checks[0] = Check("ran to its end", False, "it checked nothing")
    part.seconds = round(time.monotonic() - started, 1)
    for check in part.checks:
        figures = "  ".join(f"{k} {v:g}" for k, v in check.figures.items())
        say(f"  {'pass' if check.passed else 'FAIL'}  {check.name}" + (f"  {figures}" if figures else ""))
        if not check.passed:
            say("        " + check.detail.strip().replace("\n", "\n        "))
    return part


def render(name: str, device: str, parts: list[Part], facts: dict[str, Any]) -> str:
    """The report file's text."""
    plain = [{**asdict(part), "passed": part.passed} for part in parts]
    passed = bool(parts) and all(part.passed for part in parts)
    body = {"format": FORMAT, "name": name, "device": device, "passed": passed, **facts, "parts": plain}
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"


def write(path: Path, text: str) -> None:
    """Whole or not at all."""
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)
