"""The preflight: static rules over a cluster file, and probes of a host. `judge_spec` is what other parts call."""

from __future__ import annotations

from ascend_pd.check.finding import Finding, Severity, has_errors
from ascend_pd.check.judge import judge_spec, require_startable

__all__ = ["Finding", "Severity", "has_errors", "judge_spec", "require_startable"]
