"""The registry of selection policies."""

from __future__ import annotations

from collections.abc import Callable

from proxy.policy.base import Candidate, Policy, Work
from proxy.policy.least_tokens import LeastTokens

POLICIES: dict[str, Callable[[], Policy]] = {"least-tokens": LeastTokens}

__all__ = ["POLICIES", "Candidate", "Policy", "Work"]
