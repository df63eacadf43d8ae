"""The live view of instances: who exists, how loaded each is, and who is chosen next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from proxy.errors import ProxyError
from proxy.policy import POLICIES, Candidate, Policy, Work
from proxy.settings import InstanceSettings, Role, Settings


class Instance:
    """One endpoint and its load. Mutable; owned by the event loop."""

    __slots__ = ("draining", "healthy", "key", "requests", "role", "settings", "tokens")

    def __init__(self, settings: InstanceSettings, role: Role) -> None:
        self.settings = settings
        self.role = role
        self.key = settings.url if settings.dp_rank is None else f"{settings.url}#{settings.dp_rank}"
        self.tokens = 0
        self.requests = 0
        self.draining = False
        self.healthy = True

    def available(self) -> bool:
        """May new work go here?"""
        return self.healthy and not self.draining


class Load:
    """The weight of one request on one instance, given back exactly once."""

    __slots__ = ("_open", "instance", "tokens")

    def __init__(self, instance: Instance, tokens: int) -> None:
        self.instance = instance
        self.tokens = tokens
        self._open = True
        instance.tokens += tokens
        instance.requests += 1

    def weigh(self, tokens: int) -> None:
        """The true number is known now."""
        if self._open:
            self.instance.tokens += tokens - self.tokens
            self.tokens = tokens

    def close(self) -> None:
        """Give the weight back; a second call changes nothing."""
        if self._open:
            self._open = False
            self.instance.tokens -= self.tokens
            self.instance.requests -= 1


class Fleet:
    """All instances by role, and a policy for each role."""

    def __init__(self, settings: Settings) -> None:
        self._instances: dict[Role, list[Instance]] = {
            Role.PREFILL: [Instance(i, Role.PREFILL) for i in settings.prefill],
            Role.DECODE: [Instance(i, Role.DECODE) for i in settings.decode],
            Role.UNION: [Instance(i, Role.UNION) for i in settings.union],
        }
        self._policies: dict[Role, Policy] = {
            Role.PREFILL: POLICIES[settings.policy.prefill](),
            Role.DECODE: POLICIES[settings.policy.decode](),
            Role.UNION: POLICIES[settings.policy.decode](),
        }

    def instances(self, role: Role | None = None) -> list[Instance]:
        """All, or those of one role."""
        roles = [role] if role else list(Role)
        return [i for r in roles for i in self._instances[r]]

    def select_prefiller(self, work: Work, avoid: Iterable[str] = ()) -> Load:
        """The prefill instance for this work, already weighed down by it."""
        return self._select(Role.PREFILL, work, avoid)

    def select_decoder(self, work: Work, avoid: Iterable[str] = ()) -> Load:
        """The decode instance for this work, already weighed down by it."""
        return self._select(Role.DECODE, work, avoid)

    def select_union(self, work: Work, avoid: Iterable[str] = ()) -> Load:
        """A union instance."""
        return self._select(Role.UNION, work, avoid)

    def _select(
        self, role: Role, work: Work, avoid: Iterable[str], fits: Callable[[Instance], bool] | None = None
    ) -> Load:
        shunned = frozenset(avoid)
        able = [i for i in self._instances[role] if i.available() and (fits is None or fits(i))]
        fresh = [i for i in able if i.key not in shunned] or able
        if not fresh:
            raise ProxyError(f"no {role} instance is available", 503, kind="no_instance", retry_after_s=5)
        chosen = self._policies[role].choose([Candidate(i.key, i.tokens, i.requests) for i in fresh], work)
        return Load(next(i for i in fresh if i.key == chosen.key), work.tokens)
