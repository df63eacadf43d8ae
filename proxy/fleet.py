"""The live view of instances: who exists, how loaded each is, who fits whom, and who is chosen next."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from ascend_pd.wire.messages import HelloReply
from proxy.breaker import Breaker
from proxy.errors import ProxyError
from proxy.pairing import Pairing
from proxy.policy import POLICIES, Candidate, Policy, Work
from proxy.settings import InstanceSettings, Role, Settings

RETRY_AFTER_S = 5


class Instance:
    """One endpoint and its load. Mutable; owned by the event loop."""

    __slots__ = (
        "breaker",
        "dialect",
        "draining",
        "healthy",
        "identity",
        "key",
        "requests",
        "role",
        "settings",
        "tokens",
    )

    def __init__(self, settings: InstanceSettings, role: Role, dialect: str) -> None:
        self.settings = settings
        self.dialect = settings.dialect or dialect
        self.role = role
        self.key = settings.url if settings.dp_rank is None else f"{settings.url}#{settings.dp_rank}"
        self.tokens = 0
        self.requests = 0
        self.draining = False
        self.healthy = True
        """By the last probes; trusted until the first of them."""
        self.breaker = Breaker()
        self.identity: HelloReply | None = None
        """What its side channel said; None while unknown."""

    def available(self, now: float | None = None) -> bool:
        """May new work go here?"""
        return self.healthy and not self.draining and self.breaker.allows(time.monotonic() if now is None else now)


class Load:
    """The weight of one request on one instance, given back exactly once."""

    __slots__ = ("_open", "instance", "tokens")

    def __init__(self, instance: Instance, tokens: int) -> None:
        self.instance = instance
        self.tokens = tokens
        self._open = True
        instance.tokens += tokens
        instance.requests += 1
        instance.breaker.begin(time.monotonic())

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
            self.instance.breaker.abandoned()


class Fleet:
    """All instances by role, and a policy for each role."""

    def __init__(self, settings: Settings) -> None:
        self._dialect = settings.dialect or settings.mode
        self._pairing = Pairing("layerwise" if settings.mode == "layerwise" else "pull")
        self._instances: dict[Role, list[Instance]] = {
            Role.PREFILL: [Instance(i, Role.PREFILL, self._dialect) for i in settings.prefill],
            Role.DECODE: [Instance(i, Role.DECODE, self._dialect) for i in settings.decode],
            Role.UNION: [Instance(i, Role.UNION, self._dialect) for i in settings.union],
        }
        self._policies: dict[Role, Policy] = {
            Role.PREFILL: POLICIES[settings.policy.prefill](),
            Role.DECODE: POLICIES[settings.policy.decode](),
            Role.UNION: POLICIES[settings.policy.decode](),
        }
        self._wants_prefix = any(policy.wants_prefix for policy in self._policies.values())

    def instances(self, role: Role | None = None) -> list[Instance]:
        """All, or those of one role."""
        if role is not None:
            return self._instances[role]
        return [i for members in self._instances.values() for i in members]

    def add(self, settings: InstanceSettings, role: Role) -> Instance:
        """A new instance, or the one that is there already, drained no longer."""
        instance = Instance(settings, role, self._dialect)
        for known in self._instances[role]:
            if known.key == instance.key:
                known.draining = False
                return known
        self._instances[role] = [*self._instances[role], instance]
        return instance

    def remove(self, instance: Instance) -> None:
        """Forget an instance; requests that it still serves end undisturbed."""
        self._instances[instance.role] = [i for i in self._instances[instance.role] if i is not instance]

    def find(self, role: Role, key: str) -> Instance | None:
        """By role and key."""
        return next((i for i in self._instances[role] if i.key == key), None)

    def follow(self, settings: Settings) -> dict[str, list[str]]:
        """Add and remove instances until they are those of new settings; returns what was done, by key."""
        wanted = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode, Role.UNION: settings.union}
        done: dict[str, list[str]] = {"added": [], "removed": []}
        for role, members in wanted.items():
            fresh = [Instance(member, role, self._dialect) for member in members]
            for instance in fresh:
                if self.find(role, instance.key) is None:
                    done["added"].append(instance.key)
                self.add(instance.settings, role)
            keys = {instance.key for instance in fresh}
            for gone in [i for i in self._instances[role] if i.key not in keys]:
                self.remove(gone)
                done["removed"].append(gone.key)
        return done

    def wants_prefix(self) -> bool:
        """Does a policy ask for the prompt's block hashes?"""
        return self._wants_prefix

    def uncached_on_decode(self, work: Work) -> int:
        """Tokens of this prompt that the best decode instance would have to compute itself."""
        policy = self._policies[Role.DECODE]
        cached = [policy.cached_tokens(i.key, work) for i in self._instances[Role.DECODE] if i.available()]
        return work.tokens - max(cached, default=0)

    def ready(self) -> bool:
        """Can a request be served now?"""
        able = {role: any(i.available() for i in members) for role, members in self._instances.items()}
        return able[Role.UNION] or (able[Role.PREFILL] and able[Role.DECODE])

    def choose_dialect(self, avoid: Collection[str] = ()) -> str:
        """The dialect whose instances can take work and have the least of it; nearly always the only one."""
        if len({i.dialect for i in self._instances[Role.PREFILL]}) < 2:
            return self._instances[Role.PREFILL][0].dialect if self._instances[Role.PREFILL] else self._dialect
        now = time.monotonic()
        loads: dict[str, list[int]] = {}
        able: dict[Role, set[str]] = {}
        for role in (Role.PREFILL, Role.DECODE):
            members = [i for i in self._instances[role] if i.available(now) and i.key not in avoid]
            able[role] = {i.dialect for i in members}
            for instance in members:
                loads.setdefault(instance.dialect, []).append(instance.tokens)
        complete = able[Role.PREFILL] & able[Role.DECODE]
        return min(sorted(complete), key=lambda d: sum(loads[d]) / len(loads[d]), default=self._dialect)

    def select_prefiller(
        self, work: Work, avoid: Collection[str] = (), decode: Instance | None = None, dialect: str = ""
    ) -> Load:
        """The prefill instance for this work, already weighed down by it.

        One that fits no decode instance (or not `decode`, if that is chosen already) is no candidate.

        Raises:
            ProxyError: none is available, or none fits; the latter names the field and both values.
        """
        partners = self._instances[Role.DECODE] if decode is None else [decode]
        return self._select(
            Role.PREFILL, work, avoid, lambda p: _best_misfit([self._misfit(p, d) for d in partners]), dialect
        )

    def select_decoder(
        self, work: Work, avoid: Collection[str] = (), prefill: Instance | None = None, dialect: str = ""
    ) -> Load:
        """The decode instance for this work, already weighed down by it.

        Raises:
            ProxyError: as `select_prefiller`.
        """
        return self._select(
            Role.DECODE, work, avoid, lambda d: self._misfit(prefill, d) if prefill is not None else "", dialect
        )

    def select_union(self, work: Work, avoid: Collection[str] = ()) -> Load:
        """A union instance.

        Raises:
            ProxyError: none is available.
        """
        return self._select(Role.UNION, work, avoid, lambda _: "")

    def _misfit(self, prefill: Instance, decode: Instance) -> str:
        return self._pairing.misfit(prefill.identity, decode.identity)

    def select(self, role: Role, work: Work) -> Load:
        """An instance of this role for a request that has no partner.

        Raises:
            ProxyError: none is available.
        """
        return self._select(role, work, (), lambda _: "")

    def _select(
        self, role: Role, work: Work, avoid: Collection[str], why_not: Callable[[Instance], str], dialect: str = ""
    ) -> Load:
        now = time.monotonic()
        able = [i for i in self._instances[role] if i.available(now) and dialect in ("", i.dialect)]
        fitting = [i for i in able if not why_not(i)] if able else able
        if not fitting:
            if able:
                reason = f"no prefill and decode engine fit together: {why_not(able[0])}"
                raise ProxyError(reason, 503, kind="incompatible_engines")
            raise NoInstance(role)
        fresh = [i for i in fitting if i.key not in avoid] if avoid else fitting
        offered = {i.key: i for i in fresh or fitting}
        chosen = self._policies[role].choose(
            [Candidate(k, i.tokens, i.requests) for k, i in offered.items()], work
        )
        return Load(offered[chosen.key], work.tokens)


class NoInstance(ProxyError):
    """Nobody of this role may take new work now."""

    def __init__(self, role: Role) -> None:
        super().__init__(f"no {role} instance is available", 503, kind="no_instance", retry_after_s=RETRY_AFTER_S)
        self.role = role


def _best_misfit(reasons: list[str]) -> str:
    """Empty when one partner fits or there is none to judge by."""
    return "" if not reasons or "" in reasons else reasons[0]
