"""Fewest outstanding tokens; ties rotate."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.policy.base import Candidate, Work


class LeastTokens:
    """In-flight tokens as the proxy counts them: a request weighs from selection to its end."""

    wants_prefix = False

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        least = min(c.tokens for c in candidates)
        tied = [c for c in candidates if c.tokens == least]
        self._turn += 1
        return tied[self._turn % len(tied)]

    def cached_tokens(self, key: str, work: Work) -> int:
        return 0
