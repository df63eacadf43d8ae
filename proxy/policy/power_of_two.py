"""The less loaded of two drawn at random: nearly as good as the least loaded, and no herd of proxies."""

from __future__ import annotations

import random
from collections.abc import Sequence

from proxy.policy.base import Candidate, Work


class PowerOfTwo:
    """Draws with a generator of its own."""

    wants_prefix = False

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        if len(candidates) == 1:
            return candidates[0]
        one, other = self._random.sample(range(len(candidates)), 2)
        first, second = candidates[one], candidates[other]
        return second if second.tokens < first.tokens else first

    def cached_tokens(self, key: str, work: Work) -> int:
        return 0
