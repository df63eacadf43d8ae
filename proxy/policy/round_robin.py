"""One after another, whatever they are doing."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.policy.base import Candidate, Work


class RoundRobin:
    """Turns by key, so that an instance that comes or goes does not shift everybody's turn."""

    wants_prefix = False

    def __init__(self) -> None:
        self._last = ""

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        ordered = sorted(candidates, key=lambda c: c.key)
        chosen = next((c for c in ordered if c.key > self._last), ordered[0])
        self._last = chosen.key
        return chosen

    def cached_tokens(self, key: str, work: Work) -> int:
        return 0
