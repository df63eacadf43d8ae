"""What a selection policy sees and says. Pure: the fleet hands it candidates, it names one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


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
    prefix: tuple[int, ...] = field(default=())
    """Chained hashes of the prompt's blocks, longest prefix last; empty when no policy needs them."""
    session: str = ""


class Policy(Protocol):
    """Chooses; `candidates` is never empty."""

    def choose(self, candidates: Sequence[Candidate], work: Work) -> Candidate:
        """The candidate to take the work."""
