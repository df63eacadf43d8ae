"""Where the longest part of the prompt is likely cached, weighed against load.

Per instance the policy remembers the chained hashes of the blocks of the prompts it sent there, newest last, as
many as `blocks_per_instance`. What an instance would have to compute is its outstanding tokens plus the part of
this prompt that is not remembered there; the least of that wins. It is a guess: engines evict by their own rules.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from proxy.policy.base import Candidate, Work

BLOCKS_PER_INSTANCE = 65536
MAX_INSTANCES = 1024


class Prefix:
    """`weight` is how many outstanding tokens elsewhere one cached token is worth."""

    wants_prefix = True

    def __init__(self, weight: float = 1.0, blocks_per_instance: int = BLOCKS_PER_INSTANCE) -> None:
        self._weight = weight
        self._bound = blocks_per_instance
        self._known: OrderedDict[str, OrderedDict[int, None]] = OrderedDict()
        self._turn = 0

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        costs = [c.tokens + work.tokens - self._weight * self.cached_tokens(c.key, work) for c in candidates]
        least = min(costs)
        tied = [c for c, cost in zip(candidates, costs, strict=True) if cost == least]
        self._turn += 1
        chosen = tied[self._turn % len(tied)]
        self._remember(chosen.key, work)
        return chosen

    def cached_tokens(self, key: str, work: Work) -> int:
        """How many leading tokens of this prompt were sent to this instance before."""
        known = self._known.get(key)
        if known is None:
            return 0
        blocks = 0
        for block in work.prefix:
            if block not in known:
                break
            blocks += 1
        return min(work.tokens, blocks * work.block_tokens)

    def _remember(self, key: str, work: Work) -> None:
        known = self._known.setdefault(key, OrderedDict())
        self._known.move_to_end(key)
        for block in reversed(work.prefix):  # the head of the prompt becomes the newest: it is shared most
            known[block] = None
            known.move_to_end(block)
        while len(known) > self._bound:
            known.popitem(last=False)
        while len(self._known) > MAX_INSTANCES:
            self._known.popitem(last=False)
