"""What a selection policy sees and says. Pure but for its memory: the fleet hands it candidates, it names one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that may take the request now."""

    key: str
    tokens: int
    """Tokens of the requests it works on, as far as known."""
    requests: int


@dataclass(frozen=True, slots=True)
class Work:
    """The request to place."""

    tokens: int
    prefix: tuple[int, ...] = ()
    """Chained hashes of the prompt's full blocks, first block first; empty when no policy asks for them."""
    session: str = ""
    block_tokens: int = BLOCK_TOKENS


class Policy(Protocol):
    """Chooses; `candidates` is never empty."""

    wants_prefix: bool

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        """The candidate to take the work."""

    def cached_tokens(self, key: str, work: Work) -> int:
        """How many of the prompt's leading tokens this policy believes cached there; 0 when it keeps no memory."""
