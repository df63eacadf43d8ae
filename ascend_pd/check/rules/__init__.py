"""The static rules: one per file, pure, in the order of the report.

A rule's module has NAME (kebab-case, stable, never reused), SEVERITY (its worst), `check(subject)`, and its
page: the docstring in English, ZH in Chinese.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

from ascend_pd.check.finding import Finding, Severity
from ascend_pd.check.rules import (
    address_unreachable,
    cpu_limits,
    devices_short,
    engine_args,
    env_conflict,
    hardware_mixed,
    kv_quant,
    lease,
    load_failure,
    memory_short,
    model_facts,
    model_length,
    model_mismatch,
    parallel_unsupported,
    port_overlap,
    port_range,
    port_reserved,
    ratio,
    role_missing,
    secret,
    spec_decode,
    spec_invalid,
    tp_heads,
    tp_not_multiple,
    transport_hardware,
    versions,
)
from ascend_pd.check.subject import Subject

_MODULES: tuple[ModuleType, ...] = (
    spec_invalid,
    role_missing,
    hardware_mixed,
    tp_not_multiple,
    tp_heads,
    parallel_unsupported,
    devices_short,
    port_overlap,
    port_reserved,
    port_range,
    address_unreachable,
    model_facts,
    model_length,
    memory_short,
    model_mismatch,
    kv_quant,
    cpu_limits,
    transport_hardware,
    versions,
    env_conflict,
    engine_args,
    spec_decode,
    lease,
    load_failure,
    secret,
    ratio,
)


@dataclass(frozen=True, slots=True)
class Rule:
    """One static rule."""

    name: str
    severity: Severity
    check: Callable[[Subject], Iterator[Finding]]
    page_en: str
    page_zh: str


def _rule(module: ModuleType) -> Rule:
    return Rule(module.NAME, Severity(module.SEVERITY), module.check, module.__doc__ or "", module.ZH)


RULES: dict[str, Rule] = {rule.name: rule for rule in map(_rule, _MODULES)}
