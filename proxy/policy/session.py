"""The same session to the same instance, as long as that one is not overloaded; without a session, least tokens.

Rendezvous hashing: each session ranks all instances by a hash, so that one that goes moves only its own sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from proxy.policy.base import Candidate, Work
from proxy.policy.least_tokens import LeastTokens

OVERLOAD = 1.5
"""An instance with more than this times the mean load (this request included) is passed over."""


class Session:
    """Bounded load."""

    wants_prefix = False

    def __init__(self) -> None:
        self._fallback = LeastTokens()

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        if not work.session:
            return self._fallback.choose(candidates, work)
        bound = OVERLOAD * (sum(c.tokens for c in candidates) + work.tokens) / len(candidates)
        ranked = sorted(candidates, key=lambda c: _rank(work.session, c.key), reverse=True)
        return next((c for c in ranked if c.tokens <= bound), ranked[0])

    def cached_tokens(self, key: str, work: Work) -> int:
        return 0


def _rank(session: str, key: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
