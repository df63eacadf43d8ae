"""The host rules: one per file, pure functions of the gathered facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from ascend_pd.check.finding import Finding, Severity
from ascend_pd.check.host.facts import HostFacts
from ascend_pd.check.host.rules import (
    adapter,
    address,
    clock,
    devices,
    generation,
    memory,
    model,
    mooncake,
    network,
    ping,
    ports,
    shadow,
    tls,
    versions,
)
from ascend_pd.check.subject import Pool, Subject

_MODULES: tuple[ModuleType, ...] = (
    devices,
    generation,
    network,
    address,
    tls,
    ping,
    versions,
    adapter,
    ports,
    model,
    memory,
    clock,
    mooncake,
    shadow,
)


@dataclass(frozen=True, slots=True)
class HostRule:
    """One rule over one host's facts."""

    name: str
    severity: Severity
    check: Callable[[Subject, Pool, HostFacts], Iterator[Finding]]
    page_en: str
    page_zh: str


def _rule(module: ModuleType) -> HostRule:
    return HostRule(module.NAME, Severity(module.SEVERITY), module.check, module.__doc__ or "", module.ZH)


HOST_RULES: dict[str, HostRule] = {rule.name: rule for rule in map(_rule, _MODULES)}
