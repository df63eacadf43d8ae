"""The numbers of a chaos run, for docs/reliability.md."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.load import Outcome

RECORD_VARIABLE = "ASCEND_PD_CHAOS_RECORD"


class ChaosRecord:
    """What happened so far; `write` puts it where the environment says, as JSON."""

    def __init__(self) -> None:
        self._faults: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        self._longest_error_s = 0.0
        self._longest_empty_s = 0.0

    def fault(self, name: str) -> None:
        """One fault was injected from outside."""
        self._faults[name] += 1

    def asked(self, outcomes: Sequence[Outcome]) -> None:
        """These requests came to an end."""
        for outcome in outcomes:
            kind = "cut by the client" if outcome.cut else "answered" if outcome.answered else "refused"
            self._requests[kind] += 1
            if outcome.error:
                self._longest_error_s = max(self._longest_error_s, outcome.seconds)

    def emptied(self, seconds: float) -> None:
        """An engine held nothing any more after this time."""
        self._longest_empty_s = max(self._longest_empty_s, seconds)

    def write(self) -> None:
        """Report, and keep where `ASCEND_PD_CHAOS_RECORD` names a file."""
        document = {
            "faults": dict(self._faults),
            "requests": dict(self._requests),
            "longest_error_s": round(self._longest_error_s, 1),
            "longest_empty_s": round(self._longest_empty_s, 1),
        }
        print(f"chaos: {json.dumps(document)}")
        path = os.environ.get(RECORD_VARIABLE)
        if path:
            Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
