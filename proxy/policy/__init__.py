"""The registry of selection policies."""

from __future__ import annotations

from collections.abc import Callable

from proxy.policy.base import BLOCK_TOKENS, Candidate, Policy, Work
from proxy.policy.least_tokens import LeastTokens
from proxy.policy.power_of_two import PowerOfTwo
from proxy.policy.prefix import Prefix
from proxy.policy.round_robin import RoundRobin
from proxy.policy.session import Session

POLICIES: dict[str, Callable[[], Policy]] = {
    "least-tokens": LeastTokens,
    "power-of-two": PowerOfTwo,
    "prefix": Prefix,
    "round-robin": RoundRobin,
    "session": Session,
}

__all__ = ["BLOCK_TOKENS", "POLICIES", "Candidate", "Policy", "Work"]
