"""The live view of instances: who exists, how loaded each is, who fits whom, and who is chosen next."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

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

    def equals(self, other: Instance) -> bool:
        """Is it the same engine, spoken to in the same way?"""
        return (self.settings, self.dialect) == (other.settings, other.dialect)

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


@dataclass(frozen=True, slots=True)
class Differences:
    """Between the instances of a fleet and those of new settings."""

    added: list[Instance]
    changed: list[Instance]
    """New ones, of a known key but with other settings."""
    removed: list[Instance]


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

    def make(self, settings: InstanceSettings, role: Role) -> Instance:
        """An instance that is not taken in yet."""
        return Instance(settings, role, self._dialect)

    def add(self, settings: InstanceSettings, role: Role) -> Instance:
        """A new instance, taken in unprobed."""
        instance = self.make(settings, role)
        self.put(instance)
        return instance

    def put(self, instance: Instance) -> None:
        """Take it in. One that was known under its key makes way and hands on whether it drains; requests that the
        old one still serves end undisturbed."""
        known = self.find(instance.role, instance.key)
        if known is None:
            self._instances[instance.role] = [*self._instances[instance.role], instance]
            return
        instance.draining = known.draining
        self._instances[instance.role] = [instance if i is known else i for i in self._instances[instance.role]]

    def remove(self, instance: Instance) -> None:
        """Forget an instance; requests that it still serves end undisturbed."""
        self._instances[instance.role] = [i for i in self._instances[instance.role] if i.key != instance.key]

    def find(self, role: Role, key: str) -> Instance | None:
        """By role and key."""
        return next((i for i in self._instances[role] if i.key == key), None)

    def differences(self, settings: Settings) -> Differences:
        """What has to be done for the instances to be those of new settings."""
        found = Differences([], [], [])
        wanted = {Role.PREFILL: settings.prefill, Role.DECODE: settings.decode, Role.UNION: settings.union}
        for role, members in wanted.items():
            fresh = {i.key: i for i in (self.make(member, role) for member in members)}
            for instance in fresh.values():
                known = self.find(role, instance.key)
                if known is None:
                    found.added.append(instance)
                elif not known.equals(instance):
                    found.changed.append(instance)
            found.removed.extend(i for i in self._instances[role] if i.key not in fresh)
        return found

    def follow(self, differences: Differences) -> None:
        """Do it."""
        for instance in (*differences.added, *differences.changed):
            self.put(instance)
        for instance in differences.removed:
            self.remove(instance)

    def wants_prefix(self) -> bool:
        """Does a policy ask for the prompt's block hashes?"""
        return self._wants_prefix

    def uncached_on_decode(self, work: Work) -> int:
        """Tokens of this prompt that the best decode instance would have to compute itself."""
        policy = self._policies[Role.DECODE]
        cached = [policy.cached_tokens(i.key, work) for i in self._instances[Role.DECODE] if i.available()]
        return work.tokens - max(cached, default=0)

    def fallback_role(self, fallback: str) -> Role | None:
        """Who serves alone when P or D is down, by `policy.fallback`; None when nobody may."""
        if not self._instances[Role.PREFILL] and not self._instances[Role.DECODE]:
            return Role.UNION if self._instances[Role.UNION] else None
        if fallback == "none":
            return None
        if self._able(Role.UNION) or not self._instances[Role.DECODE]:
            return Role.UNION if self._instances[Role.UNION] else None
        return Role.DECODE if fallback == "local" else None

    def whole_role(self, fallback: str) -> Role | None:
        """Who serves what cannot be split over P and D; None when nobody may. A union instance is there for this,
        whatever the fallback is."""
        if self._instances[Role.UNION] and (self._able(Role.UNION) or fallback != "local"):
            return Role.UNION
        return self.fallback_role(fallback)

    def can_serve(self, fallback: str) -> bool:
        """Would a request be served now? Judged as requests are routed: a pair that fits, else the fallback.

        Engines that do not fit together are no case for the fallback: clients are told so.
        """
        if self._instances[Role.PREFILL]:
            decoders = self._able(Role.DECODE)
            pairs = [(p, d) for p in self._able(Role.PREFILL) for d in decoders if p.dialect == d.dialect]
            if pairs:
                return any(not self._misfit(p, d) for p, d in pairs)
        alone = self.fallback_role if self._instances[Role.PREFILL] else self.whole_role
        role = alone(fallback)
        return role is not None and bool(self._able(role))

    def _able(self, role: Role) -> list[Instance]:
        now = time.monotonic()
        return [i for i in self._instances[role] if i.available(now)]

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
